"""How commands write: text, tables, JSON and progress."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ckpt_engine.errors import visible
from ckpt_engine.observe import units

if TYPE_CHECKING:
    from ckpt_engine.restore.choose import UnreachableTier


_LINES_SECONDS = 30.0
"""Between two lines of progress where no terminal shows them change."""
_QUIET_SECONDS = 3.0
"""Before the first of them."""
_SHOWN_SECONDS = 0.2
"""Between two changes of a line."""
_CLEARED = "\r\033[K"
"""The terminal's line is empty."""

BAR_WIDTH = 14

json_option: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON instead of text."
)


def print_text(*lines: str, nl: bool = True, err: bool = False, **style: Any) -> None:
    """Writes lines, in a style of `click.style`: the one way in which commands write text.

    What is not printable in a line is shown as an escape: a store's names and reasons are others' texts.
    """
    text = "\n".join(map(visible, lines))
    click.echo(click.style(text, **style) if style else text, nl=nl, err=err)


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()) -> None:
    """Prints aligned columns; those whose title is in `numbers` to the right. No line is cut or wrapped.

    A listing may have 10,000 rows.
    """
    rows = [list(map(visible, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    pads = [str.rjust if title in numbers else str.ljust for title in titles]

    def line(cells: Sequence[str]) -> str:
        padded = (pad(cell, width) for pad, cell, width in zip(pads, cells, widths, strict=True))
        return "  ".join(padded).rstrip()

    if any(titles):
        print_text(line(titles), bold=True)
    click.echo("".join(f"{line(row)}\n" for row in rows), nl=False)


def print_away(away: Sequence[UnreachableTier]) -> None:
    """Says which tiers are left out of what was printed, and why."""
    for one in away:
        print_text(f"{one.url} is left out: [{one.code}] {one.reason}", fg="red")


def say_waiting(line: str) -> None:
    """Says what takes so long, on the error stream."""
    _at_work.say(line)


class _AtWork:
    """What the command does now, and when something was last said of it.

    Attributes:
        now: says it.
        moves: in a line of the terminal that changes.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._next = math.inf
        self.now: Callable[[], str] = str
        self.moves = False

    def say(self, line: str) -> None:
        with self.lock:
            self._next = time.monotonic() + _LINES_SECONDS
            click.echo(f"{_CLEARED if sys.stderr.isatty() else ''}{visible(line)}", err=True)

    def draw(self) -> None:
        click.echo(f"{_CLEARED}{visible(self.now())}", err=True, nl=False)

    def watch(self, ended: threading.Event) -> None:
        """Shows it, or says it after some seconds, and now and then after that, until the command has ended."""
        self._next = time.monotonic() + _QUIET_SECONDS
        while not ended.wait(_SHOWN_SECONDS):
            with self.lock:
                if moves := self.moves:
                    self.draw()
            if not moves and time.monotonic() >= self._next:
                self.say(self.now())


_at_work = _AtWork()


@contextmanager
def at_work(what: str) -> Iterator[None]:
    """A command that may take long: what it does is said after some seconds, and then from time to time."""
    began, ended = time.monotonic(), threading.Event()
    _at_work.now = lambda: f"{what}: {units.duration(time.monotonic() - began)} so far"
    thread = threading.Thread(target=_at_work.watch, args=(ended,), name="ckpt-at-work", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def showing(now: Callable[[], str], *, hidden: bool) -> Iterator[None]:
    """In the block, `now` says what the command does: on a terminal in a line that changes and goes at the end,
    elsewhere as `at_work` does."""
    before, moves = _at_work.now, not hidden and sys.stderr.isatty()
    with _at_work.lock:
        _at_work.now, _at_work.moves = now, moves
        if moves:
            _at_work.draw()
    try:
        yield
    finally:
        with _at_work.lock:
            _at_work.now, _at_work.moves = before, False
            if moves:
                click.echo(_CLEARED, err=True, nl=False)


@contextmanager
def progress(what: str, total: int, *, hidden: bool) -> Iterator[Callable[[int], None]]:
    """Says how many of `total` bytes are done, and how long the others take.

    What it gives takes the bytes that came since, on any thread.
    """
    done, began, lock = 0, time.monotonic(), threading.Lock()

    def advance(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes

    with showing(lambda: f"{what}: {_far(done, max(done, total), time.monotonic() - began)}", hidden=hidden):
        yield advance


def _far(done: int, total: int, seconds: float) -> str:
    left = f", {units.duration(seconds / done * (total - done))} left" if 0 < done < total and seconds >= 1.0 else ""
    return f"{units.size(done)} of {units.size(total)}{left}"


def print_json(value: Any) -> None:
    """`value` as JSON in ASCII: a dataclass as an object of its fields; NaN and infinities as texts."""
    click.echo(json.dumps(_plain(value), indent=2))


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name."""
    return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        value = fields_of(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def metrics(values: Mapping[str, float]) -> str:
    """`loss=0.123 acc=0.9`."""
    return " ".join(f"{name}={value:.4g}" for name, value in values.items())


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """So much of `width` columns, to an eighth of one."""
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]
