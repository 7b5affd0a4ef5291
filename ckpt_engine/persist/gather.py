"""How nodes with roots of their own copy a snapshot to a further tier: each its part, and rank 0's writer commits it.

Rank 0's tier, which holds the lease there, *asks* for a snapshot by a small object. The other leaders look for that,
copy what their node has, and leave a part record. When the parts cover all ranks the whole manifest is committed.
Parts and questions make nothing exist; what a dead session has left is completed or dropped by the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress

from ckpt_engine.errors import CkptError, StorageExistsError, WaitTimeoutError
from ckpt_engine.persist import parts
from ckpt_engine.persist.job import RankConfig
from ckpt_engine.persist.leftovers import recover, require_files
from ckpt_engine.persist.parts import Part
from ckpt_engine.store import layout as names
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.retries import GrowingPauses
from ckpt_engine.store.transfer import Copied, SourceError, copy_data

LOOKS = GrowingPauses(0.05, 2.0, 1.5)
"""Between two looks at the tier for what others have left."""


class Gather:
    """Rank 0's side, for one tier.

    Args:
        ranks: the configuration of the leader that this works for.
        pause: waits so many seconds; raises where the copy under way is not wanted any more.
    """

    def __init__(self, ranks: RankConfig, pause: Callable[[float], object]) -> None:
        self.ranks = ranks
        self._pause = pause

    def begin(self, target: Repository) -> tuple[str, ...]:
        """Once it is open: commit or drop what earlier sessions have left; the snapshots that exist now.

        Raises:
            StorageError: calling again continues.
        """
        found = recover(target, ())
        _forget_questions(target.storage, ())
        return found.completed

    def copy(self, source: Repository, target: Repository, snapshot: str, sink: Storage, scratch: str | None) -> Copied:
        """Copy a snapshot of which each node has a part. Needs the target's lease. What was copied is of this node.

        Raises:
            SourceError: this node's part is missing or damaged, or cannot be read.
            SnapshotSkippedError: another node has no part in it.
            SnapshotFailedError: the parts do not fit together.
            WaitTimeoutError: the part of another node does not come.
            StorageError: from the target.
        """
        storage = target.storage
        self._ask(storage, snapshot)
        began = time.monotonic()
        try:
            manifest, copied = give(source, target, snapshot, sink, scratch)
            seconds = time.monotonic() - began
            mine = parts.of_manifest(manifest)
            whole = parts.merge([mine, *self._others(storage, snapshot, mine, self.ranks.wait_seconds + seconds)])
            require_files(storage, whole.files)
            with suppress(StorageExistsError):  # as long as this was not told
                target.commit(whole)
        except (CkptError, SourceError):
            with suppress(CkptError):  # the next question removes what is left
                _withdraw(storage, snapshot)
            raise
        with suppress(CkptError):
            _withdraw(storage, snapshot)
        return copied

    def _ask(self, storage: Storage, snapshot: str) -> None:
        """Whatever other questions there are: nobody waits for an answer any more."""
        _forget_questions(storage, (snapshot,))
        for other, ranks in parts.there(storage).items():
            if other != snapshot:
                parts.remove(storage, other, ranks)
        with suppress(StorageExistsError):
            storage.put(names.wanted_name(snapshot), [memoryview(b"{}\n")])

    def _others(self, storage: Storage, snapshot: str, mine: Part, patience_seconds: float) -> list[Part]:
        """The parts of other nodes, once they cover all other ranks, or as soon as one says that it has none."""
        deadline = time.monotonic() + patience_seconds
        found: dict[int, Part] = {}
        strange: set[int] = set()
        pause = LOOKS.first_seconds
        while True:
            new = parts.there(storage, snapshot).get(snapshot, set()) - {mine.rank} - found.keys() - strange
            for rank, part in parts.read_all(storage, snapshot, new).items():
                if self._counts(part):
                    found[rank] = part
                else:
                    strange.add(rank)
            covered = {*mine.ranks, *(rank for part in found.values() for rank in part.ranks)}
            if len(covered) == mine.size or any(part.cancelled is not None for part in found.values()):
                return list(found.values())
            left = deadline - time.monotonic()
            if left <= 0.0:
                missing = sorted(set(range(mine.size)) - covered)
                raise WaitTimeoutError(
                    f"no part of {snapshot} came to {storage.url} from the nodes of ranks "
                    f"{', '.join(map(str, missing[:8]))}{' and others' if len(missing) > 8 else ''} in time",
                    hint="see whether these nodes live, and whether they reach it",
                )
            self._pause(min(pause, left))
            pause = LOOKS.after(pause)

    def _counts(self, part: Part) -> bool:
        """Whether a leader of this job says it: those of an earlier one may still be ending, and decline."""
        leads = {place[0] for place in self.ranks.places}
        return part.size == self.ranks.size and (part.cancelled is None or part.rank in leads)


def give(
    source: Repository, target: Repository, snapshot: str, sink: Storage, scratch: str | None
) -> tuple[Manifest, Copied]:
    """Copy what this node has of a snapshot to a further tier, and say so there.

    Raises:
        SourceError: it is missing or damaged at the source, or that cannot be read.
        StorageError: from the target. Calling again continues.
    """
    try:
        manifest = source.read(snapshot)
    except CkptError as err:
        raise SourceError(err) from err
    copied = copy_data(source, target, manifest, sink=sink, scratch=scratch)
    with suppress(StorageExistsError):  # of an earlier attempt, which could not say other things
        parts.put(target.storage, parts.of_manifest(manifest))
    return manifest, copied


def questions(storage: Storage) -> tuple[list[names.ParsedId], dict[str, set[int]]]:
    """The snapshots that are asked for, newest first, and who has answered what."""
    asked, there = [], dict[str, set[int]]()
    for item in storage.list(names.PARTS):
        wanted = names.wanted_id(item.name)
        owner = names.part_owner(item.name)
        if wanted is not None:
            asked.append(wanted)
        elif owner is not None:
            there.setdefault(owner[0].id, set()).add(owner[1])
    return sorted(asked, key=lambda one: (one.seq, one.id), reverse=True), there


def _withdraw(storage: Storage, snapshot: str) -> None:
    storage.delete(names.wanted_name(snapshot))
    parts.remove(storage, snapshot, parts.there(storage, snapshot).get(snapshot, set()))


def _forget_questions(storage: Storage, but: Collection[str]) -> None:
    asked, _ = questions(storage)
    storage.delete(*(names.wanted_name(one.id) for one in asked if one.id not in but))
