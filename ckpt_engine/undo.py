"""Undoes what a block has begun where the block fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_failure(undo: Callable[[], object]) -> Iterator[None]:
    """Calls `undo` if the block fails, whatever the reason."""
    try:
        yield
    except BaseException:
        undo()
        raise
