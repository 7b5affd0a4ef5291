"""Load the newest valid snapshot, falling back to older ones and remembering why each one was rejected."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_engine.errors import FormatError, StorageMissingError
from ckpt_engine.restore.choose import Candidate, Check, Rejected, candidates, none_usable, reject
from ckpt_engine.restore.into import copy_into, live_shapes, live_targets
from ckpt_engine.restore.match import require_match, tensor_shapes
from ckpt_engine.restore.read import read_entries
from ckpt_engine.restore.rebuild import Rebuilder
from ckpt_engine.restore.stream import stream_into
from ckpt_engine.store.manifest import Manifest, SnapshotInfo
from ckpt_engine.store.repository import Repository


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded snapshot and how it was found.

    Args:
        state: what was saved; None once it was handed over.
        notes: what came back as a plain equivalent, because its class is not imported here.
        rejected: newer snapshots that could not be used.
        read_bytes: bytes read from storage.
    """

    state: Any
    info: SnapshotInfo
    manifest: Manifest
    notes: tuple[str, ...]
    rejected: tuple[Rejected, ...]
    read_bytes: int
    seconds: float


def choose(repository: Repository, step: int | None = None, check: Check | None = None) -> Candidate | None:
    """The snapshot `load` would try first, or None if there are none at all.

    Raises:
        NoUsableSnapshotError: there are snapshots, and none is usable.
        ResumeError: no snapshot of `step`.
    """
    rejected: list[Rejected] = []
    for candidate in candidates(repository, rejected, step=step, check=check):
        return candidate
    error = none_usable(repository.storage.url, rejected, step)
    if error is not None:
        raise error
    return None


def load(
    repository: Repository,
    step: int | None = None,
    *,
    into: Any = None,
    check: Check | None = None,
    pickle_paths: Sequence[str] = (),
) -> Loaded | None:
    """Read the newest valid snapshot (of `step`), or None if there are none at all.

    Args:
        into: live state of the same structure; its tensors are overwritten in place and returned in the state. If
            an error is raised after reading began, their content is undefined.
        check: see `choose.Check`.

    Raises:
        NoUsableSnapshotError, ResumeError: as `choose`.
        MismatchError: `into` has other tensors; raised before data is read.
    """
    began = time.perf_counter()
    rejected: list[Rejected] = []

    def fits(manifest: Manifest) -> None:
        if into is not None:
            require_match(live_shapes(into), tensor_shapes(manifest), what="state", snapshot=manifest.info.id)
        if check is not None:
            check(manifest)

    for candidate in candidates(repository, rejected, step=step, check=fits):
        manifest = candidate.manifest
        try:
            targets = live_targets(manifest.tree, into, manifest.entries) if into is not None else {}
            stream_into(repository.storage, manifest, targets)
            rest = [name for name in manifest.entries if name not in targets]
            entries = {**targets, **read_entries(repository.storage, manifest, rest)}
            rebuilder = Rebuilder(entries, pickle_paths)
            state = rebuilder.state(manifest.tree)
        except (FormatError, StorageMissingError) as err:
            reject(rejected, candidate.info.id, err)
            continue
        if into is not None:
            state = copy_into(state, into)
        read_bytes = sum(piece.nbytes for entry in manifest.entries.values() for piece in entry.pieces)
        seconds = time.perf_counter() - began
        return Loaded(state, candidate.info, manifest, tuple(rebuilder.notes), tuple(rejected), read_bytes, seconds)
    error = none_usable(repository.storage.url, rejected, step)
    if error is not None:
        raise error
    return None
