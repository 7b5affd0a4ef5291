"""Reads parts of stored arrays: only the bytes that are needed, and whole pieces where most of a piece is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch

from ckpt_engine.dcp.outline import Box, Stored
from ckpt_engine.errors import CorruptError
from ckpt_engine.restore.sources import Sources
from ckpt_engine.store.digest import digest
from ckpt_engine.store.manifest import RAW, Manifest, Piece

MOST = 0.5
"""Of a piece of which more than this share is needed all is read, and verified."""
STRIP_BYTES = 64 << 20
"""Of a part that is not one run of bytes at most so much is in memory at once, per thread; more only for one row."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A part of a tensor, and where it goes.

    Args:
        stored: the tensor.
        number: of the box that it is a part of.
        part: in that box.
        target: of the part's shape; any device, dtype and strides.
    """

    stored: Stored
    number: int
    part: Box
    target: torch.Tensor

    @property
    def is_whole_entry(self) -> bool:
        """Whether it is all of its tensor, and the target can take the bytes as they are."""
        box = self.stored.boxes[self.number]
        return (
            len(self.stored.boxes) == 1
            and self.part == Box((0,) * len(box.shape), box.shape)
            and self.target.dtype == self.stored.dtype
            and self.target.is_contiguous()
        )


class BoxReader:
    """Reads parts of one snapshot's arrays.

    `unverified_bytes` counts what was read of pieces without the rest of them, which no digest covers.
    """

    def __init__(self, sources: Sources, manifest: Manifest) -> None:
        self._sources = sources
        self._manifest = manifest
        self._decoder = sources.decoder(manifest)
        self._files = [file.name for file in manifest.files]
        self.unverified_bytes = 0

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill the targets.

        Raises:
            CorruptError: bytes are missing, or a piece that was read whole differs from its digest.
            NewerFormatError, StorageError: as `Sources.read` and `Decoder.read`.
        """
        jobs = [strip for one in wanted for strip in _strips(one)]
        if not jobs:
            return
        pool = ThreadPoolExecutor(self._sources.threads, thread_name_prefix="ckpt-dcp")
        try:
            # Counted here: threads would count over each other.
            self.unverified_bytes += sum(pool.map(self._fill, jobs))
        finally:
            pool.shutdown(cancel_futures=True)

    def _fill(self, one: Wanted) -> int:
        """Returns the bytes that no digest covers."""
        box = one.stored.boxes[one.number]
        size = one.stored.dtype.itemsize
        before = sum(prod(other.shape) for other in one.stored.boxes[: one.number])
        first, last = _span(box.shape, one.part)
        start, stop = (before + first) * size, (before + last + 1) * size
        # All of the span, of which the part is a view with the box's strides.
        memory = torch.empty(stop - start, dtype=torch.uint8)
        unverified = self._bytes(one.stored.entry, start, memory.numpy().data)
        found = memory.view(one.stored.dtype).as_strided(one.part.shape, _strides(box.shape))
        one.target.copy_(found)
        return unverified

    def _bytes(self, name: str, start: int, out: memoryview) -> int:
        """Fill `out` with the bytes of an entry from `start` on; returns how many of them no digest covers."""
        pieces = self._manifest.entries[name].pieces
        starts = list(accumulate((piece.raw_nbytes for piece in pieces), initial=0))
        stop = start + len(out)
        if stop > starts[-1]:
            raise CorruptError(f"{name!r} has {starts[-1]} bytes in the manifest, and needs {stop}")
        unverified = 0
        for piece, at in zip(pieces, starts, strict=False):
            a, b = max(start, at), min(stop, at + piece.raw_nbytes)
            if a >= b:
                continue
            room = out[a - start : b - start]
            if piece.codec == RAW and b - a <= MOST * piece.nbytes:
                self._sources.read(self._files[piece.file], piece.offset + a - at, room)
                unverified += b - a
            elif b - a == piece.raw_nbytes:
                self._piece(name, at, piece, room)
            else:
                whole = memoryview(bytearray(piece.raw_nbytes))
                self._piece(name, at, piece, whole)
                room[:] = whole[a - at : b - at]
        return unverified

    def _piece(self, name: str, start: int, piece: Piece, out: memoryview) -> None:
        if piece.codec != RAW:
            self._decoder.read(name, start, piece, out)
            return
        file = self._files[piece.file]
        self._sources.read(file, piece.offset, out)
        if digest(out) != piece.digest:
            self._sources.repair(name, file, piece, out)


def _strips(one: Wanted) -> Iterator[Wanted]:
    """The part cut along its first dimension, so that not too much is in memory at once."""
    part = one.part
    if not prod(part.shape):
        return
    box = one.stored.boxes[one.number]
    row_bytes = prod(box.shape[1:]) * one.stored.dtype.itemsize
    rows = max(1, STRIP_BYTES // max(1, row_bytes))
    if not part.shape or part.shape[0] <= rows:
        yield one
        return
    for row in range(0, part.shape[0], rows):
        count = min(rows, part.shape[0] - row)
        cut = Box((part.offsets[0] + row, *part.offsets[1:]), (count, *part.shape[1:]))
        yield Wanted(one.stored, one.number, cut, one.target.narrow(0, row, count))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def _span(shape: Sequence[int], part: Box) -> tuple[int, int]:
    """The first and the last element of a part, in the order of the box."""
    strides = _strides(shape)
    first = sum(at * stride for at, stride in zip(part.offsets, strides, strict=True))
    return first, first + sum((n - 1) * stride for n, stride in zip(part.shape, strides, strict=True))
