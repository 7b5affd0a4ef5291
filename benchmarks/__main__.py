"""`python -m benchmarks`: measure bars, show them beside their targets, and record the results."""

from __future__ import annotations

import argparse
import compileall
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import bars
from benchmarks.child import BarError, measure
from benchmarks.machine import describe, slug, versions
from benchmarks.page import write_page
from benchmarks.record import Record, measured_bar, read_all
from benchmarks.run import Scale
from benchmarks.table import print_bar, print_summary

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results"
PACKAGES = ("ckpt_engine", "lightning_ckpt", "accelerate_ckpt")
PAGES = {
    ROOT.parent / "docs" / "benchmarks.md": bars.NAMES,
    ROOT.parent / "docs" / "studies.md": bars.STUDIES,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 1 if a bar could not be measured (a missed target is a result)."""
    options = _parse(arguments)
    if options.page:
        _write_pages()
        return 0
    names = options.only or [name for name in bars.NAMES if bars.can_run(name)]
    scale = Scale.QUICK if options.quick else Scale.FULL
    console = Console(stderr=False)
    options.folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:  # as an installer leaves them, whatever PYTHONDONTWRITEBYTECODE says here
        compileall.compile_dir(ROOT.parent / package, quiet=1)
    machine = describe(options.folder)
    record = Record(machine, {})
    for key, value in machine.items():
        console.print(f"{key:>12}  {value}", highlight=False)
    failed = False
    for number, name in enumerate(names, 1):
        console.rule(f"[bold]{number}/{len(names)} {bars.title(name)}")
        try:
            with console.status("starting") as status:
                result, shares = measure(name, scale, options.folder, status.update)
        except BarError as err:
            console.print(f"{name} could not be measured: {err}", style="red", markup=False)
            failed = True
            continue
        bar = measured_bar(result, scale, shares, versions())
        print_bar(console, bar)
        record = record.with_bar(bar)
    print_summary(console, record)
    if options.json:
        record.write(options.json)
    if options.record or (scale is Scale.FULL and not options.only and not failed):
        path = RESULTS / f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}-{slug(machine)}.json"
        merged = Record.read(path).merged(record) if path.exists() else record
        merged.write(path)
        _write_pages()
        console.print(f"recorded in {path.relative_to(ROOT.parent)} and {', '.join(page.name for page in PAGES)}")
    return 1 if failed else 0


def _write_pages() -> None:
    records = read_all(RESULTS)
    for page, names in PAGES.items():
        write_page(page, records, names)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["study"]:
        given[:2] = ["--only", *(f"study-{one}" for one in given[1:2])]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure the bars of the project, each in a process of its own, interleaved with its references. "
        "A full run of everything is recorded in benchmarks/results and docs/benchmarks.md. "
        "`study NAME` measures one of the studies beside published numbers.",
    )
    parser.add_argument("--only", type=_names, metavar="BAR,…", help=f"some of: {', '.join(bars.NAMES)}")
    parser.add_argument(
        "--quick", action="store_true", help="same sizes, few rounds; for a first look, not for results"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the raw results there")
    parser.add_argument(
        "--folder", type=_folder, default=Path("bench-out").resolve(), help="where to write: decides the disk"
    )
    parser.add_argument("--record", action="store_true", help="add the measured bars to today's committed results")
    parser.add_argument("--page", action="store_true", help="measure nothing; rewrite the page from committed results")
    return parser.parse_args(given)


def _folder(text: str) -> Path:
    return Path(text).resolve()


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in (*bars.NAMES, *bars.STUDIES):
            raise argparse.ArgumentTypeError(f"no bar {name!r}; there are {', '.join(bars.NAMES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
