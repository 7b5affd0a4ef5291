"""`ckpt verify-resume`: does the user's own script continue, bit for bit, where it is resumed?"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import click

from ckpt_engine.cli.output import fields_of, json_option, print_json, print_text
from ckpt_engine.tools.rehearsal_runs import Runs, scratch_folder

NOT_SEEDED = 3
"""Exit code where two runs from the start differ."""


@click.command(
    "verify-resume",
    short_help="Prove that a script resumes bit for bit.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--steps", type=click.IntRange(min=2), default=20, show_default=True, help="How far each run goes.")
@click.option(
    "--kill-at", type=click.IntRange(min=1), help="Resume from this step's snapshot (default: half of --steps)."
)
@click.option("--timeout", type=float, default=3600.0, show_default=True, help="Seconds that each run may take.")
@click.option("--scratch", type=click.Path(path_type=Path), help="A new folder for snapshots and output, kept.")
@json_option
@click.argument("words", metavar="-- COMMAND", nargs=-1, type=click.UNPROCESSED)
def command(
    steps: int,
    kill_at: int | None,
    timeout: float,
    scratch: Path | None,
    as_json: bool,
    words: tuple[str, ...],
) -> None:
    """Run a training command, resume it in the middle, and compare.

    The command runs as it is, also one that starts several ranks, with its snapshots of every step in a scratch folder:
    twice from the start, and once resumed from what the first run had at --kill-at. All steps and snapshots after that
    are compared bit for bit with those of the first run, and the first batch, random stream, learning rate or tensor
    that differs is named with its likely cause. Ends with exit code 1 if there is one, and with 3 if two runs from the
    start differ already, because nothing seeds them.
    """
    at = steps // 2 if kill_at is None else kill_at
    if not words:
        raise click.UsageError("give the command after the options: ckpt verify-resume -- python train.py ...")
    if at >= steps:
        raise click.UsageError(f"--kill-at {at} must be less than --steps {steps}")
    with scratch_folder(scratch) as place:
        code = _rehearse(Runs(words, place, timeout), steps, at, None if scratch is None else place, as_json)
    sys.exit(code)


def _rehearse(runs: Runs, steps: int, at: int, kept: Path | None, as_json: bool) -> int:
    """All runs, and what they show; the exit code."""
    proof, fresh = runs.rehearse(steps, at, (lambda _: None) if as_json else partial(print_text, err=True))
    seeded = fresh is None or fresh.streams_only
    if as_json:
        print_json(
            {
                "exact": proof.resumed is None,
                "seeded": seeded,
                "steps": steps,
                **fields_of(proof),
                "fresh": fresh,
                "scratch": kept and str(kept),
            }
        )
    else:
        if fresh is not None and not seeded:
            print_text(f"not seeded: two runs from the start differ at step {fresh.step}, before anything is resumed")
            print_text(*fresh.lines())
        blame = "NOT EXACT" if seeded else "the restart differs as well, which may have the same cause"
        print_text(*proof.lines("the uninterrupted run up to the end", blame))
        if fresh is not None and seeded:
            print_text(f"note: {fresh.first} differs from start to start: {fresh.cause}")
        if kept is not None:
            print_text(f"snapshots and output are in {kept}")
    return NOT_SEEDED if not seeded else 0 if proof.resumed is None else 1
