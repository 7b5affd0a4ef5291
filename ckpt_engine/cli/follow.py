"""`ckpt follow`: each new snapshot of a run that trains, as another process reads it."""

from __future__ import annotations

import click

from ckpt_engine.cli.output import json_option, print_json, print_text
from ckpt_engine.cli.root import options_of, root_argument, storage_options
from ckpt_engine.observe import units
from ckpt_engine.observe.units import count


@click.command("follow", short_help="Read each new snapshot of a run that trains.")
@root_argument
@click.option("--component", metavar="NAME", help="Only this top-level key of the state. Default: all of them.")
@click.option("--every", default="1 s", show_default=True, metavar="TIME", help="Time between two looks.")
@storage_options
@json_option
def command(root: str, component: str | None, every: str, as_json: bool) -> None:
    """Read each new snapshot of the run at ROOT, verify it, and print a line: its step, and what is new in it.

    The first line counts all tensors of the newest snapshot; each later line counts those that differ. With --json each
    line is an object. Ends when the run is complete; after a stop or a kill it waits for the next start.
    """
    from ckpt_engine.restore.follower import follow  # torch

    for step, changed in follow(options_of(root), component, every):
        nbytes = sum(tensor.nbytes for tensor in changed.values())
        if as_json:
            print_json({"step": step, "tensors": len(changed), "bytes": nbytes}, indent=None)
        else:
            print_text(f"step {step:,}: {count(len(changed), 'tensor')}, {units.size(nbytes)}")
