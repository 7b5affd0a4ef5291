"""Fills parts of arrays from whatever pieces are stored.

A piece of which at least half is needed is read whole and verified. Of a large raw piece that is hardly needed only the
needed run of bytes is read; nothing can verify that, and it is counted."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import prod

import torch

from ckpt_engine.errors import CorruptError
from ckpt_engine.grouping import grouped
from ckpt_engine.ranks.boxes import Box, runs
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.restore.memory import address_of
from ckpt_engine.restore.read import READ_BYTES, Move, StagingBuffer, private_memory, read_moves
from ckpt_engine.state.json_types import dtype_of
from ckpt_engine.store.manifest import RAW, Manifest, Piece

WHOLE_BYTES = 64 << 10
"""Pieces up to this size are read whole: a request costs more than the bytes."""
WHOLE_SHARE = 0.5
"""Others too if at least this share of them is needed."""


@dataclass(frozen=True, slots=True)
class ArrayRegion:
    """A part of an array to fill.

    Args:
        entry: the array.
        box: the part.
        tensor: plain tensor of the shape of the box.
    """

    entry: str
    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Copy:
    """A box of an array on its way: it begins `at` elements into the piece, which has it in `run`."""

    region: ArrayRegion
    run: Box
    at: int
    box: Box

    @property
    def strides(self) -> list[int]:
        """Of the run."""
        return [prod(self.run.shape[dimension + 1 :]) for dimension in range(len(self.run.shape))]

    def bounds(self) -> tuple[int, int]:
        """The first element of the piece that is needed, and the one after the last."""
        place = list(zip(self.box.slices(self.run), self.strides, strict=True))
        first = sum(one.start * stride for one, stride in place)
        last = sum((one.stop - 1) * stride for one, stride in place)
        return self.at + first, self.at + last + 1


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A piece with what is needed of it: bytes `first` to `last` of its decoded ones; `start` is where it begins."""

    entry: str
    piece: Piece
    start: int
    dtype: torch.dtype
    copies: Sequence[_Copy]
    first: int
    last: int

    @property
    def is_whole(self) -> bool:
        piece = self.piece
        return piece.codec != RAW or piece.nbytes <= WHOLE_BYTES or self.last - self.first >= WHOLE_SHARE * piece.nbytes

    def place(self, address: int, nbytes: int, skipped: int = 0) -> None:
        """Copy what is needed of the decoded piece, all of it but its first `skipped` bytes, from where it is."""
        flat = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=self.dtype)
        for copy in self.copies:
            # The run may reach beyond what was read; what is needed of it does not.
            first = copy.bounds()[0] - skipped // self.dtype.itemsize
            source = flat.as_strided(copy.box.shape, copy.strides, first)
            with torch.no_grad():
                copy.region.tensor[copy.box.slices(copy.region.box)].copy_(source)


def read_regions(
    sources: Sources, manifest: Manifest, regions: Sequence[ArrayRegion], stored: Mapping[str, Sequence[Box]]
) -> int:
    """Fill `regions`; on return all of them are complete.

    Args:
        stored: of every entry the boxes that it has one behind another.

    Returns:
        Bytes that were read without the rest of their pieces: no digest is of them.

    Raises:
        CorruptError: bytes are missing or differ from their digest, in all storages; names the entry. Regions are
            undefined then.
        NewerFormatError: an encoding this version does not know.
        StorageError: the storages failed.
    """
    if not regions:
        return 0
    by_entry = grouped((region.entry, region) for region in regions)
    wanted = [one for name, found in by_entry.items() for one in _wanted(manifest, name, found, stored[name])]
    whole = {(one.entry, one.start): one for one in wanted if one.is_whole}
    parts = [one for one in wanted if not one.is_whole]
    moves = [Move(one.entry, one.piece, one.start, 0) for one in whole.values()]
    read_moves(
        sources, manifest, moves, _Scatter(whole), [partial(_read_part, sources, manifest, one) for one in parts]
    )
    return sum([one.last - one.first for one in parts])


def _read_part(sources: Sources, manifest: Manifest, one: _Wanted) -> None:
    data = bytearray(one.last - one.first)
    sources.read(manifest.files[one.piece.file].name, one.piece.offset + one.first, memoryview(data))
    one.place(address_of(memoryview(data)), len(data), one.first)


@dataclass(eq=False)
class _Scatter(StagingBuffer):
    """Copies what is needed of pieces to all regions that overlap them."""

    is_host = True
    _wanted: Mapping[tuple[str, int], _Wanted]
    _own: threading.local = field(default_factory=threading.local)

    def room(self, nbytes: int, entry: str) -> int:  # noqa: ARG002
        kept: mmap.mmap | None = getattr(self._own, "kept", None)
        if kept is None or len(kept) < nbytes:
            kept = self._own.kept = private_memory(max(nbytes, READ_BYTES))
        return address_of(memoryview(kept))

    def send(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._wanted[move.entry, move.start].place(move.address, move.piece.raw_nbytes)


def _wanted(manifest: Manifest, name: str, regions: Sequence[ArrayRegion], boxes: Sequence[Box]) -> Iterator[_Wanted]:
    """The pieces of an entry that regions overlap."""
    entry = manifest.entries[name]
    dtype = dtype_of(entry.dtype)
    size = dtype.itemsize
    if entry.nbytes != prod(entry.shape) * size:
        raise CorruptError(f"the pieces of {name!r} do not have the bytes of {entry.dtype} of shape {entry.shape}")
    ends = list(accumulate(box.count for box in boxes))
    number = 0
    for start, piece in entry.placed():
        first, last = start // size, (start + piece.raw_nbytes) // size
        copies: list[_Copy] = []
        while number < len(boxes):
            box, box_start = boxes[number], ends[number] - boxes[number].count
            for one in runs(box.shape, max(first - box_start, 0), min(last - box_start, box.count)):
                at = box_start + _position(one, box) - first
                run = Box(tuple(a + b for a, b in zip(box.offsets, one.offsets, strict=True)), one.shape)
                both = ((region, region.box.overlap(run)) for region in regions)
                copies += [_Copy(region, run, at, box) for region, box in both if box is not None]
            if ends[number] > last:
                break
            number += 1
        if copies:
            bounds = [copy.bounds() for copy in copies]
            low, high = min(a for a, _ in bounds) * size, max(b for _, b in bounds) * size
            yield _Wanted(name, piece, start, dtype, copies, low, high)


def _position(run: Box, box: Box) -> int:
    """Elements of `box` before the first one of `run`, whose offsets are in the box."""
    return sum(at * prod(box.shape[dimension + 1 :]) for dimension, at in enumerate(run.offsets))
