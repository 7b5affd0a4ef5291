"""Reads the arrays of one snapshot: parallel ranges straight into their final memory, digests checked on the way.

Arrays that lie in pieces, or are encoded, are put together by `read`.

Read entries into live memory: large pieces straight to where they belong, small ones together through a buffer.

Encoded pieces are decoded where they belong, over their bases.

Reads the deltas of many pieces in few requests: those of neighbouring pieces lie behind each other in each file.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

import torch

from ckpt_engine.copy import host_memory
from ckpt_engine.errors import (
    CorruptError,
    FormatError,
)
from ckpt_engine.observe import units
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.restore.memory import address_of
from ckpt_engine.state.json_types import dtype_of
from ckpt_engine.store.container import digest
from ckpt_engine.store.decode import Decoder, Rooms, chain_of, is_plain
from ckpt_engine.store.manifest import RAW, Entry, Manifest, Piece
from ckpt_engine.store.storage.disk import DIRECT_MIN_BYTES

UNASKED_BYTES = 64 << 20
"""What any machine has room for: it is not asked."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A piece and the entry it belongs to."""

    entry: str
    piece: Piece


def require_room(manifest: Manifest, names: Iterable[str]) -> None:
    """Refuse what this machine has no memory for: the kernel would give it out, and kill somebody later.

    Raises:
        FormatError: says how much is needed, and how much there is.
    """
    needed = sum([piece.raw_nbytes for name in names for piece in manifest.entries[name].pieces])
    room = host_memory.look() if needed > UNASKED_BYTES else None
    if room is not None and needed > room.nbytes:
        raise FormatError(
            f"its tensors need {units.size(needed)} of memory, and {units.size(room.nbytes)} are left ({room.limit})",
            hint="load it where there is more, or with `into`, into tensors that are there",
        )


