"""`ckpt report`: what a run has done, as a page for a browser."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from ckpt_engine.cli.output import json_option, print_json, print_text, progress, say_waiting
from ckpt_engine.cli.root import open_run, options_of, root_argument, storage_options
from ckpt_engine.observe import units
from ckpt_engine.observe.units import count
from ckpt_engine.tools.new_files import new_file
from ckpt_engine.tools.report_page import page
from ckpt_engine.tools.run_report import read_report

DEFAULT = "ckpt-report.html"


@click.command("report", short_help="Write a page for a browser that shows what a run has done.")
@root_argument
@click.option("--html", "file", default=DEFAULT, show_default=True, help="The file to write.", type=Path)
@click.option("--verify", is_flag=True, help="Read every stored byte first, and show whether it is what was written.")
@click.option("--force", is_flag=True, help="Replace FILE even if it is not a report.")
@storage_options
@json_option
def command(root: str, file: Path, verify: bool, force: bool, as_json: bool) -> None:
    """Write one page that shows the run at ROOT: its steps, snapshots, failures and resumes, what its time went into,
    what each failure has cost, and what is stored where.

    The page needs no network and no other file. With --json its numbers are printed, and no page is written.
    """
    config = options_of(root)
    counting = partial(progress, "verifying", hidden=as_json) if verify else None
    found = read_report(open_run(root, config), config, say_waiting, counting)
    if as_json:
        print_json(found.to_json())
    else:
        is_report = file.is_file() and b'content="ckpt report"' in file.read_bytes()[:200]
        with new_file(file, replace=force or is_report) as out:
            out.write(page(found).encode())
        size = units.size(file.stat().st_size)
        print_text(f"{file} ({size}): {count(len(found.snapshots), 'snapshot')}, {count(len(found.lives), 'attempt')}")
