"""Cut the entries of a layout into pieces, and digest the pieces on a thread of its own."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_engine.persist.job import EntryLayout, Layout
from ckpt_engine.store.digest import PIECE_BYTES, digest
from ckpt_engine.store.manifest import Entry, Piece


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
    """Digests the pieces of a file image on its own thread, while the caller writes the same memory to storage.

    Either `result` or `abandon` MUST be called; after it nothing refers to `image` any more.
    """

    def __init__(self, image: memoryview, cut_layout: CutLayout) -> None:
        self._image = image
        self._extents = cut_layout.extents
        self._digests: list[str] = []
        self._error: BaseException | None = None
        self._abandoned = threading.Event()
        self.cpu_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="ckpt-digest", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.thread_time()
        try:
            for extents in self._extents:
                for extent in extents:
                    if self._abandoned.is_set():
                        return
                    with self._image[extent.offset : extent.offset + extent.nbytes] as piece:
                        self._digests.append(digest(piece))
        except BaseException as err:  # noqa: BLE001 - handed to the caller, who raises it
            self._error = err
        finally:
            self.cpu_seconds = time.thread_time() - began

    def result(self) -> list[str]:
        """The digests of all pieces in layout order; waits for the thread, whose work is bounded."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._digests

    def abandon(self) -> None:
        """Stop after the piece at hand."""
        self._abandoned.set()
        self._thread.join()
