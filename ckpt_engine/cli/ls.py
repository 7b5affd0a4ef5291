"""`ckpt ls`: the snapshots of a run, and which tiers have them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ckpt_engine.cli.output import (
    fields_of,
    json_option,
    metrics,
    print_away,
    print_json,
    print_table,
    print_text,
    say_waiting,
)
from ckpt_engine.cli.root import open_run, options_of, root_argument, storage_options
from ckpt_engine.errors import CkptError
from ckpt_engine.observe import units
from ckpt_engine.observe.units import age, count
from ckpt_engine.restore.choose import UnreachableTier
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.tools.listing import TierListing, listings, merged, named_branches, pin_of
from ckpt_engine.tools.stored_run import Run, repository_of, runs_below


@click.command("ls", short_help="List the snapshots of a run, and where they are.")
@root_argument
@click.option("--lines", is_flag=True, help="Show the lines of history even if there is only one.")
@storage_options
@json_option
def command(root: str, lines: bool, as_json: bool) -> None:
    """List the snapshots at ROOT, oldest first, and where they are if ROOT is a ckpt.yaml with several tiers.

    In a folder that holds the folders of several runs: list the runs. A forked run is listed with its origin.
    """
    if below := runs_below(root):
        _print_runs(root, below, as_json=as_json)
        return
    run = open_run(root)
    tiers, away = listings(run, say_waiting)
    if as_json:
        _print_json(run, tiers, away)
    else:
        _print(root, run, tiers, away, most_hidden=0 if lines else 1)


def _print_runs(root: str, folders: Sequence[Path], *, as_json: bool) -> None:
    """Of each run how far it is; one that cannot be read has its error instead."""
    rows, facts = list[dict[str, Any]](), dict[str, Any]()
    tier = options_of(root).tiers[0]
    for folder in folders:
        try:
            place = repository_of(tier.model_copy(update={"url": str(folder)}))
            place.record()
            found = place.scan().snapshots
            newest = found[-1] if found else None
            facts = {"snapshots": len(found), "step": newest and newest.step, "created": newest and newest.created}
        except CkptError as err:
            facts = {"error": str(err)}
        rows.append({"root": str(folder), **facts})
    if as_json:
        print_json({"runs": rows})
    else:
        table = [
            (
                os.path.relpath(row["root"], Path(os.path.expandvars(root)).expanduser()),
                f"{row['snapshots']:,}" if "snapshots" in row else "",
                f"{row['step']:,}" if row.get("step") is not None else "",
                age(row["created"]) if row.get("created") else row.get("error", ""),
            )
            for row in rows
        ]
        print_table(("run", "snapshots", "step", "newest"), table, numbers=("snapshots", "step"))
        print_text(f"{count(len(rows), 'run')} below {root}")


def _print_json(run: Run, tiers: Sequence[TierListing], away: Sequence[UnreachableTier]) -> None:
    rows = merged(tiers)
    (found, named), record = named_branches(rows), run.record
    print_json(
        {
            "root": tiers[0].url,
            "run": record and record.run,
            "fork": run.fork,
            "data_bytes": sum(tier.data_bytes for tier in tiers),
            "tiers": [tier.to_json() for tier in tiers],
            "away": away,
            "snapshots": [
                {
                    **fields_of(info),
                    "branch": named[info.id],
                    "tiers": [tier.url for tier in holders],
                    "pinned": pin.note if (pin := pin_of(info.id, holders)) else None,
                }
                for info, holders in rows
            ],
            "branches": [
                {
                    "id": branch.id,
                    "resumed": number == 0,
                    "snapshots": len(branch.snapshots),
                    "newest": branch.newest.id,
                    "step": branch.newest.step,
                }
                for number, branch in enumerate(found)
            ],
            "damaged": [
                {"id": bad.id, "tier": tier.url, "code": bad.error.code, "why": bad.error.message}
                for tier in tiers
                for bad in tier.listing.damaged
            ],
        }
    )


def _print(
    root: str, run: Run, tiers: Sequence[TierListing], away: Sequence[UnreachableTier], *, most_hidden: int
) -> None:
    """Write the snapshots; `most_hidden`: so many branches are not worth a line."""
    rows = merged(tiers)
    found, named = named_branches(rows)
    is_tiered, has_branches = run.is_tiered, len(found) > most_hidden
    if rows:
        where = (*(("tiers",) if is_tiered else ()), *(("branch",) if has_branches else ()))
        titles = ("snapshot", "step", "epoch", "taken", "size", *where, "why", "metrics")
        print_table(
            titles,
            [
                _row(info, holders, named[info.id] if has_branches else None, is_tiered=is_tiered)
                for info, holders in rows
            ],
            numbers=("step", "epoch", "size"),
            ids="snapshot",
        )
    for tier in tiers:
        on_tier = f" on tier {tier.number}" if is_tiered else ""
        print_text(*(f"{bad.id}  damaged{on_tier}: {bad.error}" for bad in tier.listing.damaged), fg="red")
    for tier in tiers:
        damaged = f"; {len(tier.listing.damaged)} damaged" if tier.listing.damaged else ""
        total = f"{count(len(tier.listing.snapshots), 'snapshot')}, {units.size(tier.data_bytes)} on disk at {tier.url}"
        print_text(f"{f'tier {tier.number}: ' if is_tiered else ''}{total}{damaged}")
    for number, branch in enumerate(found if has_branches else ()):
        many = f"branch {branch.id}: {count(len(branch.snapshots), 'snapshot')} up to step {branch.newest.step:,}"
        fate = f"stays until `ckpt prune {root} --branch {branch.id}`" if number else "a resume continues this one"
        print_text(f"{many}; {fate}")
    if run.fork is not None:
        print_text(f"forked from {run.fork}")
    print_away(away)


def _row(info: SnapshotInfo, holders: Sequence[TierListing], branch: str | None, *, is_tiered: bool) -> tuple[str, ...]:
    epoch = "" if info.epoch is None else str(info.epoch)
    where = [" ".join(str(tier.number) for tier in holders)] if is_tiered else []
    where += [branch] if branch is not None else []
    size, pin = units.size(info.nbytes), pin_of(info.id, holders)
    why = "; ".join(str(one) for one in (info.reason, info.partial, pin) if one)
    return info.id, f"{info.step:,}", epoch, age(info.created), size, *where, why, metrics(info.metrics)
