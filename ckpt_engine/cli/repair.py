"""`ckpt repair` and `ckpt scrub`: replace damaged files of a run by the same bytes, which another place has."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import click

from ckpt_engine.cli.output import json_option, print_text, progress
from ckpt_engine.cli.root import open_run, quantity, root_argument, storage_options
from ckpt_engine.cli.verify import print_check
from ckpt_engine.config.option_types import parse_bytes_per_second, parse_duration_seconds
from ckpt_engine.observe import units
from ckpt_engine.store.storage.base import Throttle
from ckpt_engine.tools.check_run import all_ok, check_run
from ckpt_engine.tools.mend_run import MendedFile, mend_run, quarantine_rest

ROUNDS = 3
"""A manifest that was mended may show damage of the data behind it, and parity is made from data that is mended."""
_FROM = click.option(
    "--from", "other", metavar="OTHER", help="Another place of the same run: a folder, a URL or a ckpt.yaml."
)
_DRY_RUN = click.option("--dry-run", is_flag=True, help="Only say what could be mended, and write nothing.")


@click.command("repair", short_help="Mend damaged files with the bytes of another copy.")
@root_argument
@_FROM
@_DRY_RUN
@storage_options
@json_option
def command(root: str, other: str | None, dry_run: bool, as_json: bool) -> None:
    """Find what is damaged at ROOT, as `ckpt verify` does, and replace each damaged file by the same bytes.

    They come from the other tiers of a ckpt.yaml, and from OTHER. Every byte is compared with its digest before a file
    takes the place of the damaged one, in one step. Where the other place stores the snapshot in another form, what is
    stored plainly at ROOT is decoded from it. Nothing is removed. The run must not be training; a repair that was
    interrupted is continued by the same command. Ends with exit code 1 if anything is damaged still.
    """
    _mend(root, other, dry_run=dry_run, as_json=as_json)


@click.command("scrub", short_help="Read all copies now and then, and mend what is damaged.")
@root_argument
@_FROM
@click.option("--rate", metavar="RATE", help="Read at most so much per second, such as 50MB/s.")
@click.option("--every", metavar="TIME", help="Leave out what a scrub has found whole within this time, such as 7d.")
@_DRY_RUN
@storage_options
@json_option
def scrub(root: str, other: str | None, rate: str | None, every: str | None, dry_run: bool, as_json: bool) -> None:
    """Read every byte at ROOT as `ckpt verify` does, and then mend what is damaged as `ckpt repair` does.

    For cron and systemd timers: what is whole is noted at ROOT, file by file, so that with --every a scrub that was
    stopped or killed continues where it was. Reading is possible while the run trains, and mending when it has ended.
    With --dry-run nothing is written. Ends with exit code 0 if every copy is whole, or mended.
    """
    found_whole_within = quantity("--every", every, parse_duration_seconds) if every else 0.0
    pause = Throttle(quantity("--rate", rate, parse_bytes_per_second)) if rate else None
    _mend(root, other, found_whole_within, pause, dry_run=dry_run, as_json=as_json)


def _mend(
    root: str,
    other: str | None,
    found_whole_within: float = 0.0,
    pause: Callable[[int], float] | None = None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    run, mended = open_run(root), list[MendedFile]()
    others = open_run(other).places if other else ()
    shown = partial(progress, hidden=as_json, pause=pause)
    since = time.time() - found_whole_within
    verify = partial(check_run, run, (), partial(shown, "verifying"), since, is_remembered=not dry_run)
    checked, away = verify()
    try:
        for _ in range(ROUNDS):
            found = mend_run(run, others, checked, partial(shown, "mending"), dry_run=dry_run)
            mended += found
            if dry_run or not found:
                break
            checked, away = verify()
    finally:  # what is damaged is named also if the run is being written
        done = "can be mended" if dry_run else "mended"
        lines = (f"{one.file}  {done} from {one.source}, {units.size(one.nbytes)}" for one in mended)
        print_text(*(() if as_json else lines), fg="green")
        print_check(root, run, checked, away, as_json=as_json, repair={"dry_run": dry_run, "mended": mended})
        if not (dry_run or away):  # of a run that trains its writer may mend the rest
            quarantine_rest(run, checked, mend_run(run, others, checked, partial(shown, "mending"), dry_run=True))
    sys.exit(int(not all_ok(checked)))
