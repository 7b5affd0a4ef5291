"""Pairs the snapshots of two runs that were taken at the same place of the training, and compares each pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_engine.cli.compare import Comparison, Difference
from ckpt_engine.cli.rehearsal.spec import Trace
from ckpt_engine.cli.root import open_run
from ckpt_engine.restore.choose import Candidate, assemble

Place = tuple[int, str, str]
"""Step, batch in the epoch, and kind of the boundary."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two snapshots of the same place.

    Args:
        differences: without those that two correct runs may have.
        values: how many were compared.
        batch: the first batch on the way to this step whose content differs: loader, number in the epoch.
    """

    step: int
    differences: tuple[Difference, ...]
    values: int
    batch: tuple[int, int] | None


def compare(a: Path, b: Path, traces: tuple[Trace, Trace], first: int, last: int) -> Iterator[Pair]:
    """Pairs of steps `first` to `last` in the order of training, compared one by one.

    Args:
        a, b: run folders.
        traces: of the same runs.

    Raises:
        CkptError: a snapshot cannot be read.
    """
    ones, others = _by_place(a, first, last), _by_place(b, first, last)
    for place in [place for place in ones if place in others]:
        comparison = Comparison(ones[place], others[place])
        found = [one for one in comparison if not one.measured]
        yield Pair(place[0], tuple(found), comparison.compared, _batch(traces, place[0]))


def without_counterpart(a: Path, b: Path, first: int, last: int) -> int:
    """How many snapshots of `a` in these steps have none of the same place in `b`."""
    ones, others = _by_place(a, first, last), _by_place(b, first, last)
    return sum(place not in others for place in ones)


def _by_place(folder: Path, first: int, last: int) -> Mapping[Place, Candidate]:
    """The newest snapshot of each place, in the order of training."""
    found: dict[Place, Candidate] = {}
    for parsed, holders in open_run(str(folder)).holders.items():
        if first <= parsed.step <= last:
            candidate = assemble(parsed.id, holders)
            notes = candidate.manifest.notes
            found[parsed.step, str(notes.get("batch")), str(notes.get("kind"))] = candidate
    return found


def _batch(traces: tuple[Trace, Trace], step: int) -> tuple[int, int] | None:
    one, other = (trace.batches.get(step, {}) for trace in traces)
    return next((key for key in sorted(one) if key in other and one[key] != other[key]), None)
