"""How commands write: text, tables, JSON and progress."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from ckpt_engine.errors import CkptError, visible
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

_WIDE = "ckpt_engine.wide"
"""Where click's context keeps that --wide was given."""
_NARROWEST = 40
_LEAST_CELL = 8
"""Columns of a cell that is cut, and digits of an id."""
HEADLINE = 80
"""Characters of the first line of an error, whatever the terminal."""
_PLACE = re.compile(r"[^\s'\"(]*/[^\s'\")]*[^\s'\"),;:.]")
_LONG_PLACE = 24
"""Characters from which a place stands on a line of its own below a headline that would be too long."""


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a verb the options that say how it prints its answer."""
    wide = click.option(
        *("-w", "--wide"),
        is_flag=True,
        expose_value=False,
        callback=lambda ctx, _, value: ctx.meta.update({_WIDE: value}),
        help="Cut nothing to fit the terminal.",
    )
    return wide(click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")(command))


def line_width(*, err: bool = False) -> int | None:
    """The columns of the terminal; None: nothing is cut or wrapped, as in files and with --wide."""
    context = click.get_current_context(silent=True)
    if not (sys.stderr if err else sys.stdout).isatty() or (context is not None and context.meta.get(_WIDE)):
        return None
    return max(_NARROWEST, shutil.get_terminal_size().columns)


def for_people(text: str) -> str:
    """One line, in which folders are paths; what is not printable is an escape: names in a store are others' texts."""
    return visible(units.paths(text))


def wrapped(text: str, width: int | None, hang: str = "  ") -> list[str]:
    """`text` in lines of that width. A word that is longer, such as a path, is whole and alone on its line."""
    if width is None or len(text) <= width:
        return [text]
    indent = text[: len(text) - len(text.lstrip())] + hang
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def print_text(*lines: str, err: bool = False, **style: Any) -> None:
    """Writes lines, in a style of `click.style`: the one way in which commands write text."""
    width = line_width(err=err)
    rows = [row for line in lines for row in wrapped(for_people(line), width)]
    click.echo(click.style("\n".join(rows), **style), err=err, nl=bool(rows))


def draw(text: str) -> None:
    """Writes a screen, with its control sequences: what others have written is escaped in it already."""
    click.echo(text, nl=False)


def print_beside(head: str, text: str) -> None:
    """Writes `text` on the right of `head`, in a column of its own; a longer path below it."""
    width, blank = line_width(), " " * len(head)
    first, *rest = wrapped(for_people(text), width and width - len(head), "")
    is_long = width is not None and len(head + first) > width
    click.echo(f"{head.rstrip()}\n{blank}{first}" if is_long else f"{head}{first}")
    click.echo("".join(f"{blank}{row}\n" for row in rest), nl=False)


def print_error(error: CkptError) -> None:
    """Writes an error: what happened in at most 80 characters, then why, and what to do."""
    prefix, indent, width = f"ckpt: [{error.code}] ", " " * 6, line_width(err=True)
    message, *more = map(for_people, error.message.split("\n"))
    first, *why = headline(message, HEADLINE - len(prefix) if width else sys.maxsize)
    do = [f"do:  {for_people(error.hint)}"] if error.hint else []
    click.secho(prefix + first, err=True, fg="red")
    for line in (*why, *more, *do):
        click.echo("\n".join(wrapped(indent + line, width, " " * 5)), err=True)


def headline(text: str, most: int) -> list[str]:
    """The first part of a message, which is no longer than that, what is left of it, and long places in it."""
    places = [one for one in dict.fromkeys(_PLACE.findall(text)) if len(one) > _LONG_PLACE] if len(text) > most else []
    for one in places:
        text = text.replace(one, f"…{one[-_LONG_PLACE:]}")
    if len(text) <= most:
        return [text, *places]
    clauses = (text[:most].rpartition(mark)[0] for mark in ("; ", ": "))
    if head := next((one for one in clauses if len(one) >= _LONG_PLACE), ""):
        return [head, *places, f"why: {text[len(head) + 2 :]}"]
    head, *_ = wrapped(text, most)
    return [head, text[len(head) :].lstrip(), *places]


