"""Plans which neighbouring tensors of a device cross to the host together.

A transfer costs the host several microseconds however small it is, so small neighbours are packed on the device, and
cross as one. Large tensors go as they are, so that they cost the device's processors nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

BUFFER_BYTES = 64 << 20
"""Device memory for packing; more only for a tensor that is not contiguous and has a longer row."""
DIRECT_BYTES = 4 << 20
"""From here on a contiguous lazy tensor goes as it is."""


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """A tensor on one device, or some of its rows.

    Args:
        index: of its entry.
        start: where its bytes go, counted from the start of the slot.
        nbytes: at least 1.
        rows: length of its first dimension; 1 for a scalar.
        lazy: it may be read until the fence.
        contiguous: its bytes are in the order in which they are stored.
        part: the first row and how many; None: all of it.
    """

    index: int
    start: int
    nbytes: int
    rows: int
    lazy: bool
    contiguous: bool
    part: tuple[int, int] | None = None


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
    parts: tuple[DeviceTensor, ...]
    packed: bool
    lazy: bool


def transfers(items: Sequence[DeviceTensor]) -> list[Transfer]:
    """The transfers of one device, in the order in which they are to be queued.

    Eager ones come first, and of those the packed ones last: what is eager must not change before it was read, and
    the last packed one has been read before it crosses.
    """
    found = list(_transfers(sorted(items, key=lambda item: item.start)))
    return sorted(found, key=lambda t: (t.lazy, t.packed if not t.lazy else 0))


def _transfers(items: Sequence[DeviceTensor]) -> Iterator[Transfer]:
    run: list[DeviceTensor] = []
    for item in items:
        small = item.nbytes < DIRECT_BYTES or (not item.lazy and item.nbytes <= BUFFER_BYTES)
        if item.contiguous and not small:
            yield Transfer(item.start, item.nbytes, (item,), False, item.lazy)
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


def _packed(run: Sequence[DeviceTensor]) -> Transfer:
    nbytes = run[-1].start + run[-1].nbytes - run[0].start
    return Transfer(run[0].start, nbytes, tuple(run), True, run[0].lazy)


def _in_rows(item: DeviceTensor) -> Iterator[Transfer]:
    row_bytes = item.nbytes // item.rows
    step = max(1, BUFFER_BYTES // row_bytes)
    for first in range(0, item.rows, step):
        count = min(step, item.rows - first)
        part = replace(item, start=item.start + first * row_bytes, nbytes=count * row_bytes, part=(first, count))
        yield Transfer(part.start, part.nbytes, (part,), True, item.lazy)
