"""`ckpt pin` and `ckpt unpin`: except snapshots from retention."""

from __future__ import annotations

import click

from ckpt_engine.cli.output import json_option, print_answer, print_json, print_table, print_text
from ckpt_engine.cli.root import open_run, snapshot_arguments, storage_options
from ckpt_engine.errors import StorageMissingError
from ckpt_engine.observe.units import age, count
from ckpt_engine.store import pins
from ckpt_engine.store.names import parse_id
from ckpt_engine.tools.stored_run import Run


@click.command("pin", short_help="Keep snapshots whatever retention says.")
@snapshot_arguments()
@click.option("--note", "--tag", "note", default="", help="The reason, which `ckpt ls` shows.")
@storage_options
@json_option
def pin(root: str, snapshots: tuple[str, ...], note: str, as_json: bool) -> None:
    """Keep SNAPSHOTs at ROOT until they are unpinned; without any, list the pins.

    With a ckpt.yaml they are pinned on each of its tiers that has them. Works while the run is being written. Pinning
    again replaces the note.
    """
    run = open_run(root, every=True)
    nearest = run.places[0]
    made = [
        nearest_pin
        for snapshot, holders in dict(map(run.find, snapshots)).items()
        for nearest_pin, *_ in [[pins.pin(place, snapshot, note) for place in holders]]
    ]
    shown = made or pins.pins(nearest.storage)
    if as_json:
        print_json({"root": nearest.storage.url, "pins": shown})
    elif made:
        print_text(*(f"{pin.id}  {pin}" for pin in made))
    else:
        if shown:
            print_table(
                ("snapshot", "pinned", "note"), [(pin.id, age(pin.created), pin.note) for pin in shown], ids="snapshot"
            )
        print_text(f"{count(len(shown), 'pin')} at {nearest.storage.url}")


@click.command("unpin", short_help="Leave snapshots to retention again.")
@snapshot_arguments("SNAPSHOT...", least=1)
@storage_options
@json_option
def unpin(root: str, snapshots: tuple[str, ...], as_json: bool) -> None:
    """Remove the pins of SNAPSHOTs at ROOT, on each tier of a ckpt.yaml. Snapshots stay until retention runs."""
    run = open_run(root, every=True)
    wanted = dict.fromkeys(_find(run, name) for name in snapshots)
    was_pinned = {snapshot: sum(pins.unpin(one, snapshot) for one in run.in_use) > 0 for snapshot in wanted}
    lines = (f"{snapshot}  {'unpinned' if was else 'was not pinned'}" for snapshot, was in was_pinned.items())
    print_answer({"root": run.tiers[0], "unpinned": was_pinned}, *lines, as_json=as_json)


def _find(run: Run, name: str) -> str:
    """The snapshot of that name, or one that is gone and whose pin was left behind."""
    try:
        return run.find(name)[0]
    except StorageMissingError:
        if parse_id(name) and any(name in pins.pinned_ids(place.storage) for place in run.places):
            return name
        raise
