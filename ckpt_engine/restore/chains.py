"""Reads the deltas of many pieces in few requests: those of neighbouring pieces lie behind each other in each file."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from ckpt_engine.restore.memory import address_of
from ckpt_engine.restore.sources import Sources
from ckpt_engine.snapshot import pages
from ckpt_engine.store.decode import Decoder, Fetch, chain_of
from ckpt_engine.store.digest import digest
from ckpt_engine.store.manifest import Manifest, Piece

BATCH_BYTES = 32 << 20
"""Of deltas that are in memory at once; twice as many while the next ones are read."""
GAP_BYTES = 128 << 10
"""What is not needed is read, too, if it is no more: a request takes as long."""
_ROUND_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Move:
    """A piece, where it begins in its entry, and where its bytes go."""

    entry: str
    piece: Piece
    start: int
    address: int


class Memory:
    """Buffers that are used again: the first touch of new memory costs more than what is done with it. Thread safe."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, nbytes: int) -> mmap.mmap:
        """A buffer of at least so many bytes."""
        spare: list[mmap.mmap] = []
        try:
            while True:
                found = self._free.pop()
                if len(found) >= nbytes:
                    return found
                spare.append(found)
        except IndexError:
            made = mmap.mmap(-1, -(-nbytes // _ROUND_BYTES) * _ROUND_BYTES)
            pages.populate(address_of(memoryview(made)), len(made))
            return made
        finally:
            self._free += spare

    def give(self, buffer: mmap.mmap) -> None:
        """Nobody uses it any more."""
        self._free.append(buffer)


@dataclass(slots=True)
class Range:
    """Bytes of a data file that are read at once. Files are read around the page cache from whole pages on."""

    file: int
    start: int
    stop: int
    data: Future[mmap.mmap] | None = None

    def read(self, sources: Sources, manifest: Manifest, memory: Memory) -> mmap.mmap:
        """The bytes, unverified."""
        found = memory.take(self.stop - self.start)
        sources.read(manifest.files[self.file].name, self.start, memoryview(found)[: self.stop - self.start])
        return found


@dataclass(slots=True)
class Batch:
    """Pieces that are made of chains, and what is read for them before."""

    moves: list[Move] = field(default_factory=list)
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

    def wait(self) -> None:
        """Return when all of it is read; raises what reading raised."""
        for one in self.ranges:
            assert one.data is not None
            one.data.result()

    def done(self, memory: Memory) -> None:
        """A piece is put together; after the last one nothing that was read is needed."""
        if next(self._done) == len(self.moves):
            for one in self.ranges:
                assert one.data is not None
                memory.give(one.data.result())
                one.data = None

    def decoder(self, sources: Sources, manifest: Manifest, base: Fetch) -> Decoder:
        """Decodes the pieces of this batch; what it reads is verified and repaired, but for what `base` reads."""

        def fetch(entry: str, piece: Piece, out: memoryview) -> None:
            name, there = manifest.files[piece.file].name, self._found.get((piece.file, piece.offset))
            if there is None or there.data is None:
                sources.read(name, piece.offset, out)
            else:
                stored = memoryview(there.data.result())[piece.offset - there.start :]
                ctypes.memmove(address_of(out), address_of(stored), piece.nbytes)
            if digest(out) != piece.digest:
                sources.repair(entry, name, piece, out)

        return Decoder(manifest, fetch, base)


def batches(manifest: Manifest, moves: Sequence[Move]) -> Iterator[Batch]:
    """Pieces that have bases, in their order, a few at a time.

    Raises:
        CorruptError: the manifest does not say where a base is.
    """
    batch, deltas, nbytes = Batch(), list[Piece](), 0
    for move in moves:
        chain = chain_of(manifest, move.entry, move.start, move.piece)[:-1]
        more = sum(piece.nbytes for piece in chain)
        if batch.moves and nbytes + more > BATCH_BYTES:
            batch.plan(deltas)
            yield batch
            batch, deltas, nbytes = Batch(), [], 0
        batch.moves.append(move)
        deltas += chain
        nbytes += more
    if batch.moves:
        batch.plan(deltas)
        yield batch
