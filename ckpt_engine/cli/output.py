"""How commands write: tables and lines for people, JSON for programs, progress on the error stream."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from ckpt_engine.observe import units

_WIDE = 100_000

json_option: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON instead of text."
)


def console() -> Console:
    """Standard output. A pipe has no width: nothing is wrapped or cut there."""
    out = Console(highlight=False, markup=False, soft_wrap=True)
    return out if out.is_terminal else Console(highlight=False, markup=False, soft_wrap=True, width=_WIDE)


def table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """An empty table with these column titles; those in `numbers` are right-aligned."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for title in columns:
        made.add_column(title, justify="right" if title in numbers else "left", no_wrap=True)
    return made


def print_table(out: Console, filled: Table) -> None:
    """Prints a table without the blanks that fill its last column."""
    with out.capture() as text:
        out.print(filled)
    click.echo("\n".join(line.rstrip() for line in text.get().splitlines()))


def progress(*, hidden: bool) -> Progress:
    """A bar over bytes on the error stream; invisible where that is no terminal."""
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
