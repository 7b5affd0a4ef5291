"""Forks a run: one of its snapshots becomes the first one of another run, without sending bytes if the storage can.

A fork needs nothing of the other run: its files have names of their own. The manifest comes last, so that a fork which
is interrupted has no snapshot; the same command continues it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

from ckpt_engine.config import Tier
from ckpt_engine.copy.transfer import RunText
from ckpt_engine.errors import StorageExistsError, StorageMissingError
from ckpt_engine.restore import ask_tiers
from ckpt_engine.store import names
from ckpt_engine.store.manifest import SnapshotInfo, require_whole
from ckpt_engine.store.repository import ForkPoint, Repository, RunRecord, encode_record
from ckpt_engine.store.storage import open_storage
from ckpt_engine.tools.check_run import Counting
from ckpt_engine.tools.copy_run import CopiedRun, ForkedRun, copy_run
from ckpt_engine.tools.stored_run import Run


def fork_run(
    run: Run, wanted: str, tier: Tier, say: Callable[[str], object], counting: Counting, *, dry_run: bool = False
) -> tuple[SnapshotInfo, CopiedRun, int]:
    """Make a new run of a snapshot: which one that is, what is, or would be, copied, and the bytes that are linked.

    Args:
        wanted: as of `Run.find`.
        tier: where the new run is.
        say: takes the line about a wait of some seconds.
        counting: follows the bytes.
        dry_run: only look what it would be.

    Raises:
        StorageExistsError: something else is there already.
        CkptError: from the target; or the snapshot is not whole.
    """
    snapshot, holders = run.find(wanted)
    storage = open_storage(tier.url, tier.for_storage())
    ask_tiers.ask([Repository(storage)], _require_unused, ask_tiers.at_most, say)
    duplicates = {place: storage.capabilities.duplicate(place.storage) is not None for place in holders}
    near = max(holders, key=duplicates.__getitem__)
    manifest = near.read(snapshot)
    require_whole(manifest.info, near.storage.url)
    nbytes = sum(file.nbytes for file in manifest.files)
    if dry_run:
        can = duplicates[near]
        return manifest.info, CopiedRun(near.storage.url, storage.url, sent_bytes=nbytes * (not can)), nbytes * can
    point = ForkPoint(near.storage.url, manifest.run, snapshot, manifest.info.step)
    record = RunRecord(os.urandom(16).hex(), time.time(), point)
    source = replace(run, holders={parsed: (near,) for parsed in run.holders if parsed.id == snapshot})
    fork = ForkedRun(RunText(record.run, encode_record(record)))
    done = copy_run(source, tier, [snapshot], say, counting, fork)
    if not done.copied and not done.failed:
        raise StorageMissingError(f"{snapshot} was removed from {near.storage.url} meanwhile", hint="fork a newer one")
    return manifest.info, done, fork.linked_bytes


def _require_unused(place: Repository) -> None:
    record = place.record()
    # A start at a fork that is not finished leaves its attempt.
    ours = {names.LEASE, *((names.RECORD, names.ATTEMPTS) if record is None or record.fork is not None else ())}
    others = [one.name for one in place.storage.list("") if one.name not in ours and names.data_owner(one.name) is None]
    if others:
        raise StorageExistsError(
            f"{place.storage.url} is not empty: it has {others[0]}", hint="give the new run a place of its own"
        )
