"""Read entries into live memory through small buffers: no fresh memory, and nothing unverified is copied there.

Encoded pieces are decoded where they belong, over their bases.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from ckpt_engine.errors import CorruptError
from ckpt_engine.restore.chains import Batch, Memory, Move, batches
from ckpt_engine.restore.memory import address_of
from ckpt_engine.restore.sources import Sources
from ckpt_engine.snapshot import pages
from ckpt_engine.store.decode import Decoder
from ckpt_engine.store.digest import digest
from ckpt_engine.store.manifest import RAW, Manifest, Piece
from ckpt_engine.store.storage.blockio import DIRECT_MIN_BYTES

READ_BYTES = 16 << 20
"""Bytes per request; of whole files requests start at multiples of it, so that the page cache can be bypassed."""


def stream_into(
    sources: Sources, manifest: Manifest, targets: Mapping[str, torch.Tensor], *, fresh: bool = False
) -> None:
    """Fill `targets` (contiguous CPU tensors by entry name) with their entries.

    Every piece is verified before its bytes are copied; encoded ones are decoded in place, and fresh memory is read
    into. If an error is raised, other pieces may have been copied, and what damaged ones were read into is undefined.

    Args:
        fresh: the memory of the targets has never been touched.

    Raises:
        CorruptError: bytes are missing or differ from their digest, in all storages; names the entry.
        NewerFormatError: an encoding this version does not know.
        StorageError: the storages failed.
    """
    moves = _moves(manifest, targets)
    plain = [move for move in moves if move.piece.base is None]
    filler, memory = _Filler(sources, manifest, fresh), Memory()
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
        for batch in batches(manifest, [move for move in moves if move.piece.base is not None]):
            # Work begins in this order, so that nobody waits for what no thread has begun with.
            for one in batch.ranges:
                one.data = pool.submit(one.read, sources, manifest, memory)
            ready = batch.decoder(sources, manifest, filler.read_base)
            begun += [pool.submit(filler.fill_together, move, batch, ready, memory) for move in batch.moves]
        for done in begun:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _moves(manifest: Manifest, targets: Mapping[str, torch.Tensor]) -> list[Move]:
    """Where each piece of each entry goes."""
    moves = []
    for name, target in targets.items():
        pieces = manifest.entries[name].pieces
        nbytes = sum(piece.raw_nbytes for piece in pieces)
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
        fresh: the memory has never been touched.
    """

    def __init__(self, sources: Sources, manifest: Manifest, fresh: bool) -> None:
        self._sources = sources
        self._manifest = manifest
        self._fresh = fresh
        self._decoder = sources.decoder(manifest)
        self._buffers = threading.local()

    def is_direct(self, move: Move) -> bool:
        """Whether it is read to where it belongs without a buffer."""
        return self._fresh and move.piece.codec == RAW and move.piece.nbytes >= DIRECT_MIN_BYTES

    def fill_raw(self, move: Move) -> None:
        """One that `is_direct`."""
        piece, out = move.piece, _memory_of(move)
        pages.populate(move.address, piece.nbytes)
        self.read_base(move.entry, piece, out)
        if digest(out) != piece.digest:
            self._sources.repair(move.entry, self._manifest.files[piece.file].name, piece, out)

    def fill_span(self, span: Sequence[Move]) -> None:
        """Neighbours in a file, in one request."""
        first, last = span[0].piece, span[-1].piece
        start = first.offset // mmap.PAGESIZE * mmap.PAGESIZE  # whole pages may go around the page cache
        stop = last.offset + last.nbytes
        file = self._manifest.files[first.file]
        data = self._sources.view(file.name, start, stop - start)
        if data is None:
            data = self._buffer(stop - start)
            self._sources.read(file.name, start, data)
        for move in span:
            piece = move.piece
            stored = data[piece.offset - start :][: piece.nbytes]
            if digest(stored) != piece.digest:
                if stored.readonly:
                    stored = self._buffer(piece.nbytes)
                self._sources.repair(move.entry, file.name, piece, stored)
            if self._fresh:
                pages.populate(move.address, piece.raw_nbytes)
            _place(self._decoder, move, stored)

    def fill_together(self, move: Move, batch: Batch, decoder: Decoder, memory: Memory) -> None:
        """One that is made of a chain, once all of its batch is read."""
        batch.wait()
        if self._fresh:
            pages.populate(move.address, move.piece.raw_nbytes)
        decoder.read(move.entry, move.start, move.piece, _memory_of(move))
        batch.done(memory)

    def read_base(self, _: str, piece: Piece, out: memoryview) -> None:
        """Unverified, around the page cache, which takes whole pages of the file and of memory."""
        name, skew = self._manifest.files[piece.file].name, piece.offset % mmap.PAGESIZE
        if (address_of(out) - piece.offset) % mmap.PAGESIZE == 0:
            head = min(-skew % mmap.PAGESIZE, piece.nbytes)
            if head:
                self._sources.read(name, piece.offset, out[:head])
            self._sources.read(name, piece.offset + head, out[head:])
            return
        data = self._buffer(skew + piece.nbytes, "base")
        self._sources.read(name, piece.offset - skew, data)
        ctypes.memmove(address_of(out), address_of(data[skew:]), piece.nbytes)

    def _buffer(self, nbytes: int, use: str = "span") -> memoryview:
        """Of this thread."""
        kept: mmap.mmap | None = getattr(self._buffers, use, None)
        if kept is None or len(kept) < nbytes:
            kept = mmap.mmap(-1, max(nbytes, READ_BYTES + 2 * mmap.PAGESIZE))
            setattr(self._buffers, use, kept)
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
            # Pieces of a group come out together: other threads would only wait for the one that decodes them.
            together = move.piece.group == last.group != () and move.start == spans[-1][-1].start
            if is_next and joined <= READ_BYTES and (raw_nbytes <= READ_BYTES or together):
                spans[-1].append(move)
                continue
        spans.append([move])
        raw_nbytes = move.piece.raw_nbytes
    return spans
