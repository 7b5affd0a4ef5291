"""Quantities as people write them: `1%`, `10 min`, `500 GB` become plain numbers in base units.

Every parser takes numbers and strings, because YAML 1.1 readers deliver `1e-3` as a string, and raises `ValueError`
with a text that completes the sentence "<key>: ...".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_NUMBER = r"[+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_TERM = re.compile(rf"\s*({_NUMBER})\s*([A-Za-zµ]*)")

SECONDS_PER_UNIT: Mapping[str, float] = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 1e-3),
    **dict.fromkeys(("", "s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
    **dict.fromkeys(("w", "week", "weeks"), 604800.0),
}
_DECIMAL = ("", "k", "M", "G", "T", "P")
BYTES_PER_UNIT: Mapping[str, int] = {
    **{f"{prefix}{b}": 1000**n for n, prefix in enumerate(_DECIMAL) for b in ("B", "")},
    **{f"{prefix.upper()}iB": 1024**n for n, prefix in enumerate(_DECIMAL) if n},
    **{f"{prefix.lower()}b": 1000**n for n, prefix in enumerate(_DECIMAL)},
    "KB": 1000,
    "K": 1000,
    "bytes": 1,
    "byte": 1,
}
"""Powers of 1000, of 1024 with an `i`. `Mb` is not among them: that would be bits."""
_FLAGS: Mapping[str, bool] = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _number(value: object) -> float | None:
    """The finite number in `value`, or None where there is none (booleans are not numbers)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def parse_fraction(value: object) -> float:
    """A share strictly between 0 and 1.

    Args:
        value: `0.01`, `"0.01"`, `"1e-2"` or `"1%"`.

    Raises:
        ValueError: not a share.
    """
    percent = isinstance(value, str) and value.rstrip().endswith("%")
    number = _number(value.rstrip()[:-1]) if isinstance(value, str) and percent else _number(value)
    if number is None:
        raise ValueError("must be a share such as '1%' or 0.01")
    share = number / 100 if percent else number
    if not 0 < share < 1:
        hint = "" if percent or not 1 <= number < 100 else f"; for {number:g} percent write '{number:g}%'"
        raise ValueError(f"must be above 0% and below 100%{hint}")
    return share


def parse_wait_seconds(value: object) -> float:
    """As `parse_duration_seconds`, or 0: no wait."""
    return 0.0 if _number(value) == 0 else parse_duration_seconds(value)


def parse_duration_seconds(value: object) -> float:
    """A positive, finite duration in seconds.

    Args:
        value: seconds as a number, or a text of numbers with units ms, s, min, h, d, w: `"10 min"`, `"1h 30min"`.

    Raises:
        ValueError: not a duration.
    """
    seconds = _number(value)
    if seconds is None and isinstance(value, str):
        seconds = _sum_of_terms(value)
    if seconds is None:
        raise ValueError("must be a duration such as '10 min', '90 s', '1 h 30 min' or a number of seconds")
    if not 0 < seconds < math.inf:
        raise ValueError("must be a duration above 0")
    return seconds


def _sum_of_terms(text: str) -> float | None:
    """Seconds in a text such as `1h 30min`; None where it is not of that form (a unit may be left out only alone)."""
    total, position, text = 0.0, 0, text.strip()
    while position < len(text):
        term = _TERM.match(text, position)
        unit = term[2] if term else ""
        factor = SECONDS_PER_UNIT.get(unit if unit == "m" else unit.lower())
        if term is None or unit in ("", "M") or factor is None:
            return None
        total += float(term[1]) * factor
        position = term.end()
    return total if text else None


def parse_bytes(value: object) -> int:
    """A positive number of bytes.

    Args:
        value: bytes as a number, or a text such as `"500 GB"`, `"1.5TB"` (powers of 1000) or `"64 GiB"` (of 1024).

    Raises:
        ValueError: not a size.
    """
    number = _number(value)
    if number is None and isinstance(value, str):
        term = _TERM.fullmatch(value.rstrip())
        factor = BYTES_PER_UNIT.get(term[2]) if term else None
        number = _number(float(term[1]) * factor) if term and factor else None
    if number is None:
        raise ValueError("must be a size such as '500 GB', '64 GiB' or a number of bytes")
    if number < 1:
        raise ValueError("must be a size of at least 1 byte")
    return int(number)


def parse_bytes_per_second(value: object) -> int:
    """A positive rate in bytes per second.

    Args:
        value: bytes per second as a number, or a text such as `"200 MB/s"`.

    Raises:
        ValueError: not a rate.
    """
    try:
        if isinstance(value, str) and _number(value) is None:
            size, slash, second = value.strip().rpartition("/")
            if not slash or second.strip() not in ("s", "sec", "second"):
                raise ValueError
            return parse_bytes(size)
        return parse_bytes(value)
    except ValueError:
        raise ValueError("must be a rate such as '200 MB/s' or a number of bytes per second") from None


def parse_count(value: object) -> int:
    """A whole number of at least 1.

    Args:
        value: `500`, `"500"`, `1e3` or `"1e3"`.

    Raises:
        ValueError: not a whole number, or below 1.
    """
    number = _number(value)
    if number is None or number != int(number):
        raise ValueError("must be a whole number")
    if number < 1:
        raise ValueError("must be a whole number of at least 1")
    return int(number)


def parse_flag(value: object) -> bool:
    """True or False; also `yes`/`no` and `on`/`off`, which are booleans to YAML 1.1 readers and texts to others.

    Raises:
        ValueError: anything else, 0 and 1 included.
    """
    flag = _FLAGS.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(flag, bool):
        raise ValueError("must be true or false")
    return flag
