"""How several ranks commit a snapshot without a collective.

Each of them leaves a part record, and one writer gathers them.

*While they train.* The coordinator's writer waits for the parts of all ranks and commits them together.

*Where nodes with roots of their own copy to a further tier.* Rank 0's tier, which holds the lease there, *asks* for a
snapshot by a small object. The other leaders look for that, copy what their node has, and leave a part record. When
the parts cover all ranks the whole manifest is committed.

*When the trainers are gone* `crash_recovery` does it.

Parts and questions make nothing exist; what a dead session has left is completed or dropped by the next one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from ckpt_engine.copy.job import RankConfig
from ckpt_engine.copy.transfer import Copied, Put, reading_source
from ckpt_engine.copy.write_snapshot import CommitStrategy, Staged
from ckpt_engine.errors import CkptError, StorageExistsError, WaitTimeoutError
from ckpt_engine.store import names
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.replicas import difference, listed
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Storage, tidy
from ckpt_engine.store.storage.retries import GrowingPauses
from ckpt_engine.store.storage.watchdog import CallProgress
from ckpt_engine.writer import part_records
from ckpt_engine.writer.part_records import PartRecord, recover, require_files

LOOKS = GrowingPauses(0.005, 0.5, 1.5)
"""Between two looks for the parts of other ranks."""
ALONE_SECONDS = 5.0
"""How long parts are waited for once the trainer is gone: the lease must be free before a restarted one gives up."""
GATHER_LOOKS = GrowingPauses(0.05, 2.0, 1.5)
"""Between two looks at the tier for what others have left."""


@dataclass(eq=False)
class SessionSnapshots(Container[str]):
    """The snapshots of a session that other ranks may be writing now: all from the first one that is not settled.

    Thread safe. With another session its ids differ: what ranks of dead sessions have left is not among them.
    """

    _session: str
    _first_seq: int
    declined: set[str] = field(default_factory=set, init=False)
    """Those in which the coordinator has no part: others say the same, or leave what they have written."""

    def __contains__(self, snapshot: object) -> bool:
        parsed = names.parse_id(snapshot) if isinstance(snapshot, str) else None
        return (
            parsed is not None
            and parsed.seq >= self._first_seq
            and parsed.id == names.session_id(self._session, parsed.seq, parsed.step)
        )

    def settle(self, snapshot: str) -> None:
        """This snapshot and all before it are committed, or never will be."""
        self._first_seq = max(self._first_seq, names.seq_of(snapshot) + 1)

    def declined_before(self, snapshot: str) -> set[str]:
        """Those before this one that nothing was done about yet."""
        found = {one for one in tuple(self.declined) if one < snapshot}
        self.declined -= found
        return found


@dataclass(eq=False)
class Gathering(CommitStrategy):
    """The coordinator's way to finish: waits for the parts of all ranks and commits them together.

    Where nodes have roots of their own each of these has a coordinator, and the ranks are those that see it.

    Args:
        ranks: its configuration.
        in_flight: notes what is settled.
        progress: of the lane that it runs in; waiting for others is no hang of the storage.
        still_ours: raises `LeaseHeldError` if the lease is lost; asked right before the commit.
        alone: set when the trainer is gone. The restarted one waits for the lease then, and can complete the snapshot
            as well: it is left as it is after `alone_seconds`.
        say: takes warnings.
    """

    is_shared = True

    _ranks: RankConfig
    in_flight: SessionSnapshots = field()  # not the default of its base
    _progress: CallProgress
    _still_ours: Callable[[], object]
    _alone: threading.Event
    _alone_seconds: float = ALONE_SECONDS
    _say: Callable[[str], object] = lambda _: None
    _differing: str = field(default="", init=False)
    """What was reported of replicas last."""

    def commit(self, staged: Staged, repository: Repository, manifest: Manifest) -> Manifest:
        """Raises `WaitTimeoutError` if a part does not come, `SnapshotFailedError` if the parts make no snapshot."""
        mine = part_records.part_of(manifest, staged.cut_layout.layout, self._ranks)
        part_records.put(repository.storage, mine)
        whole = part_records.merge([mine, *self._gather(repository.storage, mine)])
        # Only the owner of the lease removes anything: what is there now is there when it is committed.
        require_files(repository.storage, [file for file in whole.files if staged.snapshot not in file.name])
        self._still_ours()
        self._progress.check()
        repository.commit(whole)
        self.in_flight.settle(staged.snapshot)
        with suppress(CkptError):  # no snapshot fails for this, and the next one is looked at again
            found = difference(repository.storage, whole)
            if found and found != self._differing:
                self._differing = found
                self._say(
                    f"replicas differ at step {whole.info.step:,}: {found}. Each rank writes a part of a snapshot: a "
                    "resume continues from a mixture"
                )
        with suppress(CkptError):  # the next start removes what is left
            for one in (staged.snapshot, *self.in_flight.declined_before(staged.snapshot)):
                part_records.remove(repository.storage, one, self._ranks.members)
        return whole

    def undo(self, staged: Staged, repository: Repository, new: Sequence[str]) -> None:
        if self._alone.is_set():
            return  # the next start completes it, if the last part has come by then, or removes it
        # A commit may have landed although it reported an error. Without its records it cannot be completed later.
        repository.forget([staged.snapshot])
        part_records.remove(repository.storage, staged.snapshot, self._ranks.members)
        repository.storage.delete(*new)
        self.in_flight.settle(staged.snapshot)

    def cancel(self, repository: Repository, snapshot: str, why: str) -> None:  # noqa: ARG002 - nothing is stored
        self.in_flight.declined.add(snapshot)

    def _gather(self, storage: Storage, mine: PartRecord) -> list[PartRecord]:
        deadline, alone_until = time.monotonic() + self._ranks.wait_seconds, float("inf")

        def until() -> float:
            nonlocal alone_until
            if self._alone.is_set():
                alone_until = min(alone_until, time.monotonic() + self._alone_seconds)
            return min(deadline, alone_until)

        def pause(seconds: float) -> None:
            self._progress.check()
            # Waiting for an event that is set would not wait.
            (threading.Event() if self._alone.is_set() else self._alone).wait(seconds)
            self._progress.moved()

        self._progress.moved()
        members = set(self._ranks.members)
        return _other_parts(storage, mine, members, LOOKS, until, pause, lambda part: part.rank in members)


@dataclass(eq=False)
class Contributing(CommitStrategy):
    """The way of all other ranks: leaves a part record for the coordinator. Nothing exists by it.

    Args:
        ranks: its configuration.
        says_failure: the coordinator, which waits for the part, hears that it failed. Else the part may come later.
    """

    is_shared = True
    _ranks: RankConfig
    says_failure: bool = field(default=True, kw_only=True)
    _said: str | None = field(default=None, init=False)
    """The newest snapshot of which a record may be there."""

    def commit(self, staged: Staged, repository: Repository, manifest: Manifest) -> Manifest:
        """Raises `StorageError` if the record could not be written; it may be there nevertheless."""
        self._said = staged.snapshot
        part_records.put(repository.storage, part_records.part_of(manifest, staged.cut_layout.layout, self._ranks))
        return manifest

    def undo(self, staged: Staged, repository: Repository, new: Sequence[str]) -> None:
        # Once a record may be there the coordinator may have committed: then this data belongs to a snapshot.
        if self._said == staged.snapshot:
            return
        if self.says_failure:
            self._decline(repository, staged.snapshot, "it failed there")
        repository.storage.delete(*new)

    def cancel(self, repository: Repository, snapshot: str, why: str) -> None:
        with suppress(CkptError):  # the coordinator finds out by its timeout
            self._decline(repository, snapshot, why)

    def _decline(self, repository: Repository, snapshot: str, why: str) -> None:
        part_records.put(repository.storage, part_records.no_part(snapshot, why, repository.run_id, self._ranks))


def _other_parts(
    storage: Storage,
    mine: PartRecord,
    ranks: Collection[int],
    looks: GrowingPauses,
    until: Callable[[], float],
    pause: Callable[[float], object],
    counts: Callable[[PartRecord], bool],
) -> list[PartRecord]:
    """The parts of others, once they cover these ranks, or as soon as one says that it has none.

    Args:
        until: when they are waited for no longer, in monotonic seconds.
        pause: waits so long between two looks.
        counts: whether a part is one of this job.

    Raises:
        WaitTimeoutError: one does not come.
        StorageError, FormatError
    """
    snapshot, found, strange = mine.manifest.info.id, dict[int, PartRecord](), set[int]()
    missing = set[int]()
    for _ in each_look(looks, until, pause):
        new = part_records.there(storage, snapshot).get(snapshot, set()) - {mine.rank} - found.keys() - strange
        for rank, part in part_records.read_all(storage, snapshot, new).items():
            if counts(part):
                found[rank] = part
            else:
                strange.add(rank)
        missing = set(ranks).difference(mine.ranks, *(part.ranks for part in found.values()))
        if not missing or any(part.cancelled is not None for part in found.values()):
            return list(found.values())
    raise WaitTimeoutError(
        f"no part of {snapshot} came from {listed(missing)} in time",
        hint="see whether these ranks live, and whether they write to the same place",
    )


def each_look(
    looks: GrowingPauses, until: Callable[[], float], pause: Callable[[float], object]
) -> Iterator[Literal[True]]:
    """Yields for each look at what others have left, at least once; waits in between. See `_other_parts`."""
    pause_seconds = looks.first_seconds
    while True:
        yield True
        remaining = until() - time.monotonic()
        if remaining <= 0.0:
            return
        pause(min(pause_seconds, remaining))
        pause_seconds = looks.after(pause_seconds)


@dataclass(eq=False)
class Gather:
    """Rank 0's side, for one tier.

    Args:
        ranks: the configuration of the leader that this works for.
        pause: waits so many seconds; raises where the copy under way is not wanted any more.
    """

    ranks: RankConfig
    _pause: Callable[[float], object]

    def begin(self, target: Repository) -> tuple[str, ...]:
        """Once it is open: commit or drop what earlier sessions have left; the snapshots that exist now.

        Raises:
            StorageError: calling again continues.
        """
        found = recover(target, ())
        _forget_questions(target.storage, ())
        return tuple(snapshot for snapshot, exists in found if exists)

    def copy(self, source: Repository, target: Repository, snapshot: str, put: Put) -> Copied:
        """Copy a snapshot of which each node has a part. Needs the target's lease. What was copied is of this node.

        Args:
            put: stores the part of this node.

        Raises:
            CopySourceError: this node's part is missing or damaged, or cannot be read.
            SnapshotSkippedError: another node has no part in it.
            SnapshotFailedError: the parts do not fit together.
            WaitTimeoutError: the part of another node does not come.
            StorageError: from the target.
        """
        storage = target.storage
        self._ask(storage, snapshot)
        began = time.monotonic()
        try:
            manifest, copied = give(source, target, snapshot, put)
            # Others are given as long for their copy.
            until = 2 * time.monotonic() - began + self.ranks.wait_seconds
            mine = part_records.of_manifest(manifest)
            whole = part_records.merge([mine, *self._others(storage, mine, until)])
            require_files(storage, whole.files)
            with suppress(StorageExistsError):  # of an earlier attempt
                target.commit(whole)
        finally:
            with suppress(CkptError):  # the next question removes what is left
                tidy(storage, names.wanted_name(snapshot))
                part_records.remove(storage, snapshot, part_records.there(storage, snapshot).get(snapshot, set()))
        return copied

    def _ask(self, storage: Storage, snapshot: str) -> None:
        """All other questions are out of date."""
        _forget_questions(storage, (snapshot,))
        for other, ranks in part_records.there(storage).items():
            if other != snapshot:
                part_records.remove(storage, other, ranks)
        with suppress(StorageExistsError):
            storage.put(names.wanted_name(snapshot), [memoryview(b"{}\n")])

    def _others(self, storage: Storage, mine: PartRecord, until: float) -> list[PartRecord]:
        return _other_parts(storage, mine, range(mine.size), GATHER_LOOKS, lambda: until, self._pause, self._counts)

    def _counts(self, part: PartRecord) -> bool:
        """Whether a leader of this job says it: those of an earlier one may still be ending, and decline."""
        leads = {place[0] for place in self.ranks.places}
        return part.size == self.ranks.size and (part.cancelled is None or part.rank in leads)


def give(source: Repository, target: Repository, snapshot: str, put: Put) -> tuple[Manifest, Copied]:
    """Copy what this node has of a snapshot to a further tier, and say so there; its manifest there.

    Raises:
        CopySourceError: it is missing or damaged at the source, or that cannot be read.
        StorageError: from the target. Calling again continues.
    """
    with reading_source():
        manifest = source.read(snapshot)
    manifest, copied = put(manifest)
    with suppress(StorageExistsError):  # of an earlier attempt: what that says is there, too
        part_records.put(target.storage, part_records.of_manifest(manifest))
    return manifest, copied


def questions(storage: Storage) -> tuple[list[names.ParsedId], dict[str, set[int]]]:
    """The snapshots that are asked for, newest first, and who has answered what."""
    found = list(storage.list(names.PARTS))
    asked = [wanted for item in found if (wanted := names.wanted_id(item.name)) is not None]
    return sorted(asked, key=lambda one: (one.seq, one.id), reverse=True), part_records.by_snapshot(found)


def _forget_questions(storage: Storage, but: Collection[str]) -> None:
    asked, _ = questions(storage)
    tidy(storage, *(names.wanted_name(one.id) for one in asked if one.id not in but))
