"""`ckpt verify-resume`: does the user's own script continue, bit for bit, after it was killed? Decides which runs are
made, and prints the answer.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpt_engine.cli.output import json_option, print_json, print_text, say_waiting, showing
from ckpt_engine.cli.rehearsal_runs import PythonCommand, Runs, Suite, SuiteReport, Trace
from ckpt_engine.errors import ResumeError
from ckpt_engine.observe.units import count

if TYPE_CHECKING:
    from ckpt_engine.cli.verdict import FirstDifference, Pair


NOT_SEEDED = 3
"""Exit code where two runs from the start differ."""


@dataclass(frozen=True, slots=True)
class Report:
    """The answer.

    Args:
        exact: the resumed run equals the uninterrupted one in every snapshot after the restart.
        seeded: two runs from the start are equal, but for random streams that nothing has drawn from.
        killed_after: the step that the killed run had as its last snapshot.
        snapshots, values: how much was compared after the restart.
        resumed: where a resumed run first differs.
        fresh: where two runs from the start first differ, before anything was killed.
        notes: more that is worth knowing.
        scratch: where snapshots and output were kept, or None.
    """

    exact: bool
    seeded: bool
    steps: int
    killed_after: int
    snapshots: int
    values: int
    resumed: FirstDifference | None
    fresh: FirstDifference | None
    notes: tuple[str, ...]
    scratch: str | None


@click.command(
    "verify-resume",
    short_help="Prove that a script resumes bit for bit.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--steps", type=click.IntRange(min=2), default=20, show_default=True, help="How far each run goes.")
@click.option("--kill-at", type=click.IntRange(min=1), help="Kill in the step after this one (default: half of them).")
@click.option("--timeout", type=float, default=3600.0, show_default=True, help="Seconds that each run may take.")
@click.option("--scratch", type=click.Path(path_type=Path), help="A new folder for snapshots and output, kept.")
@click.option("--pytest", "suite", is_flag=True, help="Run a test suite with us in every Lightning Trainer instead.")
@json_option
@click.argument("words", metavar="-- python train.py ...", nargs=-1, type=click.UNPROCESSED)
def command(
    steps: int,
    kill_at: int | None,
    timeout: float,
    scratch: Path | None,
    suite: bool,
    as_json: bool,
    words: tuple[str, ...],
) -> None:
    """Run a training script twice, kill it once in the middle, and compare.

    The script runs as it is, with its snapshots of every step in a scratch folder: once uninterrupted to --steps, and
    once killed with SIGKILL after --kill-at and started again. What both have saved after the restart is compared bit
    for bit, and the first tensor, random stream, data position or batch that differs is named, with the hidden state
    that explains it or its usual cause. Ends with exit code 1 if there is one, and with 3 if two runs from the start
    differ already, as nothing seeds them.

    With --pytest the words are arguments of pytest. The suite runs once without us, and once with AdaptiveCheckpoint in
    every Lightning Trainer that it makes. Ends with exit code 1 if a test fails that passes without us.
    """
    if suite:
        _verify_suite(words, _new_scratch(scratch), timeout, as_json=as_json, keep=scratch is not None)
        return
    if not words:
        raise click.UsageError("give the command after the options: ckpt verify-resume -- python train.py ...")
    at = steps // 2 if kill_at is None else kill_at
    if at >= steps:
        raise click.UsageError(f"--kill-at {at} must be less than --steps {steps}")
    script = PythonCommand.parse(words)
    place = _new_scratch(scratch)
    report = None
    try:
        report = _rehearse(Runs(script, place, steps, timeout), steps, at, quiet=as_json)
    finally:
        keep = scratch is not None or report is None
        if not keep:
            shutil.rmtree(place, ignore_errors=True)
    if scratch is not None:
        report = replace(report, scratch=str(place))
    if as_json:
        print_json(report)
    else:
        _print(report)
    if not report.seeded:
        sys.exit(NOT_SEEDED)
    if not report.exact:
        sys.exit(1)


def _verify_suite(words: tuple[str, ...], scratch: Path, timeout: float, *, as_json: bool, keep: bool) -> None:
    report, line = None, "run 1: without ckpt-engine"

    def say(now: str, last: bool) -> None:
        nonlocal line
        line = now
        if last and not as_json:
            say_waiting(now)

    try:
        with showing(lambda: line, hidden=as_json):
            report = Suite(words, scratch, timeout, say).compare()
    finally:
        if report is not None and not keep:
            shutil.rmtree(scratch, ignore_errors=True)
    if as_json:
        print_json(report)
    else:
        _print_suite(report)
    if report.new_failures:
        sys.exit(1)


def _print_suite(report: SuiteReport) -> None:
    for title, rows in (
        ("fails with AdaptiveCheckpoint in every Trainer", report.new_failures),
        ("unsteady: fails now and then without ckpt-engine too", report.unsteady),
        ("left out, as it fails without ckpt-engine", report.failed_before),
    ):
        for row in rows:
            print_text(f"{title}: {row.test}")
            print_text(f"  {row.line}")
    print_text(
        f"{count(len(report.new_failures), 'new failure')}; {count(report.passed, 'test')} passed with and without "
        f"ckpt-engine, {report.skipped:,} skipped"
    )


def _new_scratch(wanted: Path | None) -> Path:
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="ckpt-verify-resume-"))
    if wanted.exists():
        raise click.UsageError(f"{wanted} exists already: --scratch makes a new folder")
    wanted.mkdir(parents=True)
    return wanted.absolute()


def _rehearse(runs: Runs, steps: int, at: int, *, quiet: bool) -> Report:
    from ckpt_engine.cli import verdict  # torch

    def say(text: str) -> None:
        if not quiet:
            print_text(text, err=True)

    say(f"run 1: uninterrupted, to step {steps}")
    whole = runs.uninterrupted()
    say(f"run 2: killed in the step after {at}")
    killed = runs.killed(at)
    say("run 3: started again")
    again = runs.again()
    _require_resumed(again, killed)
    notes = _about_folders(whole, killed, again)
    fresh, _ = _compare(runs, ("uninterrupted", "killed"), (whole, killed), (0, at), fresh=True)
    second = "killed"
    if fresh is not None:
        say("not seeded: two runs from the start differ; run 4: started on a snapshot of the first one")
        notes += ("two runs from the start differ, so the restart was compared on a snapshot of the first one",)
        second = runs.cut(at)
        again = runs.again(second)
        _require_resumed(again, killed)
    # The last snapshot may be of a later step, in a loop that does not save every one; both runs end with it.
    span = (at + 1, max(*whole.steps, *again.steps))
    resumed, pairs = _compare(runs, ("uninterrupted", second), (whole, again), span, fresh=False)
    if resumed is None:
        resumed = verdict.judge_end(max(whole.steps), max(again.steps, default=0))
    if resumed is not None:
        resumed = verdict.explain(resumed, whole, killed, again, runs.not_restored(second))
    if not pairs and resumed is None:
        raise ResumeError(
            f"there is no snapshot of both runs between step {span[0]} and step {span[1]}",
            hint="give later --steps: the script saves too seldom, or it ended before",
        )
    folders = zip(runs.folders("uninterrupted"), runs.folders(second), strict=False)
    if resumed is None and (lonely := sum(verdict.without_counterpart(a, b, *span) for a, b in folders)):
        notes += (f"not compared, for want of a counterpart: {count(lonely, 'snapshot')} of the uninterrupted run",)
    return Report(
        exact=resumed is None,
        seeded=fresh is None or fresh.streams_only,
        steps=steps,
        killed_after=max(step for step in killed.steps if step <= at),
        snapshots=len(pairs),
        values=sum(pair.values for pair in pairs),
        resumed=resumed,
        fresh=fresh,
        notes=notes,
        scratch=None,
    )


def _compare(
    runs: Runs, names: tuple[str, str], traces: tuple[Trace, Trace], steps: tuple[int, int], *, fresh: bool
) -> tuple[FirstDifference | None, list[Pair]]:
    from ckpt_engine.cli import verdict  # torch

    pairs: list[Pair] = []
    for a, b in zip(runs.folders(names[0]), runs.folders(names[1]), strict=False):
        for pair in verdict.compare(a, b, traces, *steps):
            pairs.append(pair)
            divergence = verdict.judge([pair], fresh=fresh)
            if divergence is not None and not (fresh and divergence.streams_only):
                break  # what follows from a difference is of no interest
    pairs.sort(key=lambda pair: pair.step)
    return verdict.judge(pairs, fresh=fresh), pairs


def _require_resumed(again: Trace, killed: Trace) -> None:
    if again.loaded:
        return
    other = ""
    if killed.roots != again.roots:
        other = f"; its run folder was {', '.join(killed.roots)} first and {', '.join(again.roots)} then"
    raise ResumeError(
        f"the script did not resume when it was started again: it loaded no snapshot{other}",
        hint="Lightning: trainer.fit(..., ckpt_path='auto'); plain loops: state = ckpt.load(); "
        "and the same run folder at every start",
    )


def _about_folders(*traces: Trace) -> tuple[str, ...]:
    if len({trace.roots for trace in traces}) == 1:
        return ()
    found = "; ".join(", ".join(trace.roots) for trace in traces)
    return (f"the script names another run folder at each start ({found}): outside of this rehearsal nothing is found",)


def _print(report: Report) -> None:
    what = f"{count(report.snapshots, 'snapshot')}, {count(report.values, 'value')}"
    if report.fresh is not None and not report.seeded:
        print_text(f"not seeded: two runs from the start differ at step {report.fresh.step}, before anything is killed")
        _print_divergence(report.fresh)
    if report.exact:
        print_text(
            f"exact: killed after step {report.killed_after}, equal to the uninterrupted run up to the end ({what})"
        )
    elif report.resumed is not None:
        blamed = "NOT EXACT" if report.seeded else "the restart differs as well, which may have the same cause"
        print_text(f"{blamed}: the runs differ at step {report.resumed.step} after the restart")
        _print_divergence(report.resumed)
    if report.fresh is not None and report.seeded:
        print_text(f"note: {report.fresh.first} differs from start to start: {report.fresh.cause}")
    for note in report.notes:
        print_text(f"note: {note}")
    if report.scratch is not None:
        print_text(f"snapshots and output are in {report.scratch}")


def _print_divergence(divergence: FirstDifference) -> None:
    print_text(f"  first: {divergence.first}")
    for moved in divergence.moved:
        print_text(f"  hidden state that the resume did not put back: {moved}")
    for declared in divergence.declared:
        print_text(f"  the resume report says: {declared}")
    if not divergence.moved and not divergence.declared:
        print_text(f"  usual cause: {divergence.cause}")
    for other in divergence.others:
        print_text(f"  also: {other}")
    if divergence.hidden:
        print_text(f"  and {divergence.hidden:,} more")
