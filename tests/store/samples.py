"""Small snapshots for the store's tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt_engine.store import names as layout
from ckpt_engine.store.container import build_header, digest
from ckpt_engine.store.manifest import DataFile, Entry, Manifest, Piece, SnapshotInfo
from ckpt_engine.store.repository import Repository
from tests.support.files import open_files


def info(
    seq: int = 1,
    step: int = 10,
    metrics: Mapping[str, float] | None = None,
    snapshot: str | None = None,
    epoch: int | None = 0,
) -> SnapshotInfo:
    """A snapshot's info; the id is new unless given."""
    name = snapshot or layout.snapshot_id(seq, step)
    return SnapshotInfo(name, seq, step, epoch, "manual", 1_700_000_000.5, 12, metrics or {}, None, {"model": 12})


def data_file(text: bytes = b"twelve bytes") -> bytes:
    """A container with the one array "w" of these bytes."""
    return build_header([("w", "U8", (len(text),), len(text))]) + text


def manifest(
    about: SnapshotInfo, run: str = "ab" * 16, shared: Sequence[str] = (), text: bytes = b"twelve bytes"
) -> Manifest:
    """The manifest of a snapshot of one array, and of the arrays in the data files `shared` of other snapshots."""
    whole = data_file(text)
    names = [layout.data_name(about.id), *shared]
    start = len(whole) - len(text)
    entries = {
        f"w{i}": Entry("uint8", (len(text),), (Piece(i, start, len(text), digest(text), len(text)),), "U8")
        for i in range(len(names))
    }
    files = tuple(DataFile(name, len(whole)) for name in names)
    return Manifest(about, run, {"size": 1}, {"python": "3"}, files, entries, {"$": "d", "v": []}, {"note": [1, None]})


def save(
    repository: Repository, step: int = 10, metrics: Mapping[str, float] | None = None, shared: Sequence[str] = ()
) -> str:
    """Write and commit a snapshot; returns its id."""
    repository.create_if_absent()
    about = info(repository.next_seq(), step, metrics)
    repository.storage.put(layout.data_name(about.id), [memoryview(data_file())])
    repository.commit(manifest(about, repository.run_id, shared))
    return about.id


def files(root: Path) -> set[str]:
    """All files below `root`, hidden ones included, by relative name."""
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def opened_below(root: Path) -> list[str]:
    """The files below `root` that this process has open. Others come and go with threads that other tests have left."""
    return [path for path in open_files().values() if Path(path).is_relative_to(root)]
