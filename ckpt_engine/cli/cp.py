"""`ckpt cp`: copies a run, or some of its snapshots."""

from __future__ import annotations

import sys
from functools import partial

import click

from ckpt_engine.cli.output import fields_of, json_option, print_away, print_json, print_text, progress, say_waiting
from ckpt_engine.cli.root import default_root, named, open_run, options_of, storage_options
from ckpt_engine.errors import ConfigError
from ckpt_engine.observe import units
from ckpt_engine.observe.units import count
from ckpt_engine.tools.copy_run import copy_run


@click.command("cp", short_help="Copy a run, or some of its snapshots.")
@click.argument("source", metavar="[SOURCE]")
@click.argument("target", metavar="TARGET", required=False)
@click.option(
    "--snapshot", "wanted", multiple=True, metavar="SNAPSHOT", help="Only this one; repeatable. Default: all of them."
)
@click.option("--seal", is_flag=True, help="Seal the copy of a plain run.")
@storage_options
@json_option
def command(source: str, target: str | None, wanted: tuple[str, ...], seal: bool, as_json: bool) -> None:
    """Copy the run at SOURCE to TARGET: a folder, a storage URL, or a ckpt.yaml that names one.

    Newest first, byte for byte, verified on the way. With a ckpt.yaml of several tiers, each snapshot comes from the
    nearest tier that has all of it. Snapshots that TARGET already has stay as they are, so the same command continues
    an interrupted copy. TARGET must be empty or hold the same run. Ends with exit code 1 if a snapshot was damaged at
    SOURCE.

    --seal reads SOURCE as a plain run, and seals the copy as the section seal of TARGET says, or else for the key in
    the file that $CKPT_KEY_FILE names.

    Where each node has a folder of its own, copy all of these folders to one TARGET, one after another. The snapshots
    exist there once the last one is copied.
    """
    root, snapshots = named(source) if target else (default_root(), ())
    place = options_of(target or source).tiers[0]
    if seal and place.seal is None:
        raise ConfigError("--seal has no key", hint="set CKPT_KEY_FILE, or let TARGET be a ckpt.yaml with seal")
    run = open_run(root, options_of(root, as_plain=seal))
    done = copy_run(run, place, (*snapshots, *wanted), say_waiting, partial(progress, "copying", hidden=as_json))
    if as_json:
        print_json({**fields_of(done), "away": run.away})
    else:
        print_text(*(f"{one.id}  not copied: [{one.code}] {one.why}" for one in done.failed), fg="red")
        print_text(
            *(
                f"{one}  has the shares of {shares} there: copy the folders of the other nodes, too"
                for one, shares in done.partial.items()
            )
        )
        before = f", {done.present:,} there already" if done.present else ""
        copied = count(len(done.copied), "snapshot")
        print_text(f"{copied} copied to {done.target}, {units.size(done.sent_bytes)} sent{before}")
        print_away(run.away)
    sys.exit(int(bool(done.failed)))
