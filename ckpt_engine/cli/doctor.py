"""`ckpt check` and `ckpt doctor`: what a run needs and what its places can do, tried out before it starts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import click

from ckpt_engine.cli.output import json_option, print_beside, print_json, print_text
from ckpt_engine.cli.root import options_of, quantity, root_argument, storage_options
from ckpt_engine.config.option_types import parse_bytes
from ckpt_engine.config.sections import ResumeChanges
from ckpt_engine.observe import units
from ckpt_engine.tools.needs import memory_need, newest_bytes, tier_needs
from ckpt_engine.tools.try_storage import Finding, Mark, examine

_CHECKED_BYTES = 8_000_000
_UNKNOWN = "no snapshot yet: --state SIZE says how large one is"


@click.command("check", short_help="Check options, memory, disk and storage of a run.")
@root_argument
@click.option("--state", metavar="SIZE", help="Size of a snapshot, such as 14GB (default: of the newest one).")
@storage_options
@json_option
def check(root: str, state: str | None, as_json: bool) -> None:
    """Check what the run of ROOT, usually a ckpt.yaml, will need and find, before it starts.

    Checks the options, what a section `resume` restores and changes, the host memory and the disk that snapshots take,
    and everything that `ckpt doctor` tries at each place. Shows what is kept where. Ends with exit code 1 if something
    is missing, and with 2 if the options are wrong.
    """
    config = options_of(root)
    nbytes = newest_bytes(config) if state is None else int(quantity("--state", state, parse_bytes))
    size = Finding("state", Mark.NOTE, _UNKNOWN) if nbytes is None else Finding("state", Mark.OK, units.size(nbytes))
    first = [Finding("options", Mark.OK, "valid"), size, *([memory_need(config, nbytes)] if nbytes is not None else [])]
    if isinstance(config.resume, ResumeChanges):
        from ckpt_engine.tools.resume_plan import resume_plan  # torch

        first += resume_plan(config)
    places = [_Place(root, first, "this machine has room", "the run does not fit here")]
    for tier in config.tiers:
        tried = examine(tier.url, dict(tier.storage_options), _CHECKED_BYTES)
        places.append(_Place(tier.url, chain(tier_needs(config, tier, nbytes), tried)))
    _show(places, as_json)


@click.command("doctor", short_help="Try out a storage and say what is safe there.")
@root_argument
@click.option("--size", default="64 MB", show_default=True, help="How much is written and read to measure throughput.")
@storage_options
@json_option
def command(root: str, size: str, as_json: bool) -> None:
    """Try out the storage at ROOT (every tier if it is a ckpt.yaml) and say what is safe there.

    Writes a few objects below ROOT and removes them again; existing files are not touched. Ends with exit code 1 if a
    run should not be put there.
    """
    nbytes = max(1, int(quantity("--size", size, parse_bytes)))
    _show(
        [_Place(tier.url, examine(tier.url, dict(tier.storage_options), nbytes)) for tier in options_of(root).tiers],
        as_json,
    )


class _Place(NamedTuple):
    """What is found at a place, when it is asked for, and what that means."""

    url: str
    findings: Iterable[Finding]
    good: str = "a run is safe here"
    bad: str = "no run should be put here"


def _show(places: Sequence[_Place], as_json: bool) -> None:
    """Find everything, and show each thing when it is found: a storage may hang at the next."""
    say = (lambda *_, **__: None) if as_json else print_text
    tell = (lambda *_: None) if as_json else print_beside
    reports, code = [], 0
    for place in places:
        say(place.url, bold=True)
        found = []
        for one in place.findings:
            found.append(one)
            tell(f"  {one.check:<22}{one.mark:<6}", one.text)
        is_bad = any(one.mark is Mark.BAD for one in found)
        say(f"  {place.bad if is_bad else place.good}", fg="red" if is_bad else "green")
        code |= is_bad
        reports.append({"root": place.url, "findings": found})
    if as_json:
        print_json(reports)
    sys.exit(code)
