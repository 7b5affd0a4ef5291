"""Cut the entries of a layout into pieces, and digest the pieces on threads of their own."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_engine.persist.job import EntryLayout, Layout
from ckpt_engine.store.digest import PIECE_BYTES, digest
from ckpt_engine.store.manifest import Entry, Piece

_MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of bytes of a file."""

    offset: int
    nbytes: int


def cut(entry: EntryLayout, piece_bytes: int = PIECE_BYTES) -> tuple[Extent, ...]:
    """Where the pieces of an entry are: in order, without gaps, each of at most `piece_bytes`.

    Pieces are whole rows (first dimension), so that a change of some rows changes few pieces; rows bigger than a piece
    are cut as well. An empty entry has no pieces.
    """
    rows = entry.shape[0] if entry.shape else 1
    step = piece_bytes
    if rows and entry.nbytes % rows == 0 and 0 < entry.nbytes // rows <= piece_bytes:
        row_bytes = entry.nbytes // rows
        step = piece_bytes // row_bytes * row_bytes
    return tuple(
        Extent(entry.offset + start, min(step, entry.nbytes - start)) for start in range(0, entry.nbytes, step)
    )


@dataclass(frozen=True, slots=True)
class CutLayout:
    """A layout with its pieces, worked out once for all snapshots that use it.

    Args:
        nbytes: logical bytes, header and padding excluded.
        entry_bytes: logical bytes by entry name.
    """

    layout: Layout
    extents: tuple[tuple[Extent, ...], ...]
    nbytes: int
    entry_bytes: dict[str, int]

    @classmethod
    def of(cls, layout: Layout) -> CutLayout:
        """Cut `layout`.

        Raises:
            ValueError: an entry lies outside the file, or its size does not fit its shape.
        """
        for entry in layout.entries:
            if entry.offset < layout.header_nbytes or entry.offset + entry.nbytes > layout.nbytes:
                raise ValueError(f"entry {entry.name!r} lies outside the data file")
            if (entry.nbytes == 0) != (math.prod(entry.shape) == 0):
                raise ValueError(f"entry {entry.name!r} of shape {entry.shape} cannot have {entry.nbytes} bytes")
        sizes = {entry.name: entry.nbytes for entry in layout.entries}
        return cls(layout, tuple(cut(entry) for entry in layout.entries), sum(sizes.values()), sizes)

    def blank_digests(self) -> list[str]:
        """As many digests as there are pieces, and as long, of nothing."""
        return [digest(b"")] * sum(map(len, self.extents))

    def entries(self, digests: Sequence[str]) -> dict[str, Entry]:
        """The manifest's entries, given the digests of all pieces in order."""
        found: dict[str, Entry] = {}
        position = 0
        for entry, extents in zip(self.layout.entries, self.extents, strict=True):
            pieces = tuple(
                Piece(0, extent.offset, extent.nbytes, digests[position + i], extent.nbytes)
                for i, extent in enumerate(extents)
            )
            position += len(extents)
            found[entry.name] = Entry(entry.dtype, entry.shape, pieces, entry.container_dtype)
        if position != len(digests):
            raise ValueError(f"{len(digests)} digests for {position} pieces")
        return found


class Digesting:
    """Digests the pieces of a file image on its own threads, while the caller writes the same memory to storage.

    Several threads at once cost training less than one that works longer: a parallel region of the training waits for
    whichever of its threads has lost its core for the longest time.

    Either `result` or `abandon` MUST be called; after it nothing refers to `image` any more.
    """

    def __init__(self, image: memoryview, cut_layout: CutLayout) -> None:
        self._image = image
        self._extents = [extent for extents in cut_layout.extents for extent in extents]
        self._digests = [""] * len(self._extents)
        self._next = itertools.count()
        self._error: BaseException | None = None
        self._abandoned = threading.Event()
        self._cpu_seconds: list[float] = []
        count = max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)), len(self._extents)))
        self._threads = [threading.Thread(target=self._run, name=f"ckpt-digest-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the threads that have ended."""
        return sum(self._cpu_seconds)

    def _run(self) -> None:
        began = time.thread_time()
        try:
            # One step of `itertools.count` is atomic.
            while not self._abandoned.is_set() and (index := next(self._next)) < len(self._extents):
                extent = self._extents[index]
                with self._image[extent.offset : extent.offset + extent.nbytes] as piece:
                    self._digests[index] = digest(piece)
        except BaseException as err:  # noqa: BLE001 - handed to the caller, who raises it
            self._error = err
            self._abandoned.set()
        finally:
            self._cpu_seconds.append(time.thread_time() - began)

    def result(self) -> list[str]:
        """The digests of all pieces in layout order; waits for the threads, whose work is bounded."""
        self._join()
        if self._error is not None:
            raise self._error
        return self._digests

    def abandon(self) -> None:
        """Stop after the pieces at hand."""
        self._abandoned.set()
        self._join()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()