def print_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = (), ids: str | None = None
) -> None:
    """Prints aligned columns; those whose title is in `numbers` to the right. A listing may have 10,000 rows.

    In a terminal the lines fit: ids become as short as they may be, then the last column is cut, then the widest.

    Args:
        ids: the title of the column of ids, of which verbs take the first characters too.
    """
    table = [list(map(for_people, column)) for column in zip(titles, *rows, strict=True)]
    room = line_width() or math.inf
    if _width(table) > room and ids in titles:
        table[titles.index(ids)][1:] = _shortest(table[titles.index(ids)][1:])
    for column in (table[-1], *sorted(table[:-1], key=_width_of, reverse=True)):
        if (over := _width(table) - room) > 0 and column[0] not in (ids, *numbers):
            most = max(len(column[0]), _LEAST_CELL, _width_of(column) - int(over))
            column[1:] = [cut(cell, most) for cell in column[1:]]
    pads = [str.rjust if title in numbers else str.ljust for title in titles]
    padded = [[pad(cell, _width_of(column)) for cell in column] for pad, column in zip(pads, table, strict=True)]
    head, *lines = ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]
    if head:
        click.secho(head, bold=True)
    click.echo("".join(f"{line}\n" for line in lines), nl=False)


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _width(table: Sequence[Sequence[str]]) -> int:
    return sum(map(_width_of, table)) + 2 * (len(table) - 1)


def _width_of(column: Sequence[str]) -> int:
    return max(map(len, column))


def _shortest(ids: Sequence[str]) -> list[str]:
    """As many first characters of each as tell it from the others."""
    known = set(ids)
    most = next(n for n in itertools.count(_LEAST_CELL) if len({one[:n] for one in known}) == len(known))
    return [one[:most] for one in ids]


def print_away(away: Sequence[UnreachableTier]) -> None:
    """Says which tiers are left out of what was printed, and why."""
    print_text(*(f"left out: {one.url}: [{one.code}] {one.reason}" for one in away), fg="red")


@dataclass(eq=False)
class _AtWork:
    """What the command does now, and when something was last said of it.

    Attributes:
        now: says it.
        moves: in a line of the terminal that changes.
    """

    lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _next: float = field(default=math.inf, init=False)
    now: Callable[[], str] = field(default=str, init=False)
    moves: bool = field(default=False, init=False)

    def say(self, line: str) -> None:
        with self.lock:
            self._next = time.monotonic() + _LINES_SECONDS
            click.echo(_CLEARED if sys.stderr.isatty() else "", err=True, nl=False)
            print_text(line, err=True)

    def draw(self) -> None:
        line = cut(for_people(self.now()), (line_width(err=True) or sys.maxsize) - 1)
        click.echo(f"{_CLEARED}{line}", err=True, nl=False)

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
say_waiting = _at_work.say
"""Says what takes so long, on the error stream."""


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
def progress(
    what: str, total: int, *, hidden: bool, pause: Callable[[int], float] | None = None
) -> Iterator[Callable[[int], None]]:
    """Says how many of `total` bytes are done, and how long the others take.

    What it gives takes the bytes that came since, on any thread.

    Args:
        pause: how many seconds to wait after so many bytes.
    """
    done, began, lock = 0, time.monotonic(), threading.Lock()

    def advance(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
        if pause is not None:
            time.sleep(pause(nbytes))

    with showing(lambda: f"{what}: {_far(done, max(done, total), time.monotonic() - began)}", hidden=hidden):
        yield advance


def _far(done: int, total: int, seconds: float) -> str:
    left = f", {units.duration(seconds / done * (total - done))} left" if 0 < done < total and seconds >= 1.0 else ""
    return f"{units.size(done)} of {units.size(total)}{left}"


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """`value` as JSON in ASCII: a dataclass as an object of its fields; NaN and infinities as texts.

    Args:
        indent: None: in one line.
    """
    click.echo(json.dumps(_plain(value), indent=indent))


def print_answer(value: Any, *lines: str, as_json: bool) -> None:
    """Writes what a command has done: `value` as JSON, or lines of text."""
    if as_json:
        print_json(value)
    else:
        print_text(*lines)


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
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def metrics(values: Mapping[str, float]) -> str:
    """`loss=0.123 acc=0.9`."""
    return " ".join(f"{name}={value:.4g}" for name, value in values.items())


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """So much of `width` columns, to an eighth of one."""
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]
