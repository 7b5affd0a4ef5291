"""`ckpt ls`: the snapshots of a run."""

from __future__ import annotations

import dataclasses

import click

from ckpt_engine.cli.output import age, count, json_option, metrics, print_json, print_table
from ckpt_engine.cli.root import open_root
from ckpt_engine.observe import units
from ckpt_engine.store import layout
from ckpt_engine.store.manifest import SnapshotInfo
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
    if listing.snapshots:
        titles = ("snapshot", "step", "epoch", "taken", "size", "why", "metrics")
        print_table(titles, [_row(info) for info in listing.snapshots], numbers=("step", "epoch", "size"))
    for bad in listing.damaged:
        click.secho(f"{bad.id}  damaged: {bad.error}", fg="red")
    total = f"{count(len(listing.snapshots), 'snapshot')}, {units.size(on_disk)} on disk at {repository.storage.url}"
    click.echo(f"{total}; {len(listing.damaged)} damaged" if listing.damaged else total)


def _row(info: SnapshotInfo) -> tuple[str, ...]:
    epoch = "" if info.epoch is None else str(info.epoch)
    size = units.size(info.nbytes)
    return info.id, f"{info.step:,}", epoch, age(info.created), size, info.reason, metrics(info.metrics)
