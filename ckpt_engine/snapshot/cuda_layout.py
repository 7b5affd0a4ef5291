"""How the device tensors of one plan travel to the arena: which go as they are, and which are packed together first.

A transfer costs the host several microseconds however small it is, so small neighbours are packed on the device, which
takes one launch for many of them and next to none of the device's bandwidth, and cross as one. A tensor that is not
contiguous is packed too: its bytes have to be put in order on the device anyway. Large tensors go as they are, so that
they cost the device's processors nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BUFFER_BYTES = 64 << 20
"""Device memory for packing; more only for a tensor that is not contiguous and has a longer row."""
DIRECT_BYTES = 16 << 20
"""From here on a contiguous lazy tensor goes as it is."""


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor on one device.

    Args:
        index: of its entry.
        start: where its bytes go, counted from the start of the slot.
        nbytes: at least 1.
        rows: length of its first dimension; 1 for a scalar.
        lazy: it may be read until the fence.
        contiguous: its bytes are in the order in which they are stored.
    """

    index: int
    start: int
    nbytes: int
    rows: int
    lazy: bool
    contiguous: bool


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a tensor; `rows` is None for all of it."""

    index: int
    start: int
    nbytes: int
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """Neighbouring bytes of the slot that cross together.

    Args:
        parts: back to back, in the order of the slot.
        packed: they are packed on the device first.
        lazy: all of them may be read until the fence.
    """

    start: int
    nbytes: int
    parts: tuple[Part, ...]
    packed: bool
    lazy: bool


def transfers(items: Sequence[Item]) -> list[Transfer]:
    """The transfers of one device, in the order in which they are to be queued.

    Eager ones come first, and of those the packed ones last: what is eager must not change before it was read, and
    the last packed one has been read before it crosses.
    """
    found = list(_transfers(sorted(items, key=lambda item: item.start)))
    return sorted(found, key=lambda t: (t.lazy, t.packed if not t.lazy else 0))


def _transfers(items: Sequence[Item]) -> Iterator[Transfer]:
    run: list[Item] = []
    for item in items:
        small = item.nbytes < DIRECT_BYTES or (not item.lazy and item.nbytes <= BUFFER_BYTES)
        if item.contiguous and not small:
            yield Transfer(item.start, item.nbytes, (_whole(item),), False, item.lazy)
        elif item.nbytes > BUFFER_BYTES:
            yield from _in_rows(item)
        else:
            if run and (
                run[-1].start + run[-1].nbytes != item.start
                or item.start + item.nbytes - run[0].start > BUFFER_BYTES
                or item.lazy is not run[0].lazy
            ):
                yield _packed(run)
                run = []
            run.append(item)
    if run:
        yield _packed(run)


def _packed(run: Sequence[Item]) -> Transfer:
    parts = tuple(_whole(item) for item in run)
    nbytes = run[-1].start + run[-1].nbytes - run[0].start
    return Transfer(run[0].start, nbytes, parts, True, run[0].lazy)


def _in_rows(item: Item) -> Iterator[Transfer]:
    row_bytes = item.nbytes // item.rows
    step = max(1, BUFFER_BYTES // row_bytes)
    for first in range(0, item.rows, step):
        count = min(step, item.rows - first)
        part = Part(item.index, item.start + first * row_bytes, count * row_bytes, (first, count))
        yield Transfer(part.start, part.nbytes, (part,), True, item.lazy)


def _whole(item: Item) -> Part:
    return Part(item.index, item.start, item.nbytes)
