"""The steps that a run has recorded behind each of its snapshots."""

from __future__ import annotations

from ckpt_engine.store.names import ParsedId
from ckpt_engine.store.rows import read_lives
from ckpt_engine.tools.stored_run import Run


def recorded_behind(run: Run) -> dict[ParsedId, int]:
    """The snapshots with recorded steps behind them, oldest first, and the last such step of each."""
    from ckpt_engine.probe.recorder import NOTE  # torch
    from ckpt_engine.probe.repeated_steps import steps_behind

    lives, found = read_lives((place.storage for place in run.places), 0), {}
    for parsed, holders in run.holders.items() if lives else ():
        saved = holders[0].read(parsed.id).notes.get(NOTE)
        rows = steps_behind(lives, saved["calls"]) if saved else {}
        found[parsed] = max((row.step for row in rows.values()), default=0)
    return {parsed: last for parsed, last in found.items() if last}
