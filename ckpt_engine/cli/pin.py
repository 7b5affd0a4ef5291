"""`ckpt pin` and `ckpt unpin`: keep snapshots whatever retention says, and leave them to it again."""

from __future__ import annotations

import dataclasses

import click

from ckpt_engine.cli.output import age, count, json_option, print_json, print_table
from ckpt_engine.cli.root import find_snapshot, open_places
from ckpt_engine.config import load_config
from ckpt_engine.errors import StorageMissingError
from ckpt_engine.store import pins
from ckpt_engine.store.names import parse_id
from ckpt_engine.store.repository import Repository


@click.command("pin", short_help="Keep snapshots whatever retention says.")
@click.argument("root")
@click.argument("snapshots", nargs=-1, metavar="[SNAPSHOT]...")
@click.option("--note", "--tag", "note", default="", help="Why, for people: `ckpt ls` shows it.")
@json_option
def command(root: str, snapshots: tuple[str, ...], note: str, as_json: bool) -> None:
    """Keep SNAPSHOTs at ROOT until they are unpinned; without any, list the pins.

    With a ckpt.yaml they are pinned on each of its tiers that has them. Works while the run is being written. Pinning
    again replaces the note.
    """
    places = [repository for _, repository in open_places(load_config(root))]
    nearest = places[0]
    wanted = dict.fromkeys(find_snapshot(nearest, name) for name in snapshots)
    made = [pins.pin(nearest, snapshot, note) for snapshot in wanted]
    for repository in places[1:]:
        there = {parsed.id for parsed in repository.ids()}
        for snapshot in wanted:
            if snapshot in there:
                pins.pin(repository, snapshot, note)
    shown = made or pins.pins(nearest.storage)
    if as_json:
        print_json({"root": nearest.storage.url, "pins": [dataclasses.asdict(pin) for pin in shown]})
    elif made:
        for pin in made:
            click.echo(f"{pin.id}  {pin}")
    else:
        if shown:
            print_table(("snapshot", "pinned", "note"), [(pin.id, age(pin.created), pin.note) for pin in shown])
        click.echo(f"{count(len(shown), 'pin')} at {nearest.storage.url}")


@click.command("unpin", short_help="Leave snapshots to retention again.")
@click.argument("root")
@click.argument("snapshots", nargs=-1, required=True, metavar="SNAPSHOT...")
@json_option
def unpin(root: str, snapshots: tuple[str, ...], as_json: bool) -> None:
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
