"""`ckpt compact`: writes snapshots again, each as one plain file."""

from __future__ import annotations

from typing import Any

import click

from ckpt_engine.cli.output import json_option, print_answer
from ckpt_engine.cli.root import open_run, snapshot_arguments, storage_options
from ckpt_engine.copy.drop_components import is_compact
from ckpt_engine.copy.make_room import compact
from ckpt_engine.observe import units
from ckpt_engine.store.lease import acquire
from ckpt_engine.tools.stored_run import LATEST


@click.command("compact", short_help="Make snapshots independent of others.")
@snapshot_arguments()
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@storage_options
@json_option
def command(root: str, snapshots: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Write SNAPSHOTs (default: latest) again, each as one plain file that needs no data of others.

    Each one gets a new id and keeps its place in the order. Data that no snapshot needs any more is removed. Every tier
    that has the snapshot writes it again; a pinned one stays as it is. The run must not be training.
    """
    run = open_run(root)
    done: list[dict[str, Any]] = []
    for name in snapshots or (LATEST,):
        snapshot, holders = run.find(name)
        for place in holders:
            manifest = place.read(snapshot)
            new, compacted = None, is_compact(manifest)
            if not dry_run and not compacted:
                with acquire(place.storage) as lease:
                    new = compact(place, lease, snapshot)
            done.append(
                {
                    "id": snapshot,
                    "tier": place.storage.url,
                    "nbytes": manifest.info.nbytes,
                    "is_compact": compacted,
                    "new": new,
                }
            )
    lines = (f"{one['id']} at {one['tier']}: {_fate(**one)}" for one in done)
    print_answer({"root": run.tiers[0], "dry_run": dry_run, "snapshots": done}, *lines, as_json=as_json)


def _fate(nbytes: int, new: str | None, *, is_compact: bool, **_: Any) -> str:
    if is_compact:
        return "needs no other already"
    return f"would write {units.size(nbytes)}" if new is None else f"is {new} now, {units.size(nbytes)}"
