"""`ckpt stop`: let a run that is being trained save its state and end."""

from __future__ import annotations

import click

from ckpt_engine.cli.asking import ask_trainer, is_served, seconds_of, wait_for
from ckpt_engine.cli.output import json_option, print_json
from ckpt_engine.persist import control


@click.command("stop", short_help="Save and end a run that is being trained.")
@click.argument("root")
@click.option("--wait", "wait", metavar="DURATION", help="Wait at most so long until it has ended.")
@json_option
def command(root: str, wait: str | None, as_json: bool) -> None:
    """Ask the run at ROOT, on this machine, for a snapshot at the end of its step, and to end with it.

    Its process ends with 0, and a restart goes on from there.
    """
    seconds = seconds_of(wait)
    url = ask_trainer(root, control.STOP)
    if seconds is not None:
        wait_for(lambda: not is_served(url), seconds, f"the run at {url} did not end")
    if as_json:
        print_json({"root": url, "asked": True, "ended": seconds is not None})
    elif seconds is not None:
        click.echo(f"the run at {url} has ended")
    else:
        click.echo(f"asked: the run at {url} takes a snapshot at the end of its step, and ends")
