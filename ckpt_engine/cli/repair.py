"""`ckpt repair`: replaces damaged files of a run by the same bytes, which another place has."""

from __future__ import annotations

import sys
from functools import partial

import click

from ckpt_engine.cli.output import json_option, print_text, progress
from ckpt_engine.cli.root import open_run, root_argument, storage_options
from ckpt_engine.cli.verify import print_check
from ckpt_engine.observe import units
from ckpt_engine.tools.check_run import all_ok, check_run
from ckpt_engine.tools.mend_run import MendedFile, mend_run

ROUNDS = 2
"""A manifest that was mended may show damage of the data behind it."""


@click.command("repair", short_help="Mend damaged files with the bytes of another copy.")
@root_argument
@click.option("--from", "other", metavar="OTHER", help="Another place of the same run: a folder, a URL or a ckpt.yaml.")
@click.option("--dry-run", is_flag=True, help="Only say what could be mended.")
@storage_options
@json_option
def command(root: str, other: str | None, dry_run: bool, as_json: bool) -> None:
    """Find what is damaged at ROOT, as `ckpt verify` does, and replace each damaged file by the same bytes.

    They come from the other tiers of a ckpt.yaml, and from OTHER. Every byte is compared with its digest before a file
    takes the place of the damaged one, in one step. Where the other place stores the snapshot in another form, what is
    stored plainly at ROOT is decoded from it. Nothing is removed. The run must not be training; a repair that was
    interrupted is continued by the same command. Ends with exit code 1 if anything is damaged still.
    """
    run, mended = open_run(root), list[MendedFile]()
    others = open_run(other).places if other else ()
    verify = partial(check_run, run, (), partial(progress, "verifying", hidden=as_json))
    checked, away = verify()
    for _ in range(ROUNDS):
        found = mend_run(run, others, checked, partial(progress, "mending", hidden=as_json), dry_run=dry_run)
        mended += found
        if dry_run or not found:
            break
        checked, away = verify()
    done = "can be mended" if dry_run else "mended"
    for one in () if as_json else mended:
        print_text(f"{one.file}  {done} from {one.source}, {units.size(one.nbytes)}", fg="green")
    print_check(root, run, checked, away, as_json=as_json, repair={"dry_run": dry_run, "mended": mended})
    sys.exit(int(not all_ok(checked)))
