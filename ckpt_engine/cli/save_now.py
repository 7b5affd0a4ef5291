"""`ckpt save-now`: let a run that is being trained take a snapshot at the end of its step."""

from __future__ import annotations

import click

from ckpt_engine.cli.output import json_option, print_json
from ckpt_engine.cli.stop import ask_trainer, seconds_of, wait_for
from ckpt_engine.config import load_config
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.open import open_storage
from ckpt_engine.writer import control


@click.command("save-now", short_help="Take a snapshot of a run that is being trained.")
@click.argument("root")
@click.option("--wait", "wait", metavar="DURATION", help="Wait at most so long until it is durable.")
@json_option
def command(root: str, wait: str | None, as_json: bool) -> None:
    """Ask the run at ROOT, on this machine, for a snapshot at the end of its step."""
    seconds = seconds_of(wait)
    tier = load_config(root).tiers[0]
    nearest = Repository(open_storage(tier.url, tier.for_storage()))
    before = {parsed.id for parsed in nearest.ids()} if seconds is not None else set()
    url = ask_trainer(root, control.SAVE)
    new: list[str] = []
    if seconds is not None:

        def found() -> bool:
            new[:] = [parsed.id for parsed in nearest.ids() if parsed.id not in before]
            return bool(new)

        wait_for(found, seconds, f"no new snapshot at {url}")
    if as_json:
        print_json({"root": url, "asked": True, "snapshot": new[-1] if new else None})
    elif new:
        click.echo(f"{new[-1]} is durable at {url}")
    else:
        click.echo(f"asked: the run at {url} takes a snapshot at the end of its step")
