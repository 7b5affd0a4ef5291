"""Boxes: the parts of an array that ranks have, where they overlap, and how they lie behind each other. No torch.

Divides the arrays that are the same on all ranks over the ranks by bytes: a pure function of the structure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

from ckpt_engine.errors import FormatError
from ckpt_engine.store.container import digest


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of an array: its first element in every dimension, and how many from there."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of an array."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def count(self) -> int:
        """Elements."""
        return prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """What both have; None: nothing."""
        offsets, shape = [], []
        for a, n, b, m in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if stop <= start:
                return None
            offsets.append(start)
            shape.append(stop - start)
        return Box(tuple(offsets), tuple(shape))

    def slices(self, inside: Box) -> tuple[slice, ...]:
        """The indices of this box in an array that is `inside`."""
        starts = (a - b for a, b in zip(self.offsets, inside.offsets, strict=True))
        return tuple(slice(start, start + n) for start, n in zip(starts, self.shape, strict=True))


@dataclass(frozen=True)
class Grid:
    """How an array is divided over ranks.

    Args:
        shape: of the array.
        boxes: they tile it, in the order of their offsets; no empty one, unless the array is empty. Or they are runs
            of its elements in C order: boxes of one dimension, whatever the array has.
        holders: the ranks that have each box, in order. No rank has two.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    holders: tuple[tuple[int, ...], ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Elements that lie before each box where the boxes are stored one behind another."""
        return tuple(accumulate((box.count for box in self.boxes), initial=0))[:-1]

    @cached_property
    def signature(self) -> str:
        """What tells it from other ones."""
        return digest(repr((self.shape, self.boxes, self.holders)).encode())

    @cached_property
    def _index(self) -> Mapping[int, int]:
        return {rank: number for number, ranks in enumerate(self.holders) for rank in ranks}

    def of(self, rank: int) -> int | None:
        """The number of the box that a rank has; None: it has nothing."""
        return self._index.get(rank)

    @property
    def is_runs(self) -> bool:
        """Whether the boxes do not have the dimensions of the array."""
        return any(len(box.shape) != len(self.shape) for box in self.boxes)

    @property
    def is_rows(self) -> bool:
        """Whether the boxes, one behind another, are the array in C order."""
        if self.is_runs:
            return True
        lead = leading(self.shape)
        return all(box.shape[lead + 1 :] == self.shape[lead + 1 :] for box in self.boxes)


def leading(shape: Sequence[int]) -> int:
    """The first dimension that can be cut; slices of it are runs of consecutive elements."""
    return next((dimension for dimension, n in enumerate(shape) if n != 1), 0)


def tiles(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether boxes that are the product of a division of every dimension cover an array without overlapping."""
    count = 1
    for dimension, n in enumerate(shape):
        spans = sorted({(box.offsets[dimension], box.shape[dimension]) for box in boxes})
        ends = list(accumulate((length for _, length in spans), initial=0))
        if [*(start for start, _ in spans), n] != ends:
            return False
        count *= len(spans)
    return count == len(set(boxes)) == len(boxes)


def boxes_of(node: Mapping[str, Any], shape: Sequence[int]) -> tuple[Box, ...]:
    """The boxes of the array of a leaf, in the order in which they are stored; one if it is in C order.

    Raises:
        FormatError: they do not make the array.
    """
    if "blocks" not in node:
        return (Box.whole(shape),)
    try:
        boxes = tuple(Box(tuple(offsets), tuple(sizes)) for offsets, sizes in node["blocks"])
        numbers = (n for box in boxes for n in (*box.offsets, *box.shape))
        fits = (
            all(type(n) is int and n >= 0 for n in numbers)
            and all(len(box.offsets) == len(box.shape) == len(shape) for box in boxes)
            and tiles(shape, boxes)
        )
    except (TypeError, ValueError) as err:
        raise FormatError(f"the blocks of {node.get('entry')!r} are malformed: {err}") from err
    if not fits:
        raise FormatError(f"the blocks of {node.get('entry')!r} do not make an array of shape {list(shape)}")
    return boxes


def runs(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that elements `start` to `stop` of an array in C order are, in that order: at most 2 per dimension."""
    if stop <= start:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = start // row, stop // row
    if first * row == start and last * row == stop:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
        return
    if first == (stop - 1) // row:
        for box in runs(shape[1:], start - first * row, stop - first * row):
            yield Box((first, *box.offsets), (1, *box.shape))
        return
    middle = first if first * row == start else first + 1
    yield from runs(shape, start, middle * row)
    yield from runs(shape, middle * row, last * row)
    yield from runs(shape, last * row, stop)


WHOLE = 0.02
"""An array of less than this part of a rank's share is not cut: it goes to one rank as it is."""


@dataclass(frozen=True, slots=True)
class PlacedArray:
    """An array to place.

    Args:
        nbytes: its bytes.
        rows: how many equal parts it can be cut into.
        shared: the same on all ranks; False: rank 0 writes it.
    """

    nbytes: int
    rows: int
    shared: bool = True


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows `start` to `start + rows` of an array, which `rank` writes."""

    rank: int
    start: int
    rows: int


def divide(items: Sequence[PlacedArray], size: int) -> list[tuple[Slice, ...]]:
    """Who writes what: for each item its slices in order, which cover it.

    Every rank gets the same number of bytes, what rank 0 alone has included, as far as rows are fine enough: it is off
    by one row, or by half an item that is not cut, at each end. Every rank that calls this gets the same answer.

    Args:
        items: in an order that all ranks have.
        size: number of ranks, at least 1.
    """
    shared_bytes = sum(item.nbytes for item in items if item.shared)
    alone_bytes = sum(item.nbytes for item in items if not item.shared)
    share_bytes = (shared_bytes + alone_bytes) / size
    ends = _ends(shared_bytes, int(max(0, share_bytes - alone_bytes)), size)
    found: list[tuple[Slice, ...]] = []
    at = 0
    for item in items:
        if not item.shared or item.nbytes == 0 or size == 1:
            found.append((Slice(0, 0, item.rows),))
            continue
        is_whole = item.rows < 2 or item.nbytes < WHOLE * share_bytes
        found.append(
            (Slice(_rank_at(ends, at + item.nbytes // 2), 0, item.rows),) if is_whole else _cut(item, at, ends)
        )
        at += item.nbytes
    return found


def _ends(shared_bytes: int, first_bytes: int, size: int) -> list[int]:
    """Where the share of each rank ends on the line of all shared bytes."""
    first_bytes = min(first_bytes, shared_bytes)
    if size == 1:
        return [shared_bytes]
    return [first_bytes + (shared_bytes - first_bytes) * k // (size - 1) for k in range(size)]


def _rank_at(ends: Sequence[int], position: int) -> int:
    return min(bisect_right(ends, position), len(ends) - 1)


def _cut(item: PlacedArray, at: int, ends: Sequence[int]) -> tuple[Slice, ...]:
    slices = []
    start = 0
    for rank in range(_rank_at(ends, at), len(ends)):
        stop = min(item.rows, max(start, round((ends[rank] - at) * item.rows / item.nbytes)))
        if rank == len(ends) - 1:
            stop = item.rows
        if stop > start:
            slices.append(Slice(rank, start, stop - start))
        start = stop
        if start == item.rows:
            break
    return tuple(slices)
