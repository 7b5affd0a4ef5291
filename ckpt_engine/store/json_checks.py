"""Checks the fields of JSON that anybody may have written.

Functions raise ValueError, which `reading` turns into the error of a document, with its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import isfinite, prod
from typing import Any, NoReturn

from ckpt_engine.errors import CorruptError
from ckpt_engine.observe.number_types import LATEST_SECONDS, MOST

_MALFORMED = (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, RecursionError)
"""What taking apart an unexpected document can raise."""
_MAX_DIMENSIONS = 64
_HALF_OF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


@contextmanager
def reading(what: str, hint: str | None = None) -> Iterator[None]:
    """Turns what a document can raise that is taken apart in the block into `CorruptError`: `what`, and why."""
    try:
        yield
    except _MALFORMED as err:
        why = str(err) if isinstance(err, ValueError) else f"{type(err).__name__}: {err}"
        raise CorruptError(f"{what}: {why}", hint=hint) from err


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


def require_all(*claims: tuple[bool, str]) -> None:
    """As `require` for each of these; all of them were made before the first one is looked at."""
    for fits, what in claims:
        if not fits:
            raise ValueError(what)


def is_whole(value: Any, least: int = 0, most: int = MOST) -> bool:
    """Whether it is a whole number in a range."""
    return type(value) is int and least <= value <= most


def are_sizes(value: Any) -> bool:
    """Whether it is a list of counts."""
    return (
        type(value) in (list, tuple)
        and set(map(type, value)) <= {int}
        and 0 <= min(value, default=0) <= max(value, default=0) <= MOST
    )


def is_shape(value: Any) -> bool:
    """Whether it is the shape of an array that can be."""
    return are_sizes(value) and len(value) <= _MAX_DIMENSIONS and prod(filter(None, value)) < MOST


def is_number(value: Any, most: float = 1e300) -> bool:
    """Whether it is a finite number, and no larger."""
    return type(value) in (int, float) and abs(value) <= most and isfinite(value)


def is_time(value: Any) -> bool:
    """Whether it is a time as seconds since 1970."""
    return is_number(value, LATEST_SECONDS) and value >= 0


def is_shallow(value: Any, most: int) -> bool:
    """Whether dicts and lists are not nested deeper: what goes through them does so recursively."""
    level = [value]
    for _ in range(most):
        level = [
            child
            for one in level
            if isinstance(one, dict | list)
            for child in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return True
    return False


def is_object(value: Any) -> bool:
    """Whether it is what a JSON object is decoded to."""
    return isinstance(value, Mapping) and set(map(type, value)) <= {str}
