"""A run without a trainer: arrays that change from one snapshot to the next, put straight into a repository."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckpt_engine.copy.write_plan import ENCODED
from ckpt_engine.store import container, names
from ckpt_engine.store.container import digest
from ckpt_engine.store.decode import chain_of, decoder_of
from ckpt_engine.store.manifest import DataFile, Entry, Manifest, Piece, SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.local import LocalStorage
from tests.crash.life import QuietDisk

WIDTHS = {"float32": 4, "bfloat16": 2, "float64": 8, "int64": 8, "uint8": 1, "bool": 1, "complex128": 16}
CHANGES = ("none", "none", "rows", "small", "small", "all")


@dataclass(slots=True)
class Array:
    """One entry: its form, its bytes, and where its pieces are cut."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray
    piece_nbytes: int


class Evolving:
    """Snapshots at `root`, whose contents are known.

    Args:
        seed: decides forms, contents and changes.
        storage: where; default: a folder.
    """

    def __init__(self, root: Path, seed: int, storage: Storage | None = None) -> None:
        self.rng = np.random.default_rng(seed)
        self.repository = Repository(storage or LocalStorage(root, disk=QuietDisk()))
        self.repository.create_if_absent()
        self.arrays = {f"a{number}": self._array() for number in range(int(self.rng.integers(1, 6)))}
        self.truth: dict[str, dict[str, bytes]] = {}
        self._seq = 0

    def _array(self) -> Array:
        dtype = str(self.rng.choice(list(WIDTHS)))
        columns = int(self.rng.choice([1, 7, 16, 33]))
        rows = int(self.rng.choice([0, 1, 3, 100, 700]))
        nbytes = rows * columns * WIDTHS[dtype]
        values = (self.rng.standard_normal(nbytes // 4 + 1) * 0.02).astype("<f4")
        row_nbytes = max(1, columns * WIDTHS[dtype])
        piece_nbytes = row_nbytes * int(self.rng.choice([70, 200, 10_000]))
        shape = (rows, columns) if self.rng.random() < 0.8 else (rows * columns,)
        return Array(dtype, shape, values.view(np.uint8)[:nbytes].copy(), piece_nbytes)

    def change(self) -> None:
        """Some arrays, in some way."""
        for array in self.arrays.values():
            how, data = str(self.rng.choice(CHANGES)), array.data
            if not data.size:
                continue
            if how == "rows":
                width = max(1, data.size // max(1, array.shape[0]))
                for row in self.rng.integers(0, array.shape[0], size=1 + array.shape[0] // 100):
                    data[row * width : (row + 1) * width] = self.rng.integers(0, 256, size=width)
            elif how == "small":
                data[::4] += self.rng.integers(0, 3, size=data[::4].size).astype(np.uint8)
            elif how == "all":
                data[:] = self.rng.integers(0, 256, size=data.size)

    def save(self) -> str:
        """The next snapshot; its id."""
        self._seq += 1
        snapshot = names.snapshot_id(self._seq, self._seq)
        rows = [
            (name, *container.container_form(array.dtype, array.shape, array.data.size), array.data.size)
            for name, array in self.arrays.items()
        ]
        header = container.build_header(rows)
        entries, offset = {}, len(header)
        for name, array in self.arrays.items():
            pieces = []
            for start in range(0, array.data.size, array.piece_nbytes):
                data = array.data[start : start + array.piece_nbytes]
                pieces.append(Piece(0, offset, data.size, digest(memoryview(data)), data.size))
                offset += data.size
            code, _ = container.container_form(array.dtype, array.shape, array.data.size)
            entries[name] = Entry(array.dtype, array.shape, tuple(pieces), code)
        file = DataFile(names.data_name(snapshot), offset)
        info = SnapshotInfo(snapshot, self._seq, self._seq, None, "manual", 1.0, offset - len(header))
        self.repository.storage.put(
            file.name, [memoryview(header), *(memoryview(array.data) for array in self.arrays.values())]
        )
        run = self.repository.run_id
        tree = {name: {"$": "tensor", "entry": name} for name in entries}
        self.repository.commit(Manifest(info, run, {"size": 1}, {}, (file,), entries, tree))
        self.truth[snapshot] = {name: array.data.tobytes() for name, array in self.arrays.items()}
        return snapshot

    def check(self, place: Repository) -> int:
        """Every snapshot at `place` is what it was, bit for bit, and within the bounds; how many there are."""
        listing = place.scan()
        assert not listing.damaged
        for info in listing.snapshots:
            manifest = place.read(info.id)
            assert contents(place, manifest) == self.truth[info.id], info.id
            require_bounds(manifest)
        return len(listing.snapshots)


def contents(place: Repository, manifest: Manifest) -> dict[str, bytes]:
    """The bytes of every entry."""
    decoder = decoder_of(place.storage.get_into, manifest)
    found = {}
    for name, entry in manifest.entries.items():
        data = bytearray(sum(piece.raw_nbytes for piece in entry.pieces))
        for start, piece in entry.placed():
            decoder.read(name, start, piece, memoryview(data)[start : start + piece.raw_nbytes])
        found[name] = bytes(data)
    return found


def require_bounds(manifest: Manifest) -> None:
    """Chains are short, and together no more than what a restore may read."""
    for name, entry in manifest.entries.items():
        for start, piece in entry.placed():
            chain = chain_of(manifest, name, start, piece)
            assert len(chain) <= ENCODED.most_bases + 1
            if not piece.group:
                assert len(chain) == 1 or sum(one.nbytes for one in chain) <= ENCODED.most_bytes * piece.raw_nbytes


def codecs_of(manifest: Manifest) -> set[str]:
    """The codecs of all pieces."""
    return {piece.codec for entry in manifest.entries.values() for piece in entry.pieces}
