"""`ckpt verify-resume`: does the user's own script continue, bit for bit, where it is resumed? Decides which runs are
made, and prints the answer.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpt_engine.cli.output import fields_of, json_option, print_json, print_text
from ckpt_engine.cli.rehearsal_runs import Proof, Runs, scratch_folder
from ckpt_engine.cli.suite import Suite, verify_suite
from ckpt_engine.errors import ResumeError
from ckpt_engine.observe.units import count

if TYPE_CHECKING:
    from ckpt_engine.cli.verdict import FirstDifference


NOT_SEEDED = 3
"""Exit code where two runs from the start differ."""


@click.command(
    "verify-resume",
    short_help="Prove that a script resumes bit for bit.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--steps", type=click.IntRange(min=2), default=20, show_default=True, help="How far each run goes.")
@click.option("--kill-at", type=click.IntRange(min=1), help="Resume from this step's snapshot (default: half of them).")
@click.option("--timeout", type=float, default=3600.0, show_default=True, help="Seconds that each run may take.")
@click.option("--scratch", type=click.Path(path_type=Path), help="A new folder for snapshots and output, kept.")
@click.option("--pytest", "suite", is_flag=True, help="Run a test suite with us in every Lightning Trainer instead.")
@json_option
@click.argument("words", metavar="-- COMMAND", nargs=-1, type=click.UNPROCESSED)
def command(
    steps: int,
    kill_at: int | None,
    timeout: float,
    scratch: Path | None,
    suite: bool,
    as_json: bool,
    words: tuple[str, ...],
) -> None:
    """Run a training command, resume it in the middle, and compare.

    The command runs as it is, also one that starts several ranks, with its snapshots of every step in a scratch folder:
    twice from the start, and once resumed from what the first run had at --kill-at. All steps and snapshots after that
    are compared bit for bit with those of the first run, and the first batch, random stream, learning rate or tensor
    that differs is named with its likely cause. Ends with exit code 1 if there is one, and with 3 if two runs from the
    start differ already, as nothing seeds them.

    With --pytest the words are arguments of pytest. The suite runs once without us, and once with AdaptiveCheckpoint in
    every Lightning Trainer that it makes. Ends with exit code 1 if a test fails that passes without us.
    """
    at = steps // 2 if kill_at is None else kill_at
    if not words and not suite:
        raise click.UsageError("give the command after the options: ckpt verify-resume -- python train.py ...")
    if at >= steps:
        raise click.UsageError(f"--kill-at {at} must be less than --steps {steps}")
    with scratch_folder(scratch) as place:
        if suite:
            code = 0 if verify_suite(Suite(words, place, timeout, as_json), as_json=as_json) else 1
        else:
            code = _rehearse(Runs(words, place, timeout), steps, at, None if scratch is None else place, as_json)
    sys.exit(code)


def _rehearse(runs: Runs, steps: int, at: int, kept: Path | None, as_json: bool) -> int:
    """All runs, and what they show; the exit code."""

    def say(text: str) -> None:
        if not as_json:
            print_text(text, err=True)

    say(f"run 1: from the start to step {steps}")
    roots = runs.run("whole", steps + 1)
    from ckpt_engine.cli import verdict  # torch

    whole = runs.opened("whole")
    starts = [(run, early[-1]) for run in whole if (early := [one for one in run.holders if one.step <= at])]
    if not starts:
        raise ResumeError(
            f"the script took no snapshot up to step {at}: there is nothing to resume from",
            hint="it needs AdaptiveCheckpoint, or a Checkpointer that saves; else give a later --kill-at and --steps",
        )
    say(f"run 2: from the start to step {at}, once more")
    runs.run("repeated", at + 1)
    fresh, _, _ = verdict.compare(whole, runs.opened("repeated"), 0, at, fresh=True)
    say(f"run 3: resumed at step {at}, to step {steps}")
    proof = runs.prove("resumed", starts, steps, roots)
    ends = (max(one.step for run in found for one in run.holders) for found in (whole, runs.opened("resumed")))
    proof = replace(proof, resumed=proof.resumed or verdict.judge_end(*ends))
    seeded = fresh is None or fresh.streams_only
    if as_json:
        answer = {"exact": proof.resumed is None, "seeded": seeded, "steps": steps, **fields_of(proof)}
        print_json({**answer, "fresh": fresh, "scratch": kept and str(kept)})
    else:
        _print(proof, fresh, seeded=seeded)
        if kept is not None:
            print_text(f"snapshots and output are in {kept}")
    return NOT_SEEDED if not seeded else 0 if proof.resumed is None else 1


def _print(proof: Proof, fresh: FirstDifference | None, *, seeded: bool) -> None:
    if fresh is not None and not seeded:
        print_text(f"not seeded: two runs from the start differ at step {fresh.step}, before anything is resumed")
        print_text(*fresh.lines())
    if proof.resumed is None:
        what = f"{count(proof.snapshots, 'snapshot')}, {count(proof.values, 'value')}"
        print_text(
            f"exact: resumed at step {proof.killed_after}, equal to the uninterrupted run up to the end ({what})"
        )
    else:
        blamed = "NOT EXACT" if seeded else "the restart differs as well, which may have the same cause"
        print_text(f"{blamed}: the runs differ at step {proof.resumed.step} after the restart")
    if lines := proof.lines():
        print_text(*lines)
    if fresh is not None and seeded:
        print_text(f"note: {fresh.first} differs from start to start: {fresh.cause}")
