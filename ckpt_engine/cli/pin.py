"""`ckpt pin`: keep snapshots whatever retention says."""

from __future__ import annotations

import dataclasses

import click

from ckpt_engine.cli.output import age, count, json_option, print_json, print_table
from ckpt_engine.cli.root import find_snapshot, open_places
from ckpt_engine.config import load_config
from ckpt_engine.store import pins


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
