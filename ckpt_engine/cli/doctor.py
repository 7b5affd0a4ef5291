"""`ckpt doctor`: what a storage can do, tried out, and what that means for a run there."""

from __future__ import annotations

import sys

import click

from ckpt_engine.cli.output import json_option, print_beside, print_json, print_text
from ckpt_engine.cli.root import options_of, quantity, root_argument, storage_options
from ckpt_engine.config.sections import parse_bytes
from ckpt_engine.tools.try_storage import Finding, Mark, examine


@click.command("doctor", short_help="Try out a storage and say what is safe there.")
@root_argument
@click.option("--size", default="64 MB", show_default=True, help="How much is written and read to measure throughput.")
@storage_options
@json_option
def command(root: str, size: str, as_json: bool) -> None:
    """Try out the storage at ROOT (every tier if it is a ckpt.yaml) and say what is safe there.

    Writes a few objects below ROOT and removes them again; what is there is not touched. Ends with exit code 1 if a run
    should not be put there.
    """
    nbytes = max(1, int(quantity("--size", size, parse_bytes)))
    say = (lambda *_, **__: None) if as_json else print_text
    reports: dict[str, list[Finding]] = {}
    for tier in options_of(root).tiers:
        say(tier.url, bold=True)
        findings = reports[tier.url] = []
        # Each is shown when it is found: a storage may hang at the next.
        for one in examine(tier.url, dict(tier.storage_options), nbytes):
            findings.append(one)
            if not as_json:
                print_beside(f"  {one.check:<22}{one.mark:<6}", one.text)
        bad = any(one.mark is Mark.BAD for one in findings)
        say(f"  {'no run should be put' if bad else 'a run is safe'} here", fg="red" if bad else "green")
    if as_json:
        print_json([{"root": place, "findings": findings} for place, findings in reports.items()])
    if any(finding.mark is Mark.BAD for findings in reports.values() for finding in findings):
        sys.exit(1)
