"""The nearest tier of a writer, once it is open.

It has the lease, the room and the retention there, also where the writers of all ranks share the tier, and the shares
of a snapshot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ckpt_engine.copy.add_parity import copy_manifests, more_bytes
from ckpt_engine.copy.encoded_copy import DedupBaseline, encoded
from ckpt_engine.copy.job import ErrorRecord, GroupMark, History, TrainedGroup, WriterConfig
from ckpt_engine.copy.make_room import collect, make_room, prune, shortage, where_permitted
from ckpt_engine.copy.transfer import RunText, adopt_run
from ckpt_engine.copy.write_plan import plan_alone, read_back
from ckpt_engine.copy.write_snapshot import ALONE, CommitStrategy, RawContents, Staged, write_snapshot
from ckpt_engine.errors import (
    CkptError,
    ForeignError,
    FormatError,
    LeaseHeldError,
    SnapshotFailedError,
    SnapshotSkippedError,
    StorageError,
    StorageFullError,
    StorageMissingError,
)
from ckpt_engine.observe.events import Event, SnapshotCommitted
from ckpt_engine.observe.reporter import Reporter
from ckpt_engine.store import manifest_codec, names
from ckpt_engine.store.data_files import lacking
from ckpt_engine.store.lease_holder import Lease
from ckpt_engine.store.manifest import RAW, Line, Manifest
from ckpt_engine.store.protection import begin
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention import RESERVE_BYTES
from ckpt_engine.store.retention_rules import ByteLimits, KeepAll, Retention, RetentionPolicy, policy_from
from ckpt_engine.store.storage.local import device_of
from ckpt_engine.store.storage.watchdog import AbandonedError, GuardedReader
from ckpt_engine.undo import on_failure
from ckpt_engine.writer import part_records
from ckpt_engine.writer.commit_of_ranks import ALONE_SECONDS, Contributing, Gathering, SessionSnapshots
from ckpt_engine.writer.freshness import Freshness

LEASE_SECONDS = 60.0
"""How long it may take to see whether the holder of a lease lives, without a sign of progress."""


def policy_of(config: WriterConfig, say: Callable[[str], object]) -> RetentionPolicy:
    """The retention of the nearest tier. One that is a node's own cannot take components apart: `say` takes that."""
    policy = policy_from(config.keep)
    whole = Retention.of(policy)
    if not (config.ranks.places and config.ranks.leads and whole.components):
        return policy
    say(f"{config.url} is this node's own: keep.components does nothing there")
    return replace(whole, components={})


