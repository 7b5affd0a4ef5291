"""Stores a snapshot again as awkwardly as the format allows: in pieces, files, codecs and bases by chance."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from ckpt_engine.store import codecs, names
from ckpt_engine.store.codecs.codec import Chunk, get_codec
from ckpt_engine.store.container import ALIGN_BYTES, build_header, digest
from ckpt_engine.store.manifest import DataFile, Entry, Manifest, Piece
from ckpt_engine.store.repository import Repository


class Flip:
    """A codec that needs a base: bytes are stored as their exclusive or with it."""

    name = "flip"
    needs_base = True

    def encode(self, data: memoryview, chunk: Chunk, base: memoryview | None) -> bytes:
        assert base is not None and len(base) == len(data)
        return bytes(a ^ b for a, b in zip(data, base, strict=True))

    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None) -> None:
        out[:] = self.encode(stored, Chunk("uint8", (len(stored),)), base)


def with_flip() -> None:
    """Make the codec known to readers of this process."""
    codecs.codec._known["flip"] = Flip()


class Scatter:
    """Takes the data of one snapshot apart.

    Args:
        repository: where it is, as one plain snapshot; it is replaced there.
        depth: bases behind each other, at most.
    """

    def __init__(self, repository: Repository, seed: int, depth: int = 2, most_pieces: int = 5) -> None:
        self.repository = repository
        self.random = random.Random(seed)
        self.depth = depth
        self.most_pieces = most_pieces
        self.blobs: list[bytearray] = [bytearray(b"?" * self.random.randrange(9)) for _ in range(3)]
        self.bases: dict[str, dict[str, dict[int, Piece]]] = {}

    def rewrite(self, snapshot: str) -> Manifest:
        """Store the snapshot again under its id; returns its new manifest."""
        repository = self.repository
        plain = repository.read(snapshot)
        entries = {
            name: replace(entry, pieces=tuple(self._cut(name, bytes_of(repository, plain, entry))))
            for name, entry in plain.entries.items()
        }
        repository.forget([snapshot])
        repository.storage.delete(*(file.name for file in plain.files if snapshot in file.name))
        files = []
        for part, blob in enumerate(self.blobs):
            name = names.data_name(snapshot, part=part + 1)
            header = build_header([("blob", "U8", (len(blob),), len(blob))])
            assert len(header) == ALIGN_BYTES
            repository.storage.put(name, [memoryview(header), memoryview(blob)])
            files.append(DataFile(name, ALIGN_BYTES + len(blob)))
        made = replace(plain, files=tuple(files), entries=entries, bases=self.bases)
        repository.commit(made)
        return made

    def _cut(self, name: str, data: bytes) -> Iterator[Piece]:
        if not data:
            return
        # At least two pieces, never back to back: else the entry would have to be an array of the file.
        count = self.random.randrange(1, self.most_pieces + 1)
        cuts = sorted({0, len(data) // 2, len(data), *(self.random.randrange(len(data)) for _ in range(count - 1))})
        for low, high in pairwise(cuts):
            yield self._piece(name, low, data[low:high])

    def _piece(self, name: str, start: int, data: bytes, depth: int = 0) -> Piece:
        kind = self.random.choice(["raw", "raw", "zstd", *(["flip"] if depth < self.depth else [])])
        if kind != "flip":
            return self._store(data, kind, b"", None)
        base, base_id = self.random.randbytes(len(data)), f"00000000-s{depth:010d}-00000000"
        self.bases.setdefault(base_id, {}).setdefault(name, {})[start] = self._piece(name, start, base, depth + 1)
        return self._store(data, kind, base, base_id)

    def _store(self, data: bytes, kind: str, base: bytes, base_id: str | None) -> Piece:
        made: bytes | memoryview | None = None
        if kind != "raw":
            over = memoryview(base) if base_id else None
            made = get_codec(kind).encode(memoryview(data), Chunk("uint8", (len(data),)), over)
        if made is None:
            kind, made = "raw", data
        number = self.random.randrange(len(self.blobs))
        blob = self.blobs[number]
        offset = ALIGN_BYTES + len(blob)
        blob += made
        blob += b"?" * self.random.randrange(1, 5)
        raw_digest = None if kind == "raw" else digest(data)
        return Piece(number, offset, len(made), digest(bytes(made)), len(data), kind, base_id, raw_digest)


def bytes_of(repository: Repository, manifest: Manifest, entry: Entry) -> bytes:
    """The bytes of a plain entry."""
    read = repository.storage.get
    return b"".join(read(manifest.files[piece.file].name, piece.offset, piece.nbytes) for piece in entry.pieces)
