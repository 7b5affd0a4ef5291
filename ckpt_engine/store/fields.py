"""Takes values out of JSON that anybody may have written: of the right type and in range, or not at all.

Functions raise ValueError, which the decoder of each document turns into its own error, with the file's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import isfinite, prod
from typing import Any, NoReturn

MOST = 1 << 60
"""No count of bytes or elements is larger."""
LATEST_SECONDS = 253_000_000_000
"""The year 9987: later times are no dates."""
_MAX_DIMENSIONS = 64
_HALF_OF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


def loads(data: bytes) -> Any:
    """A JSON document in which all texts are Unicode and all numbers are finite.

    Raises:
        ValueError: it is none.
        RecursionError: it is nested without end.
    """
    document = json.loads(data.decode(), parse_constant=_refuse)
    if _HALF_OF_A_PAIR.search(data):
        # Half of a surrogate pair is a text to Python until it is printed or written.
        json.dumps(document, ensure_ascii=False).encode()
    return document


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def require(fits: bool, what: str) -> None:
    """Raises ValueError with `what` unless it `fits`."""
    if not fits:
        raise ValueError(what)


def is_whole(value: Any, least: int = 0, most: int = MOST) -> bool:
    """Whether it is a whole number in a range."""
    return type(value) is int and least <= value <= most


def are_sizes(value: Any) -> bool:
    """Whether it is a list of counts."""
    return type(value) in (list, tuple) and all(is_whole(n) for n in value)


def is_shape(value: Any) -> bool:
    """Whether it is the shape of an array that can be."""
    return are_sizes(value) and len(value) <= _MAX_DIMENSIONS and prod(max(1, n) for n in value) < MOST


def is_number(value: Any, most: float = 1e300) -> bool:
    """Whether it is a finite number, and no larger."""
    return type(value) in (int, float) and abs(value) <= most and isfinite(value)


def is_time(value: Any) -> bool:
    """Whether it is a time as seconds since 1970."""
    return is_number(value, LATEST_SECONDS) and value >= 0


def require_shallow(value: Any, most: int) -> None:
    """Raises ValueError if dicts and lists are nested deeper: what goes through them does so recursively."""
    level = [value]
    for _ in range(most):
        level = [
            child
            for one in level
            if isinstance(one, dict | list)
            for child in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise ValueError(f"something is nested deeper than {most} levels")


def is_object(value: Any) -> bool:
    """Whether it is what a JSON object is decoded to."""
    return isinstance(value, Mapping) and all(type(key) is str for key in value)
