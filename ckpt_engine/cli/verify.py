"""`ckpt verify`: reads every byte of a run again, and says what is damaged and which tensor it hits."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import click

from ckpt_engine.cli.output import json_option, print_away, print_json, print_text, progress
from ckpt_engine.cli.root import open_run, snapshot_arguments, storage_options
from ckpt_engine.observe import units
from ckpt_engine.observe.units import count
from ckpt_engine.restore.choose import UnreachableTier
from ckpt_engine.tools.check_run import CheckedCopies, Verdict, all_ok, check_run
from ckpt_engine.tools.stored_run import Run

MAX_SHOWN = 20
"""Problems of one snapshot that are printed; JSON has all of them."""


@click.command("verify", short_help="Check every stored byte of every copy.")
@snapshot_arguments()
@storage_options
@json_option
def command(root: str, snapshots: tuple[str, ...], as_json: bool) -> None:
    """Read every byte of SNAPSHOTs (default: all) again and compare it with its digest.

    With a ckpt.yaml, every copy on every tier is read. Names the damaged tensors, and ends with exit code 1 if any copy
    is damaged. Without SNAPSHOTs all other files of the run are checked as well.
    """
    run = open_run(root)
    checked, away = check_run(run, snapshots, partial(progress, "verifying", hidden=as_json))
    print_check(root, run, checked, away, as_json=as_json, is_whole_run=not snapshots)
    sys.exit(int(not all_ok(checked)))


def print_check(
    root: str,
    run: Run,
    checked: Sequence[CheckedCopies],
    away: Sequence[UnreachableTier],
    *,
    as_json: bool,
    is_whole_run: bool = True,
    repair: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Writes what was found.

    Args:
        root: the run, as the user names it.
        is_whole_run: all of it was checked.
        repair: what a repair has done before that; empty: there was none.
    """
    if as_json:
        print_json({**_json(run, checked, away), **repair})
    else:
        for copies in checked:
            if run.is_tiered:
                print_text(copies.url, bold=True)
            _print_verdicts(copies.verdicts)
            for problem in copies.others:
                print_text(f"{problem.file}  {'DAMAGED' if problem.is_damage else 'COULD NOT BE READ'}", fg="red")
                print_text(f"  [{problem.code}] {problem.message}")
        verdicts = [verdict for copies in checked for verdict in copies.verdicts]
        whole = sum(verdict.ok and not verdict.forgotten for verdict in verdicts)
        read_bytes = sum(verdict.read_bytes for verdict in verdicts)
        total = count(len(verdicts), "copy" if run.is_tiered else "snapshot")
        damaged = sum(len(copies.others) for copies in checked)
        others = f", {count(damaged, 'other file')} damaged" if damaged else ""
        print_text(f"{whole:,} of {total} whole{others}, {units.size(read_bytes)} read")
        print_away(away)
        if is_whole_run and not all(one.ok for one in verdicts) and not any(one.partial for one in verdicts):
            tries = repair.get("dry_run", not repair)
            print_text(*_next(root, checked, is_tiered=run.is_tiered, tries=bool(tries)))


def _next(root: str, checked: Sequence[CheckedCopies], *, is_tiered: bool, tries: bool) -> list[str]:
    """What a resume takes now, and what to do; `tries`: the places that are known may still mend it."""
    by_parity = any(one.mendable for copies in checked for one in copies.problems)
    source = (
        "its parity or second copy"
        if by_parity
        else "the other tiers"
        if is_tiered and tries
        else "another copy of the run"
    )
    known = by_parity or (is_tiered and tries)
    mends = f"`ckpt repair {shlex.quote(root)}{'' if known else ' --from OTHER'}` mends it from {source}"
    there = [one for copies in checked for one in copies.verdicts if not one.forgotten and not one.partial]
    whole = [
        one for one in there if all(problem.mendable for problem in one.problems)
    ]  # a load mends those as it reads
    if not whole:
        return [
            "no snapshot is whole here: a resume is refused",
            f"do:  {mends}; or start in a new folder",
        ]
    newest = max(whole, key=lambda one: one.snapshot)
    joint = ", or a newer one whose copies complete each other" if is_tiered else ""
    return [
        f"a resume takes {newest.snapshot}{joint}",
        f"do:  {mends}; `ckpt cp {shlex.quote(root)} NEW` copies what is whole to a new place",
    ]


def _json(run: Run, checked: Sequence[CheckedCopies], away: Sequence[UnreachableTier]) -> dict[str, object]:
    rows = [
        {
            "id": verdict.snapshot,
            "tier": copies.url,
            "ok": verdict.ok,
            "forgotten": verdict.forgotten,
            "partial": verdict.partial,
            "read_bytes": verdict.read_bytes,
            "problems": verdict.problems,
        }
        for copies in checked
        for verdict in copies.verdicts
    ]
    others = [
        {"tier": copies.url, "file": problem.file, "code": problem.code, "message": problem.message}
        for copies in checked
        for problem in copies.others
    ]
    return {"root": run.tiers[0], "ok": all_ok(checked), "snapshots": rows, "others": others, "away": away}


def _print_verdicts(verdicts: Sequence[Verdict]) -> None:
    for verdict in verdicts:
        if verdict.forgotten:
            print_text(f"{verdict.snapshot}  removed by retention meanwhile")
        elif verdict.ok:
            shares = f": the shares of {verdict.partial}; the rest is on other nodes" if verdict.partial else ""
            print_text(f"{verdict.snapshot}  ok{shares}", fg="green")
        else:
            print_text(f"{verdict.snapshot}  DAMAGED", fg="red")
            print_text(*(f"  {problem}" for problem in verdict.problems[:MAX_SHOWN]))
            if len(verdict.problems) > MAX_SHOWN:
                print_text(f"  ... and {len(verdict.problems) - MAX_SHOWN:,} more")
