"""`ckpt verify`: whether every stored byte is what was written."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import click

from ckpt_engine.cli.check import Checker, Problem, Verdict
from ckpt_engine.cli.output import count, json_option, print_json, progress
from ckpt_engine.cli.root import find_snapshot, open_root
from ckpt_engine.observe import units

MAX_SHOWN = 20
"""Problems of one snapshot that are printed; JSON has all of them."""


@click.command("verify")
@click.argument("root")
@click.argument("snapshots", nargs=-1, metavar="[SNAPSHOT]...")
@json_option
def command(root: str, snapshots: tuple[str, ...], as_json: bool) -> None:
    """Read every byte of SNAPSHOTs (default: all) again and compare it with its digest.

    Says which tensors are hit, and ends with exit code 1 if any snapshot is damaged.
    """
    repository = open_root(root)
    wanted = list(dict.fromkeys(find_snapshot(repository, name) for name in snapshots))
    ids = wanted or [parsed.id for parsed in repository.ids()]
    nbytes = {info.id: info.nbytes for info in repository.list()}
    with progress(hidden=as_json) as bar:
        task = bar.add_task("verifying", total=sum(nbytes.get(snapshot, 0) for snapshot in ids))
        checker = Checker(repository, lambda read: bar.advance(task, read))
        verdicts = [checker.check(snapshot) for snapshot in ids]
    if as_json:
        print_json(_json(repository.storage.url, verdicts))
    else:
        _print(verdicts)
    if not all(verdict.ok for verdict in verdicts):
        sys.exit(1)


def _json(url: str, verdicts: Sequence[Verdict]) -> dict[str, object]:
    rows = [
        {
            "id": verdict.snapshot,
            "ok": verdict.ok,
            "forgotten": verdict.forgotten,
            "read_bytes": verdict.read_bytes,
            "problems": [dataclasses.asdict(problem) for problem in verdict.problems],
        }
        for verdict in verdicts
    ]
    return {"root": url, "ok": all(verdict.ok for verdict in verdicts), "snapshots": rows}


def _print(verdicts: Sequence[Verdict]) -> None:
    for verdict in verdicts:
        if verdict.forgotten:
            click.echo(f"{verdict.snapshot}  removed by retention meanwhile")
        elif verdict.ok:
            click.secho(f"{verdict.snapshot}  ok", fg="green")
        else:
            click.secho(f"{verdict.snapshot}  DAMAGED", fg="red")
            for problem in verdict.problems[:MAX_SHOWN]:
                click.echo(f"  {_line(problem)}")
            if len(verdict.problems) > MAX_SHOWN:
                click.echo(f"  ... and {len(verdict.problems) - MAX_SHOWN:,} more")
    whole = sum(verdict.ok and not verdict.forgotten for verdict in verdicts)
    read_bytes = sum(verdict.read_bytes for verdict in verdicts)
    click.echo(f"{whole} of {count(len(verdicts), 'snapshot')} whole, {units.size(read_bytes)} read")


def _line(problem: Problem) -> str:
    where = ": ".join(part for part in (problem.entry, problem.file) if part)
    return f"[{problem.code}] {where}: {problem.message}" if where else f"[{problem.code}] {problem.message}"
