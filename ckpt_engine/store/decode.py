"""From stored pieces to the bytes of entries: decodes them, and finds the bases of those that need one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from ckpt_engine.errors import CorruptError
from ckpt_engine.store.codecs.base import get_codec
from ckpt_engine.store.digest import digest
from ckpt_engine.store.manifest import RAW, Entry, Manifest, Piece

MAX_CHAIN = 8
"""Bases behind each other that a reader follows. A snapshot with a longer chain is damaged."""

Fetch = Callable[[str, Piece, memoryview], object]
"""`fetch(entry, piece, out)` fills `out` with the stored bytes of a piece of the entry, verified."""


def is_plain(entry: Entry) -> bool:
    """Whether the bytes of an entry lie in one file as they are, back to back."""
    end: int | None = None
    for piece in entry.pieces:
        if piece.codec != RAW or piece.file != entry.pieces[0].file or end not in (None, piece.offset):
            return False
        end = piece.offset + piece.nbytes
    return True


def stored_pieces(manifest: Manifest) -> Iterator[tuple[str, Piece]]:
    """Everything that must be stored for a snapshot: (entry, piece) of its entries, then of their bases."""
    for name, entry in manifest.entries.items():
        for piece in entry.pieces:
            yield name, piece
    for entries in manifest.bases.values():
        for name, entry in entries.items():
            for piece in entry.pieces:
                yield name, piece


class Decoder:
    """Decodes pieces of one snapshot. Thread safe.

    Args:
        fetch: reads what has to be read on the way; called in the thread that asks.
    """

    def __init__(self, manifest: Manifest, fetch: Fetch) -> None:
        self._manifest = manifest
        self._fetch = fetch
        self._buffers = threading.local()

    def read(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of an entry from byte `start` on.

        Raises:
            CorruptError: the snapshot is damaged; names the entry.
            NewerFormatError: an encoding that this version does not know.
            CkptError: whatever `fetch` raises.
        """
        self._read(self._manifest.entries[name], name, start, out, ())

    def decode(self, name: str, piece: Piece, start: int, stored: memoryview, out: memoryview) -> None:
        """Fill `out` with a piece of an entry, which begins at byte `start` of it. Raises as `read`.

        Args:
            stored: its stored bytes, verified.
        """
        self._decode(name, piece, start, stored, out, ())

    def _decode(
        self, name: str, piece: Piece, start: int, stored: memoryview, out: memoryview, behind: tuple[str, ...]
    ) -> None:
        codec = get_codec(piece.codec)
        base: memoryview | None = None
        if piece.base is not None:
            if piece.base in behind or len(behind) >= MAX_CHAIN:
                raise CorruptError(f"{name!r}: its bases do not end: {' -> '.join((*behind, piece.base))}")
            entry = self._manifest.bases.get(piece.base, {}).get(name)
            if entry is None:
                raise CorruptError(f"{name!r}: the manifest does not say where its base in {piece.base} is")
            base = self._buffer(2 * len(behind), piece.raw_nbytes)
            self._read(entry, name, start, base, (*behind, piece.base))
        elif codec.needs_base:
            raise CorruptError(f"{name!r}: a piece encoded with {piece.codec!r} names no base")
        codec.decode(stored, out, base)
        if piece.raw_digest is not None and digest(out) != piece.raw_digest:
            raise CorruptError(f"{name!r}: bytes {start} to {start + out.nbytes} are not what was encoded")

    def _read(self, entry: Entry, name: str, start: int, out: memoryview, behind: tuple[str, ...]) -> None:
        at, stop = 0, start + out.nbytes
        for piece in entry.pieces:
            end = at + piece.raw_nbytes
            low, high = max(at, start), min(end, stop)
            if low < high:
                whole = (low, high) == (at, end)
                target = out[low - start : high - start] if whole else memoryview(bytearray(piece.raw_nbytes))
                if piece.codec == RAW:
                    self._fetch(name, piece, target)
                else:
                    stored = self._buffer(2 * len(behind) + 1, piece.nbytes)
                    self._fetch(name, piece, stored)
                    self._decode(name, piece, at, stored, target, behind)
                if not whole:
                    out[low - start : high - start] = target[low - at : high - at]
            at = end
        if at < stop:
            raise CorruptError(f"{name!r} has {at} bytes, needed up to {stop}")

    def _buffer(self, number: int, nbytes: int) -> memoryview:
        """Memory that this thread reuses: one buffer per step of a chain."""
        kept: dict[int, bytearray] = self._buffers.__dict__.setdefault("kept", {})
        if len(kept.get(number, b"")) < nbytes:
            kept[number] = bytearray(nbytes)
        return memoryview(kept[number])[:nbytes]
