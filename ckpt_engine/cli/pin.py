"""`ckpt pin`: keep snapshots whatever retention says."""

from __future__ import annotations

import dataclasses

import click

from ckpt_engine.cli.output import age, count, json_option, print_json, print_table
from ckpt_engine.cli.root import find_snapshot, open_root
from ckpt_engine.store import pins


@click.command("pin")
@click.argument("root")
@click.argument("snapshots", nargs=-1, metavar="[SNAPSHOT]...")
@click.option("--note", default="", help="Why, for people.")
@json_option
def command(root: str, snapshots: tuple[str, ...], note: str, as_json: bool) -> None:
    """Keep SNAPSHOTs at ROOT until they are unpinned; without any, list the pins.

    Works while the run is being written. Pinning again replaces the note.
    """
    repository = open_root(root)
    wanted = dict.fromkeys(find_snapshot(repository, name) for name in snapshots)
    made = [pins.pin(repository, snapshot, note) for snapshot in wanted]
    shown = made or pins.pins(repository.storage)
    if as_json:
        print_json({"root": repository.storage.url, "pins": [dataclasses.asdict(pin) for pin in shown]})
    elif made:
        for pin in made:
            click.echo(f"{pin.id}  {pin}")
    else:
        if shown:
            print_table(("snapshot", "pinned", "note"), [(pin.id, age(pin.created), pin.note) for pin in shown])
        click.echo(f"{count(len(shown), 'pin')} at {repository.storage.url}")
