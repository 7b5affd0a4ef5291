"""Reads what differences are made against: from where the snapshot comes from, which is near, or from the target."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ckpt_engine.errors import CkptError
from ckpt_engine.store.decode import Decoder, decoder_of
from ckpt_engine.store.manifest import Manifest, Piece
from ckpt_engine.store.recode_plan import MOST_BASES, Over, placed
from ckpt_engine.store.repository import Repository

MOST_MANIFESTS = MOST_BASES + 2
"""Snapshots at the source that are looked through for older bytes: a chain ends in one of them."""

_Place = tuple[str, int, str]
"""An entry, a byte of it, and the digest of the decoded bytes that begin there."""


class Bases:
    """The bytes of pieces that a target has. Thread safe. Trouble with reading them costs the difference, no more.

    Args:
        manifest: of the snapshot that is copied.
        source: where it comes from, and where older ones may be; None: nothing else is there.
        before: the snapshot at the target that is built on.
        target: where that is.
    """

    def __init__(self, manifest: Manifest, source: Repository | None, before: Manifest | None, target: Repository):
        self._manifest = manifest
        self._source = source
        self._lock = threading.Lock()
        self._left: list[str] | None = None
        self._found: dict[_Place, tuple[Decoder, Piece]] = {}
        near = before is not None and target.storage.capabilities.cheap_reads
        self._there = decoder_of(target.storage, before) if near and before is not None else None

    def read(self, name: str, start: int, over: Over, out: memoryview) -> bool:
        """Fill `out` with the bytes at the head of a chain; whether that worked."""
        piece = over.chain[0]
        wanted = piece.content_digest
        if wanted is None:
            return False
        found = self._near((name, start, wanted))
        there = (self._there, piece) if self._there is not None else None
        for decoder, one in filter(None, (found, there)):
            try:
                decoder.read(name, start, one, out)  # which compares it with the digest
            except CkptError:
                continue  # the other place may have it; else the piece is written in full
            return True
        return False

    def _near(self, place: _Place) -> tuple[Decoder, Piece] | None:
        with self._lock:
            while place not in self._found and self._look_further():
                pass
            return self._found.get(place)

    def _look_further(self) -> bool:
        """Take in one more manifest of the source; False if there are no more."""
        if self._source is None:
            return False
        try:
            if self._left is None:
                older = [parsed.id for parsed in self._source.ids() if parsed.seq < self._manifest.info.seq]
                self._left = older[-MOST_MANIFESTS:]
                self._take(self._manifest)
                return True
            if not self._left:
                return False
            self._take(self._source.read(self._left.pop()))
        except CkptError:
            return self._left is not None and bool(self._left)
        return True

    def _take(self, manifest: Manifest) -> None:
        assert self._source is not None
        decoder = decoder_of(self._source.storage, manifest)
        for name, entry in manifest.entries.items():
            self._add(decoder, name, placed(entry.pieces))
        for entries in manifest.bases.values():
            for name, pieces in entries.items():
                # Of those that were encoded together a decoder would have to know whose they are.
                self._add(decoder, name, [(start, piece) for start, piece in pieces.items() if not piece.group])

    def _add(self, decoder: Decoder, name: str, pieces: Iterable[tuple[int, Piece]]) -> None:
        for start, piece in pieces:
            if piece.content_digest is not None:
                self._found.setdefault((name, start, piece.content_digest), (decoder, piece))
