"""`ckpt unpin`: leave snapshots to retention again."""

from __future__ import annotations

import click

from ckpt_engine.cli.output import json_option, print_json
from ckpt_engine.cli.root import find_snapshot, open_places
from ckpt_engine.config import load_config
from ckpt_engine.errors import StorageMissingError
from ckpt_engine.store import pins
from ckpt_engine.store.names import parse_id
from ckpt_engine.store.repository import Repository


@click.command("unpin", short_help="Leave snapshots to retention again.")
@click.argument("root")
@click.argument("snapshots", nargs=-1, required=True, metavar="SNAPSHOT...")
@json_option
def command(root: str, snapshots: tuple[str, ...], as_json: bool) -> None:
    """Remove the pins of SNAPSHOTs at ROOT, on each tier of a ckpt.yaml. Nothing else goes before retention runs."""
    places = [repository for _, repository in open_places(load_config(root))]
    wanted = dict.fromkeys(_find(places[0], name) for name in snapshots)
    was_pinned = {snapshot: sum(pins.unpin(one, snapshot) for one in places) > 0 for snapshot in wanted}
    if as_json:
        print_json({"root": places[0].storage.url, "unpinned": was_pinned})
    else:
        for snapshot, was in was_pinned.items():
            click.echo(f"{snapshot}  {'unpinned' if was else 'was not pinned'}")


def _find(repository: Repository, name: str) -> str:
    """The snapshot of that name, or one that is gone and whose pin was left behind."""
    try:
        return find_snapshot(repository, name)
    except StorageMissingError:
        if parse_id(name) and name in pins.pinned_ids(repository.storage):
            return name
        raise
