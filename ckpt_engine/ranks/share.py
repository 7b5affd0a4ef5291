"""Divides the arrays that are the same on all ranks over the ranks by bytes: a pure function of the structure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

WHOLE = 0.02
"""An array of less than this part of a rank's share is not cut: it goes to one rank as it is."""


@dataclass(frozen=True, slots=True)
class Item:
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


def divide(items: Sequence[Item], size: int) -> list[tuple[Slice, ...]]:
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
        if item.rows < 2 or item.nbytes < WHOLE * share_bytes:
            found.append((Slice(_rank_at(ends, at + item.nbytes // 2), 0, item.rows),))
        else:
            found.append(_cut(item, at, ends))
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


def _cut(item: Item, at: int, ends: Sequence[int]) -> tuple[Slice, ...]:
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