class PrimaryRetention:
    """What is removed at the nearest tier: snapshots for room, or as `keep` says, and what writers that died have left.

    Nothing is where another rank has the lease. `settle_at` MUST come first.

    Args:
        finish: how snapshots are committed there.
        made_room: takes the snapshots that had to go for the next one.
    """

    def __init__(
        self,
        config: WriterConfig,
        policy: RetentionPolicy,
        finish: CommitStrategy,
        report: Reporter,
        made_room: Callable[[Sequence[str]], object],
    ) -> None:
        self._config = config
        self._policy = policy
        self._finish = finish
        self._report = report
        self._made_room = made_room
        self.swept = self._warned = False
        """What earlier writers have left was removed; to be unset where the disk is full, or has failed."""
        self._common_seq = 0
        self._lacked: set[str] = set()
        self._line: Line | None = None

    def settle_at(self, repository: Repository, lease: Lease | None) -> None:
        """Work on this one from now on. `lease`: None: another rank has it."""
        self._repository, self._lease = repository, lease
        days = Retention.of(self._policy).protect_days
        if lease is not None and days + repository.require_record().protect_days:
            begin(repository, days, self._report.warn)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is removed here but for room."""
        return self._lease is None or isinstance(self._policy, KeepAll)

    def learn(self, line: Line, common: str | None, lacked: Sequence[str]) -> None:
        """See `PrimaryTier.learn`."""
        self._line = line
        self._lacked.update(lacked)
        self._common_seq = max(self._common_seq, names.seq_of(common))

    def _unsure(self) -> dict[str, str]:
        """Of several nodes: the snapshots that may be the newest that all of them have, and the reason to keep them."""
        if not self._config.ranks.places:
            return {}
        ids = self._repository.ids()
        self._lacked.intersection_update([one.id for one in ids])
        unsure = [one for one in ids if one.seq >= self._common_seq and one.id not in self._lacked]
        return {one.id: "nothing newer is known to be on all nodes" for one in unsure}

    def make_room(self, contents: RawContents, verified: Sequence[str], *, full: bool = False) -> bool:
        """Before a write; whether something has gone. `verified`, `full`: see `make_room.make_room`."""
        if self._lease is None:
            return False
        repository, nbytes = self._repository, contents.new_bytes
        if self._finish.is_shared:  # shares are equal, and what others spare is not known
            nbytes = contents.staged.nbytes * len(self._config.ranks.members)
        if self._config.parity is not None:
            nbytes += more_bytes(self._config.parity, nbytes)
        if not self._warned:
            self._warned = True
            if (short := shortage(repository, self._policy, nbytes)) is not None:
                self._report.warn(f"{repository.storage.url}: {short}")
        free_bytes = repository.storage.capabilities.free_bytes()
        # So much beside the data is more than any manifest takes.
        plenty = not full and (free_bytes is None or free_bytes >= nbytes + 2 * RESERVE_BYTES)
        if plenty and Retention.of(self._policy).limits == ByteLimits():
            return False
        coming = contents.manifest()
        room = make_room(
            repository,
            self._lease,
            self._policy,
            nbytes + len(manifest_codec.encode(coming)),
            line=coming.info.line,
            incoming=coming.info,
            protected=self._unsure(),
            verified=verified,
            in_flight=self._finish.in_flight,
            full=full,
        )
        if room is None:
            return False
        self._made_room(room.plan.remove)
        self._report.emit_all(room.events(self._config.url))
        if room.plan.gave_way:
            self._report.failed(
                "keep",
                f"{self._config.url} is full: older snapshots that `keep` wants give way to newer ones; free space, or "
                "keep fewer. Pinned ones stay",
            )
        return bool(room.forgotten)

    def sweep(self) -> None:
        """Remove what writers that died have left behind, and make up for copies of manifests; once. Never raises."""
        if self.swept or self._lease is None:
            return
        self.swept = True
        try:
            with where_permitted(self._repository, self._report.warn):
                collected = collect(self._repository, self._lease, in_flight=self._finish.in_flight)
                self._report.emit_all(collected.events(self._config.url))
                if self._config.parity is not None:
                    copy_manifests(self._repository)
        except AbandonedError:
            self.swept = False
        except Exception as err:  # noqa: BLE001 - reported; garbage does no harm
            self._report.warn(f"cannot remove what earlier writers left behind: {err}")

    def prune(self, newest: str, protected: Mapping[str, str]) -> None:
        """After a commit. It is durable: nothing is its failure."""
        if self._lease is None:
            return
        if self._config.parity is not None:
            with suppress(StorageError, AbandonedError):  # the next one makes up for it
                copy_manifests(self._repository)
        if self.keeps_all:
            return
        try:
            with suppress(AbandonedError), where_permitted(self._repository, self._report.warn):
                pruned = prune(
                    self._repository,
                    self._lease,
                    self._policy,
                    line=self._line,
                    protected={**protected, **self._unsure()},
                    verified=(newest,),
                    in_flight=self._finish.in_flight,
                    tidy=self._finish.is_shared,  # others leave what this writer does not know of
                )
                self._report.emit_all(pruned.events(self._config.url))
        except Exception as err:  # noqa: BLE001 - reported; tried again after the next snapshot
            self.swept = False
            self._report.warn(f"retention failed, older snapshots stay: {ErrorRecord.of(err).message}")


class PrimaryTier:
    """The nearest tier. Methods are called one at a time; each may be left behind by its caller.

    Where another rank has the lease of the root, room, retention and the commit are that rank's: this one writes its
    share.

    Args:
        config: of the writer.
        lease: None: another rank has it, and has made the run.
        acquire: takes the lease again.
        aside: reads what is there where a read that hangs must not be in the way; waits in the lane of the methods.
        emit: takes events.
        made_room: takes the snapshots that had to go for the next one.
        in_flight, alone: where this is the coordinator of several ranks, see `commit_of_ranks.Gathering`.

    Raises:
        ForeignError, CorruptError, NewerFormatError, StorageError: this place is not the coordinator's.
    """

    def __init__(
        self,
        config: WriterConfig,
        repository: Repository,
        lease: Lease | None,
        acquire: Callable[[], Lease] | None,
        policy: RetentionPolicy,
        aside: GuardedReader,
        emit: Callable[[Event], object],
        made_room: Callable[[Sequence[str]], object],
        in_flight: SessionSnapshots | None,
        alone: threading.Event,
    ) -> None:
        ranks = config.ranks
        self._config = config
        self._tier = config.url
        """How it is called in events."""
        self._lease = lease
        self._acquire = acquire
        self._device = device_of(folder.root) if (folder := repository.storage.capabilities.locks) else None
        self._report = Reporter(emit)
        self._aside = aside
        self.left: dict[str, tuple[SnapshotCommitted, Manifest]] = {}
        """What `leave` and `commit_shares` have made durable, by snapshot, and the share of this rank in it."""
        self.finish: CommitStrategy = ALONE
        self._freshness = Freshness(config.url)
        self._written: tuple[Sequence[TrainedGroup], Sequence[GroupMark], Manifest, Manifest] | None = None
        if lease is None:
            if repository.record() is None:
                raise ForeignError(
                    f"rank {ranks.rank} finds no run at {config.url}, which rank {ranks.members[0]} writes",
                    hint="the ranks of one machine need the same folder",
                )
            self._tier = part_records.share_place(config.url, ranks.rank)
            self.finish = Contributing(ranks)
        elif in_flight is not None:
            alone_seconds = 0.0 if config.memory else ALONE_SECONDS  # what is in memory waits for the others anyway
            self.finish = Gathering(
                ranks, in_flight, aside.waiting, self.check_lease, alone, alone_seconds, self._report.warn
            )
        self.retention = PrimaryRetention(config, policy, self.finish, self._report, made_room)
        self.settle_at(repository)

    def settle_at(self, repository: Repository) -> None:
        """Work on this one from now on: it may turn out to be a place of another run as long as nothing is there."""
        self.repository = repository
        self.run = RunText.of(repository)
        self._known = DedupBaseline(repository, None if self.finish.is_shared else self._aside)
        self._whole: tuple[str, ...] = ()
        self.retention.settle_at(repository, self._lease)

    def learn(self, line: Line, common: str | None, lacked: Sequence[str], damaged: Sequence[str]) -> set[str]:
        """What is written next is of this line, refers to no damaged file, and all nodes have this snapshot: what is
        older is not what a lost common one would be missed for, and what some node lacks is not either.

        Returns:
            The damaged files that it had not reported before.
        """
        unknown = set(damaged) - self.repository.damage.found
        self.repository.damage.found.update(damaged)
        self.repository.damage.files.update(damaged)
        self.retention.learn(line, common, lacked)
        return unknown

    def check_lease(self) -> None:
        """Raises `LeaseHeldError` if the tier is not ours any more."""
        if self._lease is not None:
            self._lease.check()

    def write(self, staged: Staged) -> SnapshotCommitted:
        """Make a snapshot durable, making room before, or the share of one.

        Raises:
            CkptError: it is not.
        """
        if self._lease is not None:
            self._check_lease()
            self.retention.sweep()
            self._aside.waiting.moved()
            if self.retention.keeps_all:  # else it comes with retention
                self.repository.write_catalog_if_due()
        self._aside.waiting.check()
        not_undone = partial(self._not_undone, staged)
        while True:
            contents: RawContents | None = None
            # What it was to refer to may have gone for room: then more is to be written.
            while contents is None or not contents.stands():
                contents = self._contents(staged)
                self.retention.make_room(contents, self._whole)
            try:
                event, stored, whole = write_snapshot(
                    contents, self._tier, self._aside.waiting, not_undone, self.finish
                )
                break
            except StorageFullError:
                # Of a share the others have learned that it failed. Else one more snapshot goes, and so on.
                if self.finish.is_shared or not self.retention.make_room(contents, self._whole, full=True):
                    raise
        self._known.committed(stored)
        self._whole = (staged.snapshot,)
        self._written = staged.cut_layout.layout.groups, staged.job.marks, whole, stored
        return event

    def leave(self, staged: Staged) -> SnapshotCommitted:
        """Make the share of this rank durable and say so; only that again where it was left before.

        It refers to nothing: what it would refer to may go before the ranks have committed it.

        Raises:
            CkptError: it is not.
        """
        storage, snapshot = self.repository.storage, staged.snapshot
        left = self.left.get(snapshot)
        if left is not None and not lacking(storage, left[1].files):
            part_records.put(storage, part_records.part_of(left[1], staged.cut_layout.layout, self._config.ranks))
            return left[0]
        plain = RawContents(staged, self.repository)
        contents = (
            plain if self._config.codec == RAW else encoded(staged, self.repository, self._config.codec, plan_alone)
        )
        not_undone = partial(self._not_undone, staged)
        finish = Contributing(self._config.ranks, says_failure=False)
        event, share, _ = write_snapshot(contents, self._tier, self._aside.waiting, not_undone, finish)
        self.left[snapshot] = event, share
        return event

    def commit_shares(self, snapshot: str) -> bool:
        """The shares of all ranks are there: make the snapshot exist. False: they make none.

        Raises:
            LeaseHeldError: the tier is not ours any more.
            CkptError: calling again continues.
        """
        storage, members = self.repository.storage, self._config.ranks.members
        try:
            whole = part_records.merge(list(part_records.read_all(storage, snapshot, members).values()))
            part_records.require_files(storage, [file for file in whole.files if snapshot not in file.name])
        except (FormatError, SnapshotSkippedError, SnapshotFailedError, StorageMissingError):
            return False
        self.check_lease()
        self._aside.waiting.check()
        self.repository.commit(whole)
        if self._config.ranks.places:  # what else is left here may be what all nodes have: nothing of it is garbage
            part_records.remove(storage, snapshot, members)
        elif isinstance(self.finish, Gathering):
            for one, ranks in part_records.there(storage).items():
                if one == snapshot or one in self.finish.in_flight:
                    part_records.remove(storage, one, ranks)  # what is newer is not complete, and never will be
            self.finish.in_flight.settle(snapshot)
        if snapshot in self.left:
            event, share = self.left[snapshot]
            self.left[snapshot] = replace(event, nbytes=whole.info.nbytes), share
        return True

    def _contents(self, staged: Staged) -> RawContents:
        if self._config.codec != RAW:
            make_plan = self._known.plan_share if self.finish.is_shared else None
            return encoded(staged, self.repository, self._config.codec, make_plan)
        return self._shared(staged) or RawContents(staged, self.repository)

    def _shared(self, staged: Staged) -> RawContents | None:
        """What need not be written again is not worth failing for: with trouble finding out, all is written."""
        try:
            found = self._known.contents(staged)
        except StorageError as err:
            text = f"snapshots are written whole, older data at {self._config.url} cannot be read: {err.message}"
            self._report.failed("older data", text)
            return None
        self._report.worked("older data")
        return found

    def prune(self, newest: str, protected: Mapping[str, str]) -> None:
        """After a commit a look at what is there, and retention. It is durable: nothing is its failure."""
        self._look_back()
        self.retention.prune(newest, protected)

    def _look_back(self) -> None:
        """Report what is stale in the newest snapshot, and a piece that is not as it was written; once."""
        written, self._written = self._written, None
        if written is None:
            return
        groups, marks, whole, stored = written
        if self._lease is not None:  # of the share of a rank nothing can be said
            self._report.emit_all(self._freshness.compare(groups, marks, whole))
        with suppress(StorageError, AbandonedError):  # the next snapshot reports a tier that does not answer
            if (damage := read_back(self.repository, self._config.url, stored, self._known.read)) is not None:
                self._report.emit(damage)

    def removed(self) -> str | None:
        """The newest snapshot that this writer has made durable, if somebody has removed it; None: it exists.

        Raises:
            StorageError: the tier does not say.
        """
        for snapshot in self._whole:
            try:
                self.repository.storage.get(names.manifest_name(snapshot))
            except StorageMissingError:
                return snapshot
        return None

    def release(self) -> None:
        """Give back the lease, if this writer has it.

        Raises:
            CkptError, OSError: the tier does not answer.
        """
        if self._lease is not None:
            self._lease.release()

    def _check_lease(self) -> None:
        """Take the tier again where its folder was removed, renamed or replaced.

        Raises:
            LeaseHeldError: it is not ours any more.
            StorageMissingError: its disk is not mounted any more.
        """
        assert self._lease is not None
        self._aside.waiting.moved(LEASE_SECONDS)
        try:
            self._lease.check()
        except LeaseHeldError:
            if self._acquire is None:
                raise
            storage = self.repository.storage
            self._let_go()
            self._aside.waiting.moved(LEASE_SECONDS)
            removed, folder = Repository(storage).record() is None, storage.capabilities.locks
            if removed and folder is not None and device_of(folder.root) != self._device:
                raise StorageMissingError(
                    f"the disk of {self._config.url} is gone, and the folder would be made on another one",
                    hint="mount the disk again: the next snapshot goes there",
                ) from None
            self._lease = self._acquire()
            with on_failure(self._let_go):  # kept, it would look as if all of this were done
                self.settle_at(adopt_run(self.run, storage))
            self._report.warn(
                f"{self._tier} was removed while it was written: it is made again, and the snapshots it had are gone"
                if removed
                else f"{self._tier} was replaced while it was written: snapshots go to what is there now"
            )

    def _let_go(self) -> None:
        """Give back a lease that is lost, or of no use: whatever comes of it."""
        with suppress(CkptError, OSError):
            self.release()

    def _not_undone(self, staged: Staged, err: CkptError) -> None:
        self.retention.swept = False
        self._report.warn(f"cannot remove the data of the failed snapshot {staged.snapshot} yet: {err}")


def history_of(repository: Repository) -> History | None:
    """What is there; None: nothing. To be asked once the lease is taken: then nothing comes from others any more."""
    ids = repository.ids()
    if not ids:
        return None
    newest = ids[-1]
    try:
        info = repository.info(newest.id)
    except (FormatError, StorageMissingError):
        return History(len(ids), newest.id, newest.step, newest.seq)
    return History(len(ids), newest.id, newest.step, newest.seq, info.created, info.line.attempt)
