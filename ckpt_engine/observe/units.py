"""Quantities as short text for one-line messages."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from urllib.parse import unquote

_DURATIONS = ((172_800.0, 86_400.0, "d"), (5_400.0, 3_600.0, "h"), (99.5, 60.0, "min"), (0.9995, 1.0, "s"))
_FOLDER_URL = re.compile(r"file://(/\S+)")
_PLURALS = {"batch": "batches", "copy": "copies", "entry": "entries"}
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def duration(seconds: float) -> str:
    """`9 s`, `210 ms`, `4.2 ms`, `10 min`, `6 h`, `12 d`: two significant digits or a whole number, no exponent."""
    if not math.isfinite(seconds):
        return "forever" if seconds > 0 else "unknown"
    for from_seconds, unit_seconds, unit in _DURATIONS:
        if seconds >= from_seconds:
            return f"{_digits(seconds / unit_seconds)} {unit}"
    if seconds < 0.00005:
        return "0 s"
    return f"{_digits(seconds * 1e3)} ms"


def age(created: float, now: float | None = None) -> str:
    """How long ago a wall-clock time was: `3 min ago`."""
    seconds = (time.time() if now is None else now) - created
    if seconds < 1:
        return "just now" if seconds > -60 else f"in {duration(-seconds)}"
    return f"{duration(seconds)} ago"


def size(nbytes: float) -> str:
    """`214 GB`, `1.5 GB`, `312 B`: decimal units, two significant digits below ten."""
    for unit_bytes, unit in _SIZES:
        if nbytes >= unit_bytes:
            return f"{_digits(nbytes / unit_bytes)} {unit}"
    return f"{nbytes:.0f} B"


def share(fraction: float) -> str:
    """`1 %`, `3.5 %`, `0.02 %` from a fraction of one."""
    return f"{_digits(fraction * 100)} %"


def percent(share: float) -> str:
    """`97.1 %`: one digit after the point."""
    return f"{100.0 * share:.1f} %"


def count(number: int, noun: str) -> str:
    """`1 snapshot`, `1,200 snapshots`, `2 batches`, `3 entries`."""
    return f"{number:,} {noun if number == 1 else _PLURALS.get(noun, f'{noun}s')}"


def first(names: Sequence[str], most: int) -> str:
    """`a, b, c and 7 more`: the first `most` of the names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def place(url: str) -> str:
    """One name for what events, options and storages call by several: folders as paths, URLs without a last slash."""
    return (unquote(url.removeprefix("file://")) if url.startswith("file://") else url).rstrip("/")


def paths(text: str) -> str:
    """A text for people, in which the URLs of folders are paths."""
    return _FOLDER_URL.sub(lambda found: unquote(found[1]), text)


def _digits(value: float) -> str:
    if value >= 9.95:
        return f"{value:.0f}"
    return "0" if abs(value) < 0.0005 else f"{float(f'{value:.2g}'):g}"


LOGIN = re.compile(r"[^/@:]*:(?!\d+/)[^@]*@")
"""After `scheme://`: a name and a password before a host, also where the password has slashes; no port of a host."""
