"""How commands write: tables and lines for people, JSON for programs, progress on the error stream."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ckpt_engine.observe import units

if TYPE_CHECKING:
    from rich.progress import Progress

    from ckpt_engine.restore.choose import Away

_LINES_SECONDS = 30.0
"""Between two lines of progress where no terminal shows them change."""

json_option: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON instead of text."
)


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()) -> None:
    """Prints aligned columns; those whose title is in `numbers` to the right. No line is cut or wrapped.

    A listing may have 10,000 rows: rich's tables take seconds for that.
    """
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    pads = [str.rjust if title in numbers else str.ljust for title in titles]

    def line(cells: Sequence[str]) -> str:
        padded = (pad(cell, width) for pad, cell, width in zip(pads, cells, widths, strict=True))
        return "  ".join(padded).rstrip()

    if any(titles):
        click.secho(line(titles), bold=True)
    click.echo("".join(f"{line(row)}\n" for row in rows), nl=False)


def print_away(away: Sequence[Away]) -> None:
    """Says which tiers are left out of what was printed, and why."""
    for one in away:
        click.secho(f"{one.url} is left out: [{one.code}] {one.reason}", fg="red")


def say_waiting(line: str) -> None:
    """Says what takes so long, on the error stream."""
    click.echo(line, err=True)


def progress(*, hidden: bool) -> Progress:
    """A bar over bytes on the error stream; invisible where that is no terminal."""
    from rich.console import Console  # slow to import, and most verbs show no bar
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    err = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=hidden or not err.is_terminal,
    )


@contextmanager
def changing_line(*, hidden: bool) -> Iterator[Callable[[str, bool], None]]:
    """Says how far something is: one line on the error stream that changes; where that is no terminal, a few lines.

    What it gives takes the line, and whether it is the last one of its kind.
    """
    at, width = time.monotonic(), 0

    def say(line: str, last: bool) -> None:
        nonlocal at, width
        if hidden:
            return
        if sys.stderr.isatty():
            click.echo(f"\r{line:<{width}}", err=True, nl=last)
            width = 0 if last else len(line)
        elif last or time.monotonic() - at >= _LINES_SECONDS:
            at = time.monotonic()
            click.echo(line, err=True)

    yield say


def print_json(value: Any) -> None:
    """`value` as JSON; NaN and infinities, which JSON lacks, as texts."""
    click.echo(json.dumps(_plain(value), indent=2, ensure_ascii=False))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def age(created: float, now: float | None = None) -> str:
    """How long ago a wall-clock time was: `3 min ago`."""
    seconds = (time.time() if now is None else now) - created
    if seconds < 1:
        return "now" if seconds > -60 else f"in {units.duration(-seconds)}"
    return f"{units.duration(seconds)} ago"


def metrics(values: Mapping[str, float]) -> str:
    """`loss=0.123 acc=0.9`."""
    return " ".join(f"{name}={value:.4g}" for name, value in values.items())


def count(number: int, noun: str) -> str:
    """`1 snapshot`, `1,200 snapshots`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
