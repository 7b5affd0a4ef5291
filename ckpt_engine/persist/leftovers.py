"""What ranks of sessions that have ended left: the snapshots that are complete are committed, the others let go."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt_engine.errors import FormatError, SnapshotFailedError, SnapshotSkippedError, StorageMissingError
from ckpt_engine.persist.parts import merge, read_all, remove, there
from ckpt_engine.store import presence
from ckpt_engine.store.manifest import DataFile
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Storage


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a writer found of snapshots that nobody had committed: those that exist now, and those that were let go."""

    completed: tuple[str, ...]
    discarded: tuple[str, ...]


def recover(repository: Repository, in_flight: Container[str]) -> Recovered:
    """Commit the snapshots of dead sessions all of whose parts are there; remove the part records of all others.

    Needs the lease. The data of those that are let go is unreferenced from then on.

    Args:
        in_flight: snapshots that are not touched.

    Raises:
        StorageError: some of it may have been done; calling again continues.
    """
    storage = repository.storage
    left = there(storage)
    completed: list[str] = []
    discarded: list[str] = []
    for snapshot, outcome in complete(repository, {one: ranks for one, ranks in left.items() if one not in in_flight}):
        if outcome is not None:
            (completed if outcome else discarded).append(snapshot)
        remove(storage, snapshot, left[snapshot])
    return Recovered(tuple(completed), tuple(discarded))


def complete(repository: Repository, left: Mapping[str, Collection[int]]) -> Iterator[tuple[str, bool | None]]:
    """Commit the snapshots all of whose parts are there, oldest first. Needs the lease.

    Args:
        left: the part records of each.

    Yields:
        Each, and whether it is committed now; None: it was.
    """
    storage = repository.storage
    existing = {parsed.id for parsed in repository.ids()}
    for snapshot, ranks in sorted(left.items()):
        if snapshot in existing:
            yield snapshot, None
            continue
        try:
            manifest = merge(list(read_all(storage, snapshot, ranks).values()))
            require_files(storage, manifest.files)
        except (FormatError, SnapshotSkippedError, SnapshotFailedError, StorageMissingError):
            yield snapshot, False
        else:
            repository.commit(manifest)
            yield snapshot, True


def require_files(storage: Storage, files: Sequence[DataFile]) -> None:
    """Raises `StorageMissingError` unless these data files are there as they were written."""
    if lost := presence.lacking(storage, files):
        raise StorageMissingError(f"{', '.join(lost)} is not there whole")
