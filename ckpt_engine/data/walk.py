"""Walks over objects that refer to each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


def walk(
    root: tuple[str, Any], inner: Callable[[str, Any], Iterable[tuple[str, Any]]], most: int
) -> Iterator[tuple[str, Any]]:
    """An object and those that it leads to, each once by its shortest path.

    Args:
        root: the path of the first one, and itself.
        inner: the objects right below one, by path; asked when the caller is done with it.
        most: so many at most.
    """
    queue, seen = [root], set[int]()
    for path, node in queue:  # it grows meanwhile
        if id(node) not in seen and len(seen) < most:
            seen.add(id(node))
            yield path, node
            queue += inner(path, node)


def leaves(value: Any) -> Iterator[Any]:
    """What is in mappings, lists, tuples and deques, in any nesting and in order; of anything else itself."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple | deque):
        yield value
        return
    for one in value:
        yield from leaves(one)
