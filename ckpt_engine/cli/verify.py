"""`ckpt verify`: whether every stored byte is what was written."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import click

from ckpt_engine.cli.check import Checker, Problem, Verdict
from ckpt_engine.cli.output import count, json_option, print_away, print_json, progress
from ckpt_engine.cli.root import Run, open_run
from ckpt_engine.errors import CkptError
from ckpt_engine.observe import units
from ckpt_engine.restore.choose import Away
from ckpt_engine.store.repository import Repository

MAX_SHOWN = 20
"""Problems of one snapshot that are printed; JSON has all of them."""


@dataclass(frozen=True, slots=True)
class _Copies:
    """The verdicts on the copies of one place, and what is wrong with its other files."""

    url: str
    verdicts: tuple[Verdict, ...]
    others: tuple[Problem, ...]


@click.command("verify", short_help="Check every stored byte of every copy.")
@click.argument("root")
@click.argument("snapshots", nargs=-1, metavar="[SNAPSHOT]...")
@json_option
def command(root: str, snapshots: tuple[str, ...], as_json: bool) -> None:
    """Read every byte of SNAPSHOTs (default: all) again and compare it with its digest.

    Of a ckpt.yaml every copy on every tier is read. Says which tensors are hit, and ends with exit code 1 if any copy
    is damaged. Without SNAPSHOTs all other files of the run are checked as well.
    """
    run = open_run(root)
    wanted = list(dict.fromkeys(run.find(name)[0] for name in snapshots)) or [parsed.id for parsed in run.holders]
    checked: list[_Copies] = []
    away = list(run.away)
    with progress(hidden=as_json) as bar:
        task = bar.add_task("verifying", total=None)
        sizes = [(place, _sizes(run, place, wanted)) for place in run.places]
        bar.update(task, total=sum(sum(ids.values()) for _, ids in sizes))
        for place, ids in sizes:
            try:
                checker = Checker(place, lambda read: bar.advance(task, read))
                verdicts = tuple(checker.check(snapshot) for snapshot in ids)
                others = () if snapshots else checker.check_others()
            except CkptError as err:
                if not run.is_tiered:
                    raise
                away.append(Away(place.storage.url, err.code, err.message))
            else:
                checked.append(_Copies(place.storage.url, verdicts, others))
    if as_json:
        print_json(_json(run, checked, away))
    else:
        _print(checked, away, is_tiered=run.is_tiered)
    if not _all_ok(checked):
        sys.exit(1)


def _sizes(run: Run, place: Repository, wanted: Sequence[str]) -> dict[str, int]:
    """The wanted snapshots that a place has a copy of, and their bytes as far as they are known."""
    there = {parsed.id for parsed, holders in run.holders.items() if place in holders}
    nbytes: dict[str, int] = {}
    with suppress(CkptError):  # only the bar needs it
        nbytes = {info.id: info.nbytes for info in place.list()}
    return {snapshot: nbytes.get(snapshot, 0) for snapshot in wanted if snapshot in there}


def _all_ok(checked: Sequence[_Copies]) -> bool:
    return all(not copies.others and all(verdict.ok for verdict in copies.verdicts) for copies in checked)


def _json(run: Run, checked: Sequence[_Copies], away: Sequence[Away]) -> dict[str, object]:
    rows = [
        {
            "id": verdict.snapshot,
            "tier": copies.url,
            "ok": verdict.ok,
            "forgotten": verdict.forgotten,
            "partial": verdict.partial and dataclasses.asdict(verdict.partial),
            "read_bytes": verdict.read_bytes,
            "problems": [dataclasses.asdict(problem) for problem in verdict.problems],
        }
        for copies in checked
        for verdict in copies.verdicts
    ]
    others = [
        {"tier": copies.url, "file": problem.file, "code": problem.code, "message": problem.message}
        for copies in checked
        for problem in copies.others
    ]
    left_out = [dataclasses.asdict(one) for one in away]
    return {"root": run.tiers[0], "ok": _all_ok(checked), "snapshots": rows, "others": others, "away": left_out}


def _print(checked: Sequence[_Copies], away: Sequence[Away], *, is_tiered: bool) -> None:
    for copies in checked:
        if is_tiered:
            click.secho(copies.url, bold=True)
        _print_verdicts(copies.verdicts)
        for problem in copies.others:
            click.secho(f"{problem.file}  DAMAGED", fg="red")
            click.echo(f"  [{problem.code}] {problem.message}")
    verdicts = [verdict for copies in checked for verdict in copies.verdicts]
    whole = sum(verdict.ok and not verdict.forgotten for verdict in verdicts)
    read_bytes = sum(verdict.read_bytes for verdict in verdicts)
    total = count(len(verdicts), "snapshot")
    if is_tiered:
        total = "1 copy" if len(verdicts) == 1 else f"{len(verdicts):,} copies"
    damaged = sum(len(copies.others) for copies in checked)
    others = f", {count(damaged, 'other file')} damaged" if damaged else ""
    click.echo(f"{whole:,} of {total} whole{others}, {units.size(read_bytes)} read")
    print_away(away)


def _print_verdicts(verdicts: Sequence[Verdict]) -> None:
    for verdict in verdicts:
        if verdict.forgotten:
            click.echo(f"{verdict.snapshot}  removed by retention meanwhile")
        elif verdict.ok:
            shares = f": the shares of {verdict.partial}; the rest is on other nodes" if verdict.partial else ""
            click.secho(f"{verdict.snapshot}  ok{shares}", fg="green")
        else:
            click.secho(f"{verdict.snapshot}  DAMAGED", fg="red")
            for problem in verdict.problems[:MAX_SHOWN]:
                click.echo(f"  {_line(problem)}")
            if len(verdict.problems) > MAX_SHOWN:
                click.echo(f"  ... and {len(verdict.problems) - MAX_SHOWN:,} more")


def _line(problem: Problem) -> str:
    where = ": ".join(part for part in (problem.entry, problem.file) if part)
    return f"[{problem.code}] {where}: {problem.message}" if where else f"[{problem.code}] {problem.message}"
