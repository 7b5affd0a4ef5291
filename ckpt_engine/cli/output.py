"""How commands write: tables, JSON, progress, and files that appear whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from ckpt_engine.errors import StorageExistsError, StorageMissingError, visible
from ckpt_engine.observe import units
from ckpt_engine.store.storage.disk import translated

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


def age(created: float, now: float | None = None) -> str:
    """How long ago a wall-clock time was: `3 min ago`."""
    seconds = (time.time() if now is None else now) - created
    if seconds < 1:
        return "now" if seconds > -60 else f"in {units.duration(-seconds)}"
    return f"{units.duration(seconds)} ago"


def metrics(values: Mapping[str, float]) -> str:
    """`loss=0.123 acc=0.9`."""
    return " ".join(f"{name}={value:.4g}" for name, value in values.items())


def check_free(path: Path, *, replace: bool, folder: bool = False) -> None:
    """Refuse early what `new_file`, or for a `folder` `new_folder`, would refuse late.

    Raises:
        StorageExistsError: it exists and shall not be replaced, or it is a folder where a file is to be, or a file.
        StorageMissingError: the folder to hold it does not exist.
    """
    if path.exists() and path.is_dir() != folder:
        there, wanted = ("a file", "folder") if folder else ("a folder", "file")
        raise StorageExistsError(f"{path} is {there}", hint=f"name the {wanted} to write")
    if not replace and os.path.lexists(path):
        raise StorageExistsError(f"{path} exists already", hint="--force replaces it")
    if not path.absolute().parent.is_dir():
        raise StorageMissingError(f"the folder of {path} does not exist", hint="make it, or name another")


@contextmanager
def new_file(path: Path, *, replace: bool) -> Iterator[BinaryIO]:
    """A temporary file next to `path` that takes its name, synced, when the block ends well; else it is removed.

    Raises:
        StorageError: the file cannot be written, or exists and shall not be replaced.
    """
    check_free(path, replace=replace)
    temp = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with temp.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if replace:
            temp.replace(path)
        else:
            path.hardlink_to(temp)  # unlike a rename it never replaces what came into being meanwhile
        _sync(path.absolute().parent)
    except FileExistsError as err:
        raise StorageExistsError(f"{path} exists already", hint="--force replaces it") from err
    except OSError as err:
        raise translated(err, "write", str(path)) from err
    finally:
        with suppress(FileNotFoundError):
            temp.unlink()


@contextmanager
def new_folder(path: Path, *, replace: bool) -> Iterator[Path]:
    """A temporary folder next to `path` that takes its name, synced, when the block ends well; else it is removed.

    Raises:
        StorageError: it cannot be written, or exists and shall not be replaced.
    """
    check_free(path, replace=replace, folder=True)
    suffix = os.urandom(4).hex()
    temp, old = (path.with_name(f".{path.name}.{suffix}.{kind}") for kind in ("tmp", "old"))
    try:
        temp.mkdir()
        yield temp
        for one in (*temp.rglob("*"), temp):
            _sync(one)
        if replace and path.exists():
            path.rename(old)
        try:
            temp.rename(path)  # onto an empty folder at most: what came into being meanwhile is not replaced
        except OSError:
            if old.exists():
                old.rename(path)
            raise
        _sync(path.absolute().parent)
    except OSError as err:
        if err.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise StorageExistsError(f"{path} exists already", hint="--force replaces it") from err
        raise translated(err, "write", str(path)) from err
    finally:
        shutil.rmtree(temp, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as err:
        if err.errno != errno.EINVAL or not path.is_dir():  # some network file systems cannot sync folders
            raise
    finally:
        os.close(fd)
