"""Reads the arrays of one snapshot, in parallel, into their final memory.

Digests are checked on the way. What lies in memory as it does in a file is read to where it belongs, small pieces
together with their neighbours. Other small pieces come through a buffer. Encoded ones are decoded where they belong,
over their bases, and the deltas of many pieces are read in few requests: those of neighbouring pieces lie behind each
other in each file.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, takewhile

import torch

from ckpt_engine.copy import fresh_pages, host_memory, memory_limits
from ckpt_engine.errors import (
    CorruptError,
    FormatError,
)
from ckpt_engine.observe import units
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.restore.memory import address_of
from ckpt_engine.state.json_types import dtype_of
from ckpt_engine.store.container import digest
from ckpt_engine.store.decode import BufferPool, Decoder, KnownBytes, chain_of, joined
from ckpt_engine.store.manifest import RAW, Entry, Manifest, Piece
from ckpt_engine.store.manifest_codec import uncollected
from ckpt_engine.store.storage.disk import DIRECT_MIN_BYTES

UNASKED_BYTES = 64 << 20
"""What any machine has room for: it is not asked."""
READ_BYTES = 16 << 20
"""Bytes per request, at most."""
_ALIGN = 64
BATCH_BYTES = 64 << 20
"""Of deltas that are in memory at once; twice as many while the next ones are read."""
GAP_BYTES = 128 << 10
"""What is not needed is read, too, if it is no more: a request takes as long."""


def require_room(nbytes: int) -> None:
    """Refuse what this machine has no memory for: the kernel would give it out, and kill somebody later.

    Raises:
        FormatError: says how much is needed, and how much there is.
    """
    room = memory_limits.look() if nbytes > UNASKED_BYTES else None
    if room is not None and nbytes > room.nbytes:
        raise FormatError(
            f"its tensors need {units.size(nbytes)} of memory, and {units.size(room.nbytes)} are left ({room.limit})",
            hint="load it where there is more, or with `into`, into tensors that are there",
        )


def private_memory(nbytes: int) -> mmap.mmap:
    """At least so much. Private: of shared memory the pages are small, and direct reads take twice as long; and whole
    huge pages, which the kernel then puts where they can be huge.
    """
    is_large = nbytes >= host_memory.HUGE_BYTES
    if is_large:
        nbytes = -(-nbytes // host_memory.HUGE_BYTES) * host_memory.HUGE_BYTES
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as err:
        raise FormatError(f"this machine gives no {units.size(nbytes)} of memory: {err}") from err
    if is_large:
        fresh_pages.advise(memory)
    return memory


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
    entries = manifest.entries if names is None else {name: manifest.entries[name] for name in names}
    sizes = {name: entry.nbytes for name, entry in entries.items()}
    require_room(sum(sizes.values()))
    laid: dict[int, dict[str, int]] = {}
    found: dict[str, torch.Tensor] = {}
    with uncollected():
        for name, entry in entries.items():
            if not entry.pieces:
                if 0 not in entry.shape:
                    raise CorruptError(f"{name!r} has no pieces in the manifest, and needs some")
                found[name] = torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
            elif entry.is_plain:
                laid.setdefault(entry.pieces[0].file, {})[name] = entry.pieces[0].offset
            else:  # it begins in a page where its first bytes do in a file
                offset = chain_of(manifest, name, 0, entry.pieces[0])[-1].offset
                found |= _fresh({name: offset - offset % dtype_of(entry.dtype).itemsize}, entries, sizes)
        for offsets in laid.values():
            found |= _fresh(offsets, entries, sizes)
        moves = moves_of(manifest, found, sizes)
    read_moves(sources, manifest, moves, laid=set().union(*laid.values()))
    return found


def _fresh(
    offsets: Mapping[str, int], entries: Mapping[str, Entry], sizes: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Tensors for entries, to be filled: in one memory that begins with a page, as far from each other as these offsets
    are. Untouched memory costs nothing, so gaps are simply not read."""
    base = min(offsets.values()) // mmap.PAGESIZE * mmap.PAGESIZE
    end = max([offset + sizes[name] for name, offset in offsets.items()])
    memory = private_memory(end - base)
    found = {}
    for name, offset in offsets.items():
        entry = entries[name]
        dtype, count = dtype_of(entry.dtype), math.prod(entry.shape)
        if not 0 < count * dtype.itemsize <= end - offset:
            raise CorruptError(f"{name!r} has {sizes[name]} bytes, not those of {entry.dtype} of shape {entry.shape}")
        shaped = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset - base).view(entry.shape)
        found[name] = shaped.data  # no view for autograd: an object that keeps it may detach and resize it in place
    return found


