"""Makes staged snapshots durable at the nearest tier, one after another.

It opens that tier, reports who waits for what further tiers know of the run, and applies retention. It knows nothing of
the trainer's process, nor of sockets: jobs come in, messages go out through `emit`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from typing import TypeVar

from ckpt_engine.copy.job import ErrorRecord, PersistJob, RankConfig, Started, WriterConfig
from ckpt_engine.copy.transfer import RunText, adopt_run
from ckpt_engine.copy.write_snapshot import Staged, SupersededError
from ckpt_engine.errors import (
    CkptError,
    ConfigError,
    FormatError,
    LeaseHeldError,
    StorageError,
    StorageMissingError,
    StorageStalledError,
)
from ckpt_engine.observe.events import GONE, Notice, SnapshotCommitted, SnapshotFailed, SnapshotFound, TierDegraded
from ckpt_engine.observe.reporter import Reporter
from ckpt_engine.store import names
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.lease_holder import Lease, LeaseHolder
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import KeepAll, RetentionPolicy
from ckpt_engine.store.storage import open_storage, require_served
from ckpt_engine.store.storage.retries import ask_apart
from ckpt_engine.store.storage.watchdog import AbandonedError, GuardedReader, StuckCallRunner, WatchedStorage
from ckpt_engine.writer import channel, part_records
from ckpt_engine.writer.attempts import AttemptRecord
from ckpt_engine.writer.commit_of_ranks import SessionSnapshots
from ckpt_engine.writer.crash_recovery import CrashRecovery, There
from ckpt_engine.writer.lease_wait import waiting
from ckpt_engine.writer.memory_snapshots import Ids, SlotReaders, StagedJob
from ckpt_engine.writer.mend_damage import complete_parity, mend_damage
from ckpt_engine.writer.messages import Body, Kind
from ckpt_engine.writer.primary_tier import PrimaryTier, history_of, policy_of
from ckpt_engine.writer.pulse import SpentTimes
from ckpt_engine.writer.row_file import RowFile
from ckpt_engine.writer.run_records import Unfinished
from ckpt_engine.writer.secondary_tiers import SecondaryTiers

Emit = Callable[[Body], object]
T = TypeVar("T")


class Persister:
    """Persists the jobs of one trainer into one run, holding the run's lease meanwhile.

    A tier that hangs is left behind after `watchdog.STALL_SECONDS`: then the job goes to the next one, or fails.

    Args:
        emit: takes the messages to the trainer (see `channel`); may be called on any thread, and never waits.
        ids: numbers the snapshots.

    Every method is called by one thread, the same one, in the order of the protocol.
    """

    def __init__(self, config: WriterConfig, emit: Emit, ids: Ids) -> None:
        self.config = config
        self._emit = emit
        self._report = Reporter(lambda event: emit(channel.event(event)))
        self.ids = ids
        self._holds = SlotReaders(lambda slot: self._emit({"kind": Kind.FREED, "slot": slot}))
        self.secondary = SecondaryTiers(config, self._report.emit)
        self._held_back: str | None = None
        """The newest snapshot when retention had to spare one that was being copied."""
        self._opened = False
        self._alone = threading.Event()
        self._recovery = CrashRecovery(config.ranks, self) if config.ranks.several else None
        self._attempts: AttemptRecord | None = None
        self._parity: Sequence[Future[None]] | None = () if config.parity is not None and config.ranks.leads else None
        """The thread that makes it, if there has been one; None: this writer makes none."""

    def open(self, spent: Callable[[], SpentTimes | None] = lambda: None) -> Started:
        """Take the lease and make the run's folder ready. Several ranks number snapshots from the first number on.

        Args:
            spent: what the trainer says of its time.

        Raises:
            LeaseHeldError: another writer holds it, naming it.
            ConfigError: it cannot be sealed.
            ForeignError, CorruptError, NewerFormatError: the folder is not ours to write.
            StorageError: it cannot be written.
        """
        config = self.config
        holder = config.holder or LeaseHolder.current()
        policy = policy_of(config, self._report.warn)
        plain = open_storage(config.url, config.storage_options)
        if len(config.ranks.places) > 1 and plain.capabilities.rotate is not None:
            raise ConfigError(
                f"{plain.url} is a folder of each node, and cannot be sealed: nodes read each other's files",
                hint="name a folder that all nodes see, or an object store, as the nearest tier",
            )
        self._lane = lane = StuckCallRunner(plain.url)
        self.rows = RowFile(plain, self._report.emit)
        storage = WatchedStorage(open_storage(config.url, config.storage_options), lane.progress)
        self.secondary.place(plain, holder)
        ranks = config.ranks
        if not ranks.leads:  # another rank's writer has the lease
            self.primary = self._tier_at(Repository(storage), None, None, KeepAll(), None)
            self._opened = True
            return Started(0, None)
        for tier in config.tiers:
            require_served(tier.url, tier.storage_options)
        if ranks.several:  # they have to know the run; else the trainer does not wait for slow imports
            self.secondary.open()
        pause = waiting(plain, holder, config.lease_wait_seconds, self._report.emit)
        with ExitStack() as undo:
            lease = acquire(plain, holder, config.lease_wait_seconds, pause=pause)
            undo.callback(lease.release)
            repository = adopt_run(RunText.parse(ranks.record), storage) if ranks.record else Repository(storage)
            if self.secondary.replicators:
                repository = self.secondary.join_run(repository, say=True)
                self.secondary.start()
            else:  # the trainer does not wait for other tiers to say which run this is
                repository.create_if_absent()
            first_seq = repository.next_seq()
            history = history_of(repository)
            in_flight, first_seq = self._recover(repository, ranks, first_seq) if ranks.several else (None, first_seq)
            if config.memory:
                for newest in repository.ids()[-1:]:
                    self._report.emit(SnapshotFound(newest.id, newest.step, config.url))
            again = partial(acquire, plain, holder)
            self.primary = self._tier_at(repository, lease, again, policy, in_flight)
            self._attempts = AttemptRecord(
                plain, holder, ranks.size, self.primary.check_lease, self._report.emit, spent
            )
            self._attempts.begin()
            if len(ranks.places) > 1 and not (ranks.rank or config.tiers):
                text = (
                    f"{len(ranks.places)} nodes have {config.url} for themselves, each with its part of every "
                    "snapshot: a lost node takes all of them with it, unless there is a further tier that all nodes see"
                )
                self._report.emit(Notice("INFO", text))
            self._opened = True
            undo.pop_all()
        return Started(first_seq, history)

    def _recover(self, repository: Repository, ranks: RankConfig, first_seq: int) -> tuple[SessionSnapshots, int]:
        """Finish or drop what ranks of dead sessions have left. What the living one may be writing is not touched.

        Args:
            first_seq: the lowest number that is free at the nearest tier.

        Returns:
            What the living session may be writing, and the lowest number that is free everywhere.
        """
        first_seq = max(first_seq, self.secondary.next_seq(), ranks.first_seq or 0)
        in_flight = SessionSnapshots(ranks.session, first_seq if ranks.first_seq is None else ranks.first_seq)
        for snapshot, exists in part_records.recover(repository, in_flight):
            what = "written by all ranks and is committed now" if exists else "not written by all ranks and is dropped"
            self._report.warn(f"{snapshot} was {what}")
        return in_flight, max(first_seq, repository.next_seq())

    def leave_alone(self) -> None:
        """The trainer is gone: others are not waited for long any more. Any thread may call this."""
        self._alone.set()
        self.rows.end(waits=False)
        if self._attempts is not None:
            self._attempts.note(gone=True)

    def cancel(self, snapshot: str, why: str) -> None:
        """This rank has no part in a snapshot that all ranks take."""
        cancel = partial(self.primary.finish.cancel, self.primary.repository, snapshot, why)
        try:
            cancel() if self.config.ranks.leads else self._lane.call(cancel)
        except StorageStalledError as err:
            self._report.warn(err.message)

    def _tier_at(
        self,
        repository: Repository,
        lease: Lease | None,
        again: Callable[[], Lease] | None,
        policy: RetentionPolicy,
        in_flight: SessionSnapshots | None,
    ) -> PrimaryTier:
        reads = StuckCallRunner(self._lane.url)
        storage = WatchedStorage(open_storage(self.config.url, self.config.storage_options), reads.progress)
        aside = GuardedReader(Repository(storage), reads, self._lane.progress)
        return PrimaryTier(
            self.config,
            repository,
            lease,
            again,
            policy,
            aside,
            self._report.emit,
            self.secondary.gone,
            in_flight,
            self._alone,
        )

    def close(self, ending: str | None = None) -> None:
        """Give back the lease. Idempotent. A tier that hangs does so when it has ended.

        Args:
            ending: how the attempt of the trainer ends, one of `events.ENDS`; None: not known.
        """
        if self._held_back is not None:
            self._prune(self._held_back)
        # Where the trainer is gone the next attempt must not wait for it.
        if self._parity is not None and self._opened and ending != GONE:
            self._add_parity(self._parity, self.config.end_wait_seconds)
            wait(self._parity, self.config.end_wait_seconds)
        release = partial(self._release, ending)
        if self._opened and not self._lane.last(release):
            self._opened = False
            try:
                self._lane.call(release)
            except StorageStalledError as err:
                self._report.warn(f"the lease could not be given back: {err.message}")

    def _release(self, ending: str | None) -> None:
        with suppress(StorageError):  # not reached is not removed
            alone = not (self.config.tiers or self.config.ranks.several)
            if alone and (gone := self.primary.removed()) is not None:
                parsed, why = names.parse_id(gone), "it was removed after it had become durable"
                step, code = -1 if parsed is None else parsed.step, StorageMissingError.code
                self._report.emit(SnapshotFailed(gone, step, self.config.url, code, why))
        if self._attempts is not None:
            self._attempts.end(ending)
        self.rows.end()
        try:
            self.primary.release()
        except (CkptError, OSError) as err:  # a tier that is unreachable does not receive it
            self._report.warn(f"the lease of {self._lane.url} could not be given back: {ErrorRecord.of(err).message}")

    def drain(self) -> None:
        """After `close`: finish what further tiers still want, for at most `drain_seconds`.

        Nearer places are free for another writer meanwhile: only the leases of further tiers are still taken.
        """
        hanging = [Unfinished(self._lane.url, (), "it hangs")] if self._opened and self._lane.stuck else []
        waited_for = set[str]()
        if self.secondary.replicators:
            self._emit_copying(waited_for, ())
            self.secondary.drain(
                self.config.drain_seconds,
                bool(hanging),
                partial(self._emit_closed, waited_for),
                partial(self._emit_copying, waited_for),
            )
        elif hanging:
            self._emit_closed(waited_for, hanging)

    def prepare(self, started: Started) -> None:
        """Once after `open`, which has returned `started`, before any message: what takes time.

        Raises:
            CkptError: the nearest tier cannot join the run.
        """
        if self.config.tiers and not self.config.ranks.several:
            self._begin_secondary(started)
        self.ids.begin(max(started.first_seq, self.secondary.next_seq()))
        try:
            self._lane.call(self.primary.retention.sweep)
        except StorageStalledError as err:
            self._primary_failed(err)
        if self._parity is not None:
            self._add_parity(self._parity)

    def _begin_secondary(self, started: Started) -> None:
        try:
            self.secondary.open()
        except StorageError as err:  # a library that is there, and cannot be imported
            for tier in self.config.tiers:
                self._report.emit(TierDegraded(tier.url, err.code, str(err), tier.fatal))
            return
        joins = started.history is None  # it has no snapshots that say which run this is
        if joins:
            self.secondary.survey()
        storage = WatchedStorage(open_storage(self.config.url, self.config.storage_options), self._lane.progress)
        repository = self._lane.call(partial(self.secondary.join_run, Repository(storage)))
        if joins:
            self.primary.settle_at(repository)
        self.secondary.start()

    def finish(self) -> None:
        """The trainer is about to end, and does not wait for tiers that give no sign. Any thread may call this."""
        if self._attempts is not None:
            self._attempts.note()
        self.secondary.finish()

    def persist(self, order: StagedJob) -> None:
        """Do a job that was submitted. If it fails that is reported, never raised."""
        self._attempt(order, partial(self._emit_done, order))

    def _attempt(self, order: StagedJob, settle: Callable[[ErrorRecord | None], object]) -> None:
        try:
            if order.problem is None:
                (self.ids.renew if order.failed else self.ids.of)(order)
            self._learn(order.job)
            event, is_primary = self._make_durable(order.staged(order.snapshot or ""))
        except SupersededError as err:
            self._report.emit(Notice("INFO", err.message))
            settle(ErrorRecord.of(err))
        except Exception as err:  # noqa: BLE001 - reported; whatever it is, the next one gets its own chance
            order.failed, why = True, ErrorRecord.of(err)
            place, hint = self.config.url, why.hint or ""
            failed = SnapshotFailed(order.snapshot or "", order.job.step, place, why.code, why.message, hint)
            self._report.emit(failed)
            settle(why)
        else:
            order.durable = True
            self._report.emit(event)
            settle(None)
            if is_primary:
                self._committed(event.snapshot)

    def recover(self, orders: Sequence[StagedJob]) -> bool:
        """Make durable what was only in memory, or has failed before. Reported like a job, but with no outcome.

        Of several ranks that is the newest of these orders that the writers of all ranks hold.

        Args:
            orders: at least one, newest first.

        Returns:
            False: the tier has failed; calling again continues.
        """
        if self._recovery is None:
            self._attempt(orders[0], lambda _: None)
            return orders[0].durable
        self._learn(orders[0].job)
        try:
            self._recovery.run(orders)
        except CkptError as err:
            self._report.warn(f"what is in memory is not durable at {self.config.url} yet: {err.message}")
            return False
        return True

    def look(self) -> There:
        """Who has left which share at the nearest tier. Raises `CkptError`, like the three that follow."""
        return self._lane.call(lambda: part_records.there(self.primary.repository.storage))

    def exists(self, snapshot: str) -> bool:
        """Whether the snapshot of all ranks is committed there."""
        return self._lane.call(lambda: any(one.id == snapshot for one in self.primary.repository.ids()))

    def leave(self, order: StagedJob) -> None:
        """Make a share durable, and say so; only that again if it was left before."""
        staged = order.staged(order.snapshot or "")
        event = self._in_lane(self._lane, staged, partial(self.primary.leave, staged))
        if not self.config.ranks.leads:
            self._report.emit(event)

    def commit(self, order: StagedJob) -> bool:
        """All shares of a snapshot are there: make it exist; False: they make none."""
        snapshot = order.snapshot or ""
        if not self._lane.call(partial(self.primary.commit_shares, snapshot)):
            return False
        order.durable = True
        if (left := self.primary.left.get(snapshot)) is not None:
            self._report.emit(left[0])
            self._committed(snapshot)
        return True

    def _learn(self, job: PersistJob) -> None:
        damaged = self.primary.learn(job.line, job.common, job.lacked, job.damaged)
        if self._attempts is not None and job.pace:
            self._attempts.paced(job.pace)
        if self.secondary.replicators:
            self.secondary.learn(job.line, job.damaged, job.pace.get("far_seconds"))
        if damaged and (self.secondary.replicators or self._parity is not None):
            config = self.config
            tiers = [(config.url, config.storage_options), *((one.url, one.storage_options) for one in config.tiers)]
            places = (Repository(open_storage(*one)) for one in tiers)  # on that thread
            work = partial(mend_damage, places, sorted(damaged), self.primary.check_lease, self._report.emit)
            ask_apart(work, "ckpt-mend")

    def _add_parity(self, making: Sequence[Future[None]], wait_seconds: float = 0.0) -> None:
        """Begin to make the parity that data files lack, unless `making` it is under way still after so long."""
        wait(making, wait_seconds)
        if all(one.done() for one in making):
            work = partial(complete_parity, self.config, self.primary.check_lease, self._report.emit)
            self._parity = [ask_apart(work, "ckpt-parity")]

    def _committed(self, snapshot: str) -> None:
        self.rows.committed.set()
        if self.secondary.replicators:
            self.secondary.committed(snapshot)
        self._prune(snapshot)
        if self._parity is not None:
            self._add_parity(self._parity)

    def _make_durable(self, staged: Staged) -> tuple[SnapshotCommitted, bool]:
        """Write the snapshot to the nearest tier, or to the next one that works; whether it was the nearest.

        Raises:
            Exception: no tier took it; that of the nearest one.
        """
        try:
            return self._in_lane(self._lane, staged, partial(self.primary.write, staged)), True
        except Exception as err:
            if isinstance(err, StorageError):
                self.primary.retention.swept = False
            elsewhere = self._make_durable_elsewhere(staged, err)
            if elsewhere is None:
                raise
            return elsewhere, False

    def _make_durable_elsewhere(self, staged: Staged, error: Exception) -> SnapshotCommitted | None:
        """The nearest tier has failed: write the snapshot to the next one that works. None: none does."""
        if (
            not self.secondary.replicators
            or self.config.ranks.several  # the others would not know where
            or not isinstance(error, StorageError | LeaseHeldError | FormatError)
        ):
            return None
        self.secondary.primary_failed(error)
        if self.config.fatal:
            return None
        for replicator in self.secondary.working():
            tier = replicator.tier
            try:
                committed = self._in_lane(tier.place.direct_lane, staged, partial(tier.write, staged))
            except Exception as err:  # noqa: BLE001 - reported as the failure of that tier; the next one may do
                replicator.failed(err)
                continue
            self.secondary.committed_elsewhere(staged.snapshot)
            return committed
        return None

    def _in_lane(self, lane: StuckCallRunner, staged: Staged, work: Callable[[], T]) -> T:
        """What `work` returns. While it runs, left behind or not, the trainer does not get back its slot."""

        def read() -> T:
            with self._holds.reading(staged.job.slot):
                return work()

        def left(error: BaseException | None) -> None:
            if error is not None and not isinstance(error, AbandonedError):
                self._report.warn(f"what hung at {lane.url} has failed: {ErrorRecord.of(error).message}")

        return lane.call(read, left=left)

    def _prune(self, newest: str) -> None:
        """What follows a commit."""
        retention = self.primary.retention
        protected = {} if retention.keeps_all or not self.secondary.replicators else self.secondary.protected()
        self._held_back = newest if protected else None
        try:
            self._lane.call(partial(self.primary.prune, newest, protected))
        except StorageStalledError as err:
            self._primary_failed(err)

    def _primary_failed(self, err: StorageStalledError) -> None:
        if self.secondary.replicators:
            self.secondary.primary_failed(err)
        else:
            self._report.warn(err.message)

    def _emit_done(self, order: StagedJob, error: ErrorRecord | None) -> None:
        job, snapshot = order.job, order.snapshot if error is None else None

        def tell(is_read: bool) -> None:
            done = {"job": job.job, "snapshot_id": snapshot, "error": error and asdict(error), "slot_held": is_read}
            self._emit({"kind": Kind.DONE, "done": done})

        self._holds.settle(job.slot, tell)

    def _emit_closed(self, waited_for: Collection[str], unfinished: Sequence[Unfinished]) -> None:
        """What is left undone. `waited_for`: the further tiers that the trainer was said to wait for."""
        said = all(one.url in waited_for and one.why is None for one in unfinished)
        left = f"not everything is on {'; nor on '.join(one.text() for one in unfinished)}" if unfinished else ""
        self._emit({"kind": Kind.CLOSED, "left": left, "said": said, "copies": True})

    def _emit_copying(self, waited_for: set[str], late: Sequence[Unfinished]) -> None:
        """What the trainer waits for; `waited_for` takes these further tiers."""
        waits = f"the last copies to {' and '.join(one.amount() for one in late)}" if late else ""
        waited_for.update(one.url for one in late)
        self._emit({"kind": Kind.COPYING, "waits": waits, "seconds": self.config.end_wait_seconds, "copies": True})