def private_memory(nbytes: int) -> mmap.mmap:
    """At least so much. Private: of shared memory the pages are small, and direct reads take twice as long; and whole
    huge pages, which the kernel then puts where they can be huge.
    """
    if nbytes > host_memory.HUGE_BYTES:
        nbytes = -(-nbytes // host_memory.HUGE_BYTES) * host_memory.HUGE_BYTES
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as err:
        raise FormatError(f"this machine gives no {units.size(nbytes)} of memory: {err}") from err


def read_entries(sources: Sources, manifest: Manifest, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """Read and verify entries; of those that lie in one piece one allocation per data file, no second copy.

    Args:
        names: which entries; default all.

    Returns:
        Contiguous CPU tensors by entry name, with their stored dtype and shape.

    Raises:
        CorruptError: bytes are missing or differ from their digest, in all storages; names the entry.
        NewerFormatError: an encoding this version does not know.
        StorageError: the storages failed.
    """
    entries = {name: manifest.entries[name] for name in (manifest.entries if names is None else names)}
    require_room(manifest, entries)
    by_file: dict[int, list[_Wanted]] = {}
    composed: dict[str, torch.Tensor] = {}
    for name, entry in entries.items():
        if not is_plain(entry):
            composed[name] = _fresh(manifest, name, entry)
            continue
        for piece in entry.pieces:
            by_file.setdefault(piece.file, []).append(_Wanted(name, piece))
    pool = ThreadPoolExecutor(sources.threads, thread_name_prefix="ckpt-read")
    try:
        images = {
            file: _Image(sources, manifest.files[file].name, manifest.files[file].nbytes, wanted, pool)
            for file, wanted in sorted(by_file.items())
        }
        for image in images.values():
            image.verify()
    finally:
        pool.shutdown(cancel_futures=True)
    if composed:
        stream_into(sources, manifest, composed, fresh=True)
    return {name: composed[name] if name in composed else _tensor(entry, images) for name, entry in entries.items()}


class _Image:
    """Memory for the part of one data file that is wanted, filled in the background in the order of the file."""

    def __init__(
        self, sources: Sources, name: str, nbytes: int, wanted: Sequence[_Wanted], pool: ThreadPoolExecutor
    ) -> None:
        self._sources = sources
        self._name = name
        self._wanted = sorted(wanted, key=attrgetter("piece.offset"))
        last = max([w.piece.offset + w.piece.nbytes for w in wanted])
        if last > nbytes:
            raise CorruptError(f"the manifest names bytes up to {last} of {name}, which has {nbytes}")
        self._base = self._wanted[0].piece.offset // READ_BYTES * READ_BYTES
        # Untouched memory costs nothing, so gaps between wanted pieces are simply not read.
        self._memory = private_memory(last - self._base)
        host_memory.advise(self._memory)
        self._bytes = memoryview(self._memory)
        self._address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        first_page = self._wanted[0].piece.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._reads: dict[int, Future[None]] = {}
        for number in sorted({n for w in wanted for n in _blocks(w.piece)}):
            start = max(number * READ_BYTES, first_page)
            stop = min((number + 1) * READ_BYTES, last)
            self._reads[number] = pool.submit(self._read, start, stop)

    def _read(self, start: int, stop: int) -> None:
        host_memory.populate(self._address + start - self._base, stop - start)
        self._sources.read(self._name, start, self._range(start, stop))

    def verify(self) -> None:
        """Wait for the bytes and compare every piece with its digest."""
        for wanted in self._wanted:
            piece = wanted.piece
            for number in _blocks(piece):
                self._reads[number].result()
            stored = self._range(piece.offset, piece.offset + piece.nbytes)
            if digest(stored) != piece.digest:
                self._sources.repair(wanted.entry, self._name, piece, stored)

    def tensor(self, offset: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        """A tensor over the bytes from `offset` on; it keeps the memory alive."""
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset - self._base)

    def _range(self, start: int, stop: int) -> memoryview:
        return self._bytes[start - self._base : stop - self._base]


def _blocks(piece: Piece) -> range:
    return range(piece.offset // READ_BYTES, -(-(piece.offset + piece.nbytes) // READ_BYTES))


def _fresh(manifest: Manifest, name: str, entry: Entry) -> torch.Tensor:
    """A tensor for an entry, to be filled; it begins in a page where its first bytes do in a file."""
    nbytes = sum(piece.raw_nbytes for piece in entry.pieces)
    dtype, count = dtype_of(entry.dtype), math.prod(entry.shape)
    if count * dtype.itemsize != nbytes:
        raise CorruptError(f"the manifest has {nbytes} bytes for {entry.dtype} of shape {entry.shape}")
    skew = chain_of(manifest, name, 0, entry.pieces[0])[-1].offset % mmap.PAGESIZE
    skew -= skew % dtype.itemsize
    memory = private_memory(skew + nbytes)
    host_memory.advise(memory)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=skew).view(entry.shape)


def _tensor(entry: Entry, images: Mapping[int, _Image]) -> torch.Tensor:
    dtype = dtype_of(entry.dtype)
    count = math.prod(entry.shape)
    if count * dtype.itemsize != sum([piece.nbytes for piece in entry.pieces]):
        raise CorruptError(f"the manifest has other bytes than {entry.dtype} of shape {entry.shape} needs")
    if count == 0:
        return torch.empty(entry.shape, dtype=dtype)
    first = entry.pieces[0]
    return images[first.file].tensor(first.offset, dtype, count).view(entry.shape)


READ_BYTES = 16 << 20
"""Bytes per request; of whole files requests start at multiples of it, so that the page cache can be bypassed."""


class Landing(Protocol):
    """Host memory in which pieces are made whose place is on a device. Several threads at once."""

    def take(self, moves: Sequence[Move]) -> list[Move]:
        """The same pieces with addresses in host memory, which are the thread's own until its next call."""
        ...

    def send(self, moves: Sequence[Move]) -> None:
        """They are whole and verified there: queue their copies to where they belong."""
        ...


def stream_into(
    sources: Sources,
    manifest: Manifest,
    targets: Mapping[str, torch.Tensor],
    *,
    fresh: bool = False,
    landing: Landing | None = None,
) -> None:
    """Fill `targets` (contiguous tensors by entry name) with their entries.

    Every piece is verified. If an error is raised, what is in the targets is undefined.

    Args:
        fresh: the memory of the targets has never been touched.
        landing: of targets on devices; None: they are in host memory.

    Raises:
        CorruptError: bytes are missing or differ from their digest, in all storages; names the entry.
        NewerFormatError: an encoding this version does not know.
        StorageError: the storages failed.
    """
    moves = _moves(manifest, targets)
    if not moves:
        return
    plain = [move for move in moves if move.piece.base is None]
    filler, memory = _Filler(sources, manifest, fresh, landing), Memory()
    # Threads inherit the mode in which arithmetic drops subnormal numbers; predictions are made without it.
    pool = ThreadPoolExecutor(
        sources.threads, thread_name_prefix="ckpt-read", initializer=torch.set_flush_denormal, initargs=(False,)
    )
    try:
        begun = [pool.submit(filler.fill_raw, move) for move in plain if filler.is_direct(move)]
        begun += [
            pool.submit(filler.fill_span, span)
            for span in _spans([move for move in plain if not filler.is_direct(move)])
        ]
        for batch in batches(manifest, _together([move for move in moves if move.piece.base is not None])):
            # Work begins in this order, so that no thread waits for what no other has begun with.
            for one in batch.ranges:
                one.data = pool.submit(one.read, sources, manifest, memory)
            ready = sources.decoder(manifest, filler.read_base, batch.stored, memory)
            begun += [pool.submit(filler.fill_together, mates, batch, ready, memory) for mates in batch.moves]
        for done in begun:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _moves(manifest: Manifest, targets: Mapping[str, torch.Tensor]) -> list[Move]:
    """Where each piece of each entry goes."""
    moves = []
    for name, target in targets.items():
        pieces = manifest.entries[name].pieces
        nbytes = sum([piece.raw_nbytes for piece in pieces])
        if nbytes != target.nbytes:
            raise CorruptError(f"{name!r} has {nbytes} bytes in the manifest, and needs {target.nbytes}")
        start = 0
        for piece in pieces:
            moves.append(Move(name, piece, start, target.data_ptr() + start))
            start += piece.raw_nbytes
    return moves


class _Filler:
    """Reads pieces of one snapshot into where they belong, verified. Several threads at once.

    Args:
        fresh, landing: as for `stream_into`.
    """

    def __init__(self, sources: Sources, manifest: Manifest, fresh: bool, landing: Landing | None) -> None:
        self._sources = sources
        self._manifest = manifest
        self._fresh = fresh
        self._landing = landing
        self._decoder = sources.decoder(manifest)
        self._buffers = threading.local()

    def is_direct(self, move: Move) -> bool:
        """Whether it is read to where it belongs without a buffer."""
        return self._landing is None and move.piece.codec == RAW and move.piece.nbytes >= DIRECT_MIN_BYTES

    def fill_raw(self, move: Move) -> None:
        """One that `is_direct`."""
        piece, out = move.piece, _memory_of(move)
        if self._fresh:
            host_memory.populate(move.address, piece.nbytes)
        self.read_base(move.entry, piece, out)
        if digest(out) != piece.digest:
            self._sources.repair(move.entry, self._manifest.files[piece.file].name, piece, out)

    def fill_span(self, span: Sequence[Move]) -> None:
        """Neighbours in a file, in one request."""
        first, last = span[0].piece, span[-1].piece
        file = self._manifest.files[first.file]
        start = first.offset // mmap.PAGESIZE * mmap.PAGESIZE  # whole pages go around the page cache at once
        end = last.offset + last.nbytes
        stop = max(end, min(file.nbytes, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE))
        data = self._sources.view(file.name, start, stop - start)
        if data is None:
            data = self._buffer(stop - start)
            self._sources.read(file.name, start, data)
        places = span if self._landing is None else self._landing.take(span)
        for move in places:
            piece = move.piece
            stored = data[piece.offset - start :][: piece.nbytes]
            if digest(stored) != piece.digest:
                if stored.readonly:
                    stored = self._buffer(piece.nbytes)
                self._sources.repair(move.entry, file.name, piece, stored)
            if self._fresh:
                host_memory.populate(move.address, piece.raw_nbytes)
            _place(self._decoder, move, stored)
        if self._landing is not None:
            self._landing.send(places)

    def fill_together(self, mates: Sequence[Move], batch: Batch, decoder: Decoder, memory: Memory) -> None:
        """One that is made of a chain, or those of a group."""
        places = mates if self._landing is None else self._landing.take(mates)
        if self._fresh:
            for place in places:
                host_memory.populate(place.address, place.piece.raw_nbytes)
        decoder.read_together(places[0].start, {place.entry: (place.piece, _memory_of(place)) for place in places})
        batch.done(memory)
        if self._landing is not None:
            self._landing.send(places)

    def read_base(self, _: str, piece: Piece, out: memoryview) -> None:
        """Unverified."""
        self._sources.read(self._manifest.files[piece.file].name, piece.offset, out)

    def _buffer(self, nbytes: int) -> memoryview:
        """Of this thread."""
        kept: mmap.mmap | None = getattr(self._buffers, "kept", None)
        if kept is None or len(kept) < nbytes:
            kept = self._buffers.kept = private_memory(-(-nbytes // DIRECT_MIN_BYTES) * DIRECT_MIN_BYTES)
            host_memory.advise(kept)
            host_memory.populate(address_of(memoryview(kept)), len(kept))
        # Views are never released by hand: frames of an error that was caught may still hold parts of them.
        return memoryview(kept)[:nbytes]


def _place(decoder: Decoder, move: Move, stored: memoryview) -> None:
    piece = move.piece
    if piece.codec == RAW:
        ctypes.memmove(move.address, address_of(stored), piece.nbytes)
        return
    decoder.decode(move.entry, move.start, piece, stored, _memory_of(move))


def _memory_of(move: Move) -> memoryview:
    return memoryview((ctypes.c_char * move.piece.raw_nbytes).from_address(move.address)).cast("B")


def _together(moves: Sequence[Move]) -> list[list[Move]]:
    """Each by itself, but those of a group, which come out together."""
    found: list[list[Move]] = []
    for move in sorted(moves, key=lambda move: (move.piece.group, move.start if move.piece.group else 0)):
        if found and move.piece.group == found[-1][0].piece.group != () and move.start == found[-1][0].start:
            found[-1].append(move)
        else:
            found.append([move])
    return found


def _spans(moves: Sequence[Move]) -> list[list[Move]]:
    """Neighbouring pieces joined to requests of at most `READ_BYTES`, for at most as many bytes of their entries.

    Many deltas fit into one request; put over their bases one after another, one thread would do all the work.
    """
    spans: list[list[Move]] = []
    raw_nbytes = 0
    for move in sorted(moves, key=lambda m: (m.piece.file, m.piece.offset)):
        if spans:
            first, last = spans[-1][0].piece, spans[-1][-1].piece
            joined = move.piece.offset + move.piece.nbytes - first.offset
            raw_nbytes += move.piece.raw_nbytes
            is_next = move.piece.file == last.file and move.piece.offset == last.offset + last.nbytes
            if is_next and joined <= READ_BYTES and raw_nbytes <= READ_BYTES:
                spans[-1].append(move)
                continue
        spans.append([move])
        raw_nbytes = move.piece.raw_nbytes
    return spans


BATCH_BYTES = 64 << 20
"""Of deltas that are in memory at once; twice as many while the next ones are read."""
GAP_BYTES = 128 << 10
"""What is not needed is read, too, if it is no more: a request takes as long."""


@dataclass(frozen=True, slots=True)
class Move:
    """A piece, where it begins in its entry, and where its bytes go."""

    entry: str
    piece: Piece
    start: int
    address: int


class Memory(Rooms):
    """As they are, with pages that are present and big: buffers that are read into around the page cache."""

    def _new(self, nbytes: int) -> mmap.mmap:
        made = private_memory(max(nbytes, host_memory.HUGE_BYTES))
        host_memory.advise(made)
        host_memory.populate(address_of(memoryview(made)), len(made))
        return made


@dataclass(slots=True)
class Range:
    """Bytes of a data file that are read at once. Files are read around the page cache from whole pages on."""

    file: int
    start: int
    stop: int
    data: Future[memoryview] | None = None

    def read(self, sources: Sources, manifest: Manifest, memory: Memory) -> memoryview:
        """The bytes, unverified."""
        found = memory.take(self.stop - self.start)
        sources.read(manifest.files[self.file].name, self.start, found)
        return found


@dataclass(slots=True)
class Batch:
    """Pieces that are made of chains, those of a group together, and what is read for them before."""

    moves: list[list[Move]] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)
    _found: dict[tuple[int, int], Range] = field(default_factory=dict)
    _done: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def plan(self, deltas: Sequence[Piece]) -> None:
        """Set what is read for these deltas."""
        for piece in sorted(set(deltas), key=lambda one: (one.file, one.offset)):
            last = self.ranges[-1] if self.ranges else None
            if last is None or last.file != piece.file or piece.offset > last.stop + GAP_BYTES:
                last = Range(piece.file, piece.offset // mmap.PAGESIZE * mmap.PAGESIZE, 0)
                self.ranges.append(last)
            last.stop = max(last.stop, piece.offset + piece.nbytes)
            self._found[piece.file, piece.offset] = last

    def stored(self, piece: Piece) -> memoryview | None:
        """The bytes of one of the deltas, unverified, once they are read."""
        there = self._found.get((piece.file, piece.offset))
        if there is None or there.data is None:
            return None
        return there.data.result()[piece.offset - there.start :][: piece.nbytes]

    def done(self, memory: Memory) -> None:
        """Pieces are put together; after the last ones nothing that was read is needed."""
        if next(self._done) == len(self.moves):
            for one in self.ranges:
                assert one.data is not None
                if one.data.exception() is None:
                    memory.give(one.data.result())
                one.data = None


def batches(manifest: Manifest, together: Sequence[list[Move]]) -> Iterator[Batch]:
    """Pieces that have bases, in their order, a few at a time.

    Raises:
        CorruptError: the manifest does not say where a base is.
    """
    batch, deltas, nbytes = Batch(), list[Piece](), 0
    for mates in together:
        more = [one for move in mates for one in chain_of(manifest, move.entry, move.start, move.piece)[:-1]]
        more_bytes = sum(piece.nbytes for piece in more)
        if batch.moves and nbytes + more_bytes > BATCH_BYTES:
            batch.plan(deltas)
            yield batch
            batch, deltas, nbytes = Batch(), [], 0
        batch.moves.append(mates)
        deltas += more
        nbytes += more_bytes
    if batch.moves:
        batch.plan(deltas)
        yield batch
