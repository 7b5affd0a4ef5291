"""Checks what types cannot say of JSON that anybody may have written.

`errors.require` raises ValueError, which `reading` turns into the error of a document, with its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

from ckpt_engine.errors import CorruptError
from ckpt_engine.observe.number_types import MOST

_MALFORMED = (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, RecursionError)
"""What taking apart an unexpected document can raise."""
_MAX_DIMENSIONS = 64


@contextmanager
def reading(what: str, hint: str | None = None) -> Iterator[None]:
    """Turns what a document can raise that is taken apart in the block into `CorruptError`: `what`, and why."""
    try:
        yield
    except _MALFORMED as err:
        why = str(err) if isinstance(err, ValueError) else f"{type(err).__name__}: {err}"
        raise CorruptError(f"{what}: {why}", hint=hint) from err


def require(fits: bool, what: str) -> None:
    """Raises ValueError with `what` unless it `fits`."""
    if not fits:
        raise ValueError(what)


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
