"""`ckpt ls`: the snapshots of a run."""

from __future__ import annotations

import dataclasses

import click

from ckpt_engine.cli.output import age, console, count, json_option, metrics, print_json, print_table, table
from ckpt_engine.cli.root import open_root
from ckpt_engine.observe import units
from ckpt_engine.store import layout
from ckpt_engine.store.repository import Listing, Repository


@click.command("ls")
@click.argument("root")
@json_option
def command(root: str, as_json: bool) -> None:
    """List the snapshots at ROOT, oldest first."""
    repository = open_root(root)
    listing = repository.scan()
    record = repository.record()
    on_disk = sum(item.nbytes for item in repository.storage.list(layout.DATA))
    if as_json:
        print_json(
            {
                "root": repository.storage.url,
                "run": record.run if record else None,
                "data_bytes": on_disk,
                "snapshots": [dataclasses.asdict(info) for info in listing.snapshots],
                "damaged": [
                    {"id": bad.id, "code": bad.error.code, "why": bad.error.message} for bad in listing.damaged
                ],
            }
        )
    else:
        _print(repository, listing, on_disk)


def _print(repository: Repository, listing: Listing, on_disk: int) -> None:
    out = console()
    if listing.snapshots:
        shown = table("snapshot", "step", "epoch", "taken", "size", "why", "metrics", numbers=("step", "epoch", "size"))
        for info in listing.snapshots:
            epoch = "" if info.epoch is None else str(info.epoch)
            shown.add_row(
                info.id,
                f"{info.step:,}",
                epoch,
                age(info.created),
                units.size(info.nbytes),
                info.reason,
                metrics(info.metrics),
            )
        print_table(out, shown)
    for bad in listing.damaged:
        out.print(f"{bad.id}  damaged: {bad.error}", style="red")
    total = f"{count(len(listing.snapshots), 'snapshot')}, {units.size(on_disk)} on disk at {repository.storage.url}"
    out.print(f"{total}; {len(listing.damaged)} damaged" if listing.damaged else total)
