"""`ckpt fork`: begins a run with a snapshot of another one."""

from __future__ import annotations

import sys
from functools import partial

import click

from ckpt_engine.cli.output import fields_of, json_option, print_json, print_text, progress, say_waiting
from ckpt_engine.cli.root import named, open_run, options_of, storage_options
from ckpt_engine.observe import units
from ckpt_engine.tools.fork_run import fork_run
from ckpt_engine.tools.stored_run import LATEST


@click.command("fork", short_help="Begin a run with a snapshot of another one.")
@click.argument("snapshot", metavar="ROOT[#SNAPSHOT]")
@click.argument("new")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@storage_options
@json_option
def command(snapshot: str, new: str, dry_run: bool, as_json: bool) -> None:
    """Make a run at NEW that begins with a snapshot of the run at ROOT; default: its latest.

    NEW is a folder or a storage URL, and must be empty. On one disk no bytes are copied: the files get hard links,
    and NEW stays whole when ROOT is removed. In one object store the store copies them. Else they are sent, verified on
    the way. NEW is sealed if the nearest tier of ROOT is. `ckpt show` and `ckpt ls` say where a run was forked.
    """
    root, wanted = named(snapshot)
    config, tier = options_of(root), options_of(new).tiers[0]
    tier = tier.model_copy(update={"seal": tier.seal or config.tiers[0].seal})
    counting = partial(progress, "copying", hidden=as_json)
    run, (one, *_) = open_run(root, config), (*wanted, LATEST)
    info, done, linked_bytes = fork_run(run, one, tier, say_waiting, counting, dry_run=dry_run)
    if as_json:
        print_json({"snapshot": info.id, "step": info.step, "linked_bytes": linked_bytes, **fields_of(done)})
    else:
        print_text(*(f"{one.id}  not copied: [{one.code}] {one.why}" for one in done.failed), fg="red")
        what = f"{'would fork' if dry_run else 'forked'} {info.id} (step {info.step:,}) to {done.target}"
        how = "linked" if tier.is_folder else "copied by the store"
        print_text(f"{what}: {units.size(linked_bytes)} {how}, {units.size(done.sent_bytes)} sent")
    sys.exit(1 if done.failed else 0)