class StagingBuffer(ABC):
    """Host memory in which pieces are made whose place is elsewhere. Several threads at once."""

    is_host = False
    """What lies in a file as it is needed is sent from where it was read."""

    @abstractmethod
    def room(self, nbytes: int, entry: str) -> int:
        """The address of so much memory, the thread's own until its next call; the first piece there is of `entry`."""

    @abstractmethod
    def send(self, moves: Sequence[Move]) -> None:
        """They are whole and verified at their addresses: copy them to where they belong, or queue that."""

    def take(self, moves: Sequence[Move]) -> list[Move]:
        """The same pieces with addresses in that memory."""
        starts = list(accumulate((-(-move.piece.raw_nbytes // _ALIGN) * _ALIGN for move in moves), initial=0))
        first = self.room(starts[-1], moves[0].entry)
        return [replace(move, address=first + start) for move, start in zip(moves, starts, strict=False)]


def moves_of(
    manifest: Manifest, targets: Mapping[str, torch.Tensor], sizes: Mapping[str, int] | None = None
) -> list[Move]:
    """Where each piece of each entry goes to fill `targets`: contiguous tensors by entry name.

    Args:
        sizes: of the entries, if they are known.
    """
    for name, target in targets.items():
        nbytes = manifest.entries[name].nbytes if sizes is None else sizes[name]
        if nbytes != target.nbytes:
            raise CorruptError(f"{name!r} has {nbytes} bytes in the manifest, and needs {target.nbytes}")
    return [
        Move(name, piece, start, target.data_ptr() + start)
        for name, target in targets.items()
        for start, piece in manifest.entries[name].placed()
    ]


def read_moves(
    sources: Sources,
    manifest: Manifest,
    moves: Sequence[Move],
    landing: StagingBuffer | None = None,
    others: Iterable[Callable[[], None]] = (),
    laid: Container[str] | None = None,
) -> None:
    """Read these pieces to where they go, verified. If an error is raised, what is there is undefined.

    Args:
        landing: of what goes elsewhere than into host memory as it is; None: all does.
        others: more to be done meanwhile, on the same threads.
        laid: the memory has never been touched; of these entries it has nothing between them that other files fill.

    Raises:
        CorruptError: bytes are missing or differ from their digest, in all storages; names the entry.
        NewerFormatError: an encoding this version does not know.
        StorageError: the storages failed.
    """
    if not moves and not others:
        return
    filler = _Filler(sources, manifest, laid, landing)
    plain, chained = list[Move](), list[Move]()
    for move in moves:
        is_made = move.piece.base is not None or move.piece.content_digest in sources.known
        (chained if is_made else plain).append(move)
    # Threads inherit the mode in which arithmetic drops subnormal numbers; predictions are made without it.
    pool = ThreadPoolExecutor(
        sources.threads, thread_name_prefix="ckpt-read", initializer=torch.set_flush_denormal, initargs=(False,)
    )
    try:
        begun = [pool.submit(request) for request in (*filler.requests(plain), *others)]
        if chained:
            for batch in batches(manifest, _together(chained), sources.known):
                # Work begins in this order, so that no thread waits for what no other has begun with.
                for one in batch.ranges:
                    one.data = pool.submit(one.read, sources, manifest, filler.memory)
                ready = sources.decoder(manifest, filler.read_base, batch.stored, filler.memory)
                begun += [pool.submit(filler.fill_together, mates, batch, ready) for mates in batch.moves]
        for done in begun:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass
class _Filler:
    """Reads pieces of one snapshot into where they belong, verified. Several threads at once.

    Args:
        _laid, _landing: as for `read_moves`.
    """

    _sources: Sources
    _manifest: Manifest
    _laid: Container[str] | None
    _landing: StagingBuffer | None
    _buffers: threading.local = field(default_factory=threading.local)
    memory: BufferPool = field(default_factory=BufferPool)
    pages: fresh_pages.FreshPages = field(default_factory=fresh_pages.FreshPages)

    @cached_property
    def _decoder(self) -> Decoder:
        return self._sources.decoder(self._manifest)

    def requests(self, moves: Sequence[Move]) -> list[Callable[[], None]]:
        """Each fills some of them. What lies in memory as in its file is read to where it belongs, in requests that are
        large enough. Fresh entries that lie in one piece share memory with nothing of other files, so all of them are,
        across gaps.
        """
        laid = self._laid or ()
        alike: dict[tuple[bool, int, int], list[Move]] = {}
        others, found = list[Move](), list[Callable[[], None]]()
        for move in moves:
            if move.piece.codec == RAW and self._landing is None:
                place = (move.entry in laid, move.piece.file, move.address - move.piece.offset)
                alike.setdefault(place, []).append(move)
            else:
                others.append(move)
        for (is_laid, _, _), one in alike.items():
            for run in joined(one, READ_BYTES, gap_bytes=GAP_BYTES * is_laid):
                if is_laid or run[-1].address + run[-1].piece.nbytes - run[0].address >= DIRECT_MIN_BYTES:
                    found.append(partial(self.fill_run, run))
                else:
                    others += run
        if others:
            # Many deltas fit into one request; decoded one after another they would be the work of one thread.
            found += [partial(self.fill_span, span) for span in joined(others, READ_BYTES, READ_BYTES)]
        return found

    def fill_run(self, run: Sequence[Move]) -> None:
        """Neighbours in a file and in memory, in one request."""
        first, last = run[0].piece, run[-1].piece
        out = _memory(run[0].address, last.offset + last.nbytes - first.offset)
        if self._laid is not None:
            self.pages.populate(run[0].address, out.nbytes)
        file = self._manifest.files[first.file].name
        self._sources.read(file, first.offset, out)
        for move in run:
            piece, at = move.piece, move.piece.offset - first.offset
            stored = out[at : at + piece.nbytes]
            if digest(stored) != piece.digest:
                self._sources.repair(move.entry, file, piece, stored)

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
        places, mended = span if self._landing is None else self._landing.take(span), list[memoryview]()
        for move in places:
            piece = move.piece
            stored = data[piece.offset - start :][: piece.nbytes]
            if digest(stored) != piece.digest:
                if stored.readonly:
                    mended.append(stored := memoryview(bytearray(piece.nbytes)))
                self._sources.repair(move.entry, file.name, piece, stored)
            if self._laid is not None:
                self.pages.populate(move.address, piece.raw_nbytes)
            if piece.codec != RAW:
                self._decoder.decode(move.entry, move.start, piece, stored, _memory_of(move))
            elif self._landing is not None and self._landing.is_host:
                move.address = address_of(stored)
            else:
                ctypes.memmove(move.address, address_of(stored), piece.nbytes)
        if self._landing is not None:
            self._landing.send(places)

    def fill_together(self, mates: Sequence[Move], batch: Batch, decoder: Decoder) -> None:
        """One that is made of a chain, or those of a group."""
        places = mates if self._landing is None else self._landing.take(mates)
        if self._laid is not None:
            for place in places:
                self.pages.populate(place.address, place.piece.raw_nbytes)
        decoder.read_together(places[0].start, {place.entry: (place.piece, _memory_of(place)) for place in places})
        batch.done(self.memory)
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
            self.pages.populate(address_of(memoryview(kept)), len(kept))
        # Views are never released by hand: frames of an error that was caught may still hold parts of them.
        return memoryview(kept)[:nbytes]


def _memory_of(move: Move) -> memoryview:
    return _memory(move.address, move.piece.raw_nbytes)


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _together(moves: Sequence[Move]) -> list[list[Move]]:
    """Each alone, but those of a group, which come out together."""
    found: list[list[Move]] = []
    for move in sorted(moves, key=lambda move: (move.piece.group, move.start if move.piece.group else 0)):
        if found and move.piece.group == found[-1][0].piece.group != () and move.start == found[-1][0].start:
            found[-1].append(move)
        else:
            found.append([move])
    return found


@dataclass(slots=True)
class Move:
    """A piece, where it begins in its entry, and where its bytes go."""

    entry: str
    piece: Piece
    start: int
    address: int


@dataclass(slots=True)
class Range:
    """Bytes of a data file that are read at once. Files are read around the page cache from whole pages on."""

    file: int
    start: int
    stop: int
    data: Future[memoryview] | None = None

    def read(self, sources: Sources, manifest: Manifest, memory: BufferPool) -> memoryview:
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

    def done(self, memory: BufferPool) -> None:
        """Pieces are put together; after the last ones nothing that was read is needed."""
        if next(self._done) == len(self.moves):
            for one in self.ranges:
                assert one.data is not None
                if one.data.exception() is None:
                    memory.give(one.data.result())
                one.data = None


def batches(manifest: Manifest, together: Sequence[list[Move]], known: KnownBytes) -> Iterator[Batch]:
    """Pieces that have bases, or whose bytes are known, in their order, a few at a time.

    Raises:
        CorruptError: the manifest does not say where a base is.
    """
    batch, deltas, nbytes = Batch(), list[Piece](), 0
    for mates in together:
        chains = [chain_of(manifest, move.entry, move.start, move.piece) for move in mates]
        more = [one for chain in chains for one in takewhile(lambda one: one.content_digest not in known, chain[:-1])]
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
