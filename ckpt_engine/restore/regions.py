"""Fill parts of arrays from whatever stored pieces overlap them: any number of ranks reads what any other has written.

A piece of which at least half is needed is read whole and verified. Of a large raw piece that is hardly needed only the
needed run of bytes is read; nothing can verify that, and it is counted.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch

from ckpt_engine.errors import CorruptError
from ckpt_engine.ranks.boxes import Box, runs
from ckpt_engine.restore.memory import address_of
from ckpt_engine.restore.named import dtype_of
from ckpt_engine.restore.sources import Sources
from ckpt_engine.restore.stream import READ_BYTES
from ckpt_engine.store.decode import Decoder
from ckpt_engine.store.digest import digest
from ckpt_engine.store.manifest import RAW, Manifest, Piece

WHOLE_BYTES = 1 << 20
"""Pieces up to this size are read whole: a request costs more than the bytes."""
WHOLE_SHARE = 0.5
"""Others too if at least this share of them is needed."""


@dataclass(frozen=True, slots=True)
class Region:
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
class Read:
    """What was read: bytes in all, and those that no digest is of."""

    nbytes: int = 0
    unverified_bytes: int = 0

    def __add__(self, other: Read) -> Read:
        return Read(self.nbytes + other.nbytes, self.unverified_bytes + other.unverified_bytes)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A box of an array on its way: it begins `at` elements into the piece, which has it in `run`."""

    region: Region
    run: Box
    at: int
    box: Box

    def bounds(self) -> tuple[int, int]:
        """The first element of the piece that is needed, and the one after the last."""
        place = self.box.slices(self.run)
        strides = [prod(self.run.shape[dimension + 1 :]) for dimension in range(len(place))]
        first = sum(one.start * stride for one, stride in zip(place, strides, strict=True))
        last = sum((one.stop - 1) * stride for one, stride in zip(place, strides, strict=True))
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


def read_regions(
    sources: Sources, manifest: Manifest, regions: Sequence[Region], stored: Mapping[str, Sequence[Box]]
) -> Read:
    """Fill `regions`; on return all of them are complete.

    Args:
        stored: of every entry the boxes that it has one behind another.

    Raises:
        CorruptError: bytes are missing or differ from their digest, in all storages; names the entry. Regions are
            undefined then.
        NewerFormatError: an encoding this version does not know.
        StorageError: the storages failed.
    """
    by_entry: dict[str, list[Region]] = {}
    for region in regions:
        by_entry.setdefault(region.entry, []).append(region)
    wanted = [one for name, found in by_entry.items() for one in _wanted(manifest, name, found, stored[name])]
    decoder = sources.decoder(manifest)
    buffers = threading.local()

    def buffer(number: int, nbytes: int) -> memoryview:
        kept: dict[int, bytearray] = buffers.__dict__.setdefault("kept", {})
        if len(kept.get(number, b"")) < nbytes:
            kept[number] = bytearray(max(nbytes, WHOLE_BYTES))
        return memoryview(kept[number])[:nbytes]

    def run(span: Sequence[_Wanted]) -> Read:
        one = span[0]
        file = manifest.files[one.piece.file].name
        if not one.is_whole:
            nbytes = one.last - one.first
            data = buffer(0, nbytes)
            sources.read(file, one.piece.offset + one.first, data)
            _place(one, data, one.first)
            return Read(nbytes, nbytes)
        start = one.piece.offset
        stop = span[-1].piece.offset + span[-1].piece.nbytes
        found = sources.view(file, start, stop - start)
        if found is None:
            found = buffer(0, stop - start)
            sources.read(file, start, found)
        for one in span:
            piece = one.piece
            data = found[piece.offset - start :][: piece.nbytes]
            if digest(data) != piece.digest:
                if data.readonly:
                    data = buffer(1, piece.nbytes)
                sources.repair(one.entry, file, piece, data)
            _place(one, _decoded(decoder, one, data, buffer(2, piece.raw_nbytes)), 0)
        return Read(stop - start)

    # Threads inherit the mode in which arithmetic drops subnormal numbers; predictions are made without it.
    pool = ThreadPoolExecutor(
        sources.threads, thread_name_prefix="ckpt-read", initializer=torch.set_flush_denormal, initargs=(False,)
    )
    try:
        return sum((done.result() for done in [pool.submit(run, span) for span in _spans(wanted)]), Read())
    finally:
        pool.shutdown(cancel_futures=True)


def _wanted(manifest: Manifest, name: str, regions: Sequence[Region], boxes: Sequence[Box]) -> Iterator[_Wanted]:
    """The pieces of an entry that regions overlap."""
    entry = manifest.entries[name]
    dtype = dtype_of(entry.dtype)
    size = dtype.itemsize
    if sum(piece.raw_nbytes for piece in entry.pieces) != prod(entry.shape) * size:
        raise CorruptError(f"the pieces of {name!r} do not have the bytes of {entry.dtype} of shape {entry.shape}")
    ends = list(accumulate(box.count for box in boxes))
    number, start = 0, 0
    for piece in entry.pieces:
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
        start += piece.raw_nbytes


def _position(run: Box, box: Box) -> int:
    """Elements of `box` before the first one of `run`, whose offsets are in the box."""
    return sum(at * prod(box.shape[dimension + 1 :]) for dimension, at in enumerate(run.offsets))


def _place(wanted: _Wanted, data: memoryview, skipped: int) -> None:
    """Copy what is needed of a piece, whose first `skipped` bytes `data` lacks."""
    memory = (ctypes.c_char * data.nbytes).from_address(address_of(data))  # `data` may be read-only, and is only read
    flat = torch.frombuffer(memory, dtype=wanted.dtype)
    for copy in wanted.copies:
        # The run may reach beyond what was read; what is needed of it does not.
        first = copy.at - skipped // wanted.dtype.itemsize
        strides = [prod(copy.run.shape[dimension + 1 :]) for dimension in range(len(copy.run.shape))]
        place = copy.box.slices(copy.run)
        offset = first + sum(one.start * stride for one, stride in zip(place, strides, strict=True))
        source = flat.as_strided(copy.box.shape, strides, offset)
        with torch.no_grad():
            copy.region.tensor[copy.box.slices(copy.region.box)].copy_(source)


def _decoded(decoder: Decoder, one: _Wanted, stored: memoryview, out: memoryview) -> memoryview:
    if one.piece.codec == RAW:
        return stored
    decoder.decode(one.entry, one.start, one.piece, stored, out)
    return out


def _spans(wanted: Sequence[_Wanted]) -> list[list[_Wanted]]:
    """Neighbouring pieces that are read whole, joined to requests of at most `READ_BYTES`."""
    spans: list[list[_Wanted]] = []
    for one in sorted(wanted, key=lambda one: (one.piece.file, one.piece.offset)):
        last = spans[-1][-1] if spans else None
        if last is not None and last.is_whole and one.is_whole and last.piece.file == one.piece.file:
            end = last.piece.offset + last.piece.nbytes
            if end == one.piece.offset and end + one.piece.nbytes - spans[-1][0].piece.offset <= READ_BYTES:
                spans[-1].append(one)
                continue
        spans.append([one])
    return spans
