"""A further tier as one writer works on it.

It takes its lease, copies one snapshot at a time, and keeps its retention. `CopySchedule` says which one is next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from ckpt_engine.copy.add_parity import add_parity, copy_manifests, more_bytes
from ckpt_engine.copy.codec_selector import AUTO
from ckpt_engine.copy.encoded_copy import encoded
from ckpt_engine.copy.job import ErrorRecord, TierConfig
from ckpt_engine.copy.make_room import Collected, Pruned, collect, make_room, prune, where_permitted
from ckpt_engine.copy.transfer import (
    Copied,
    CopySourceError,
    adopt_run,
    copy_snapshot,
    reading_source,
)
from ckpt_engine.copy.write_plan import plan
from ckpt_engine.copy.write_snapshot import RawContents, Staged, write_snapshot
from ckpt_engine.errors import (
    CkptError,
    FormatError,
    SnapshotFailedError,
    SnapshotSkippedError,
    StorageFullError,
    StorageMissingError,
)
from ckpt_engine.observe.events import Event, SnapshotCommitted, SnapshotReplicated
from ckpt_engine.observe.reporter import Reporter
from ckpt_engine.store import names
from ckpt_engine.store.branches import branch_id
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.lease_holder import Lease, LeaseHolder
from ckpt_engine.store.manifest import RAW, Line, SnapshotInfo
from ckpt_engine.store.protection import begin
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import KeepAll, Retention
from ckpt_engine.store.rows import copy_rows
from ckpt_engine.undo import on_failure
from ckpt_engine.writer.attempts import copy_attempts
from ckpt_engine.writer.commit_of_ranks import Gather
from ckpt_engine.writer.copy_target import CopySource, CopyTarget, NearerTiers, TierPlace
from ckpt_engine.writer.primary_tier import LEASE_SECONDS

GUARD_SECONDS = 60.0
"""How long a snapshot written straight to the tier waits for a collection there."""
_LOOK_SECONDS = 1.0
_NO_LINE = Line("-")
"""Which no snapshot is of."""


class SecondaryTier(CopyTarget):
    """One further tier, with its lease and its retention.

    Args:
        holder: who asks for its lease.
        emit: takes events.
        gather: where nodes have roots of their own: has all of them copy what each has.
    """

    def __init__(
        self,
        config: TierConfig,
        place: TierPlace,
        nearer: NearerTiers,
        holder: LeaseHolder,
        emit: Callable[[Event], object],
        gather: Gather | None = None,
    ) -> None:
        super().__init__(config, place, nearer)
        self._holder = holder
        self._report = Reporter(emit)
        self._gather = gather
        self._held: tuple[Repository, Lease] | None = None
        self._unpruned = self._said = self._swept = False
        self._done: set[str] = set()
        """What was sent, or did not fit, and a nearer tier still has: it is not sent again when a limit removes it."""
        self._guard = threading.Lock()

    @property
    def is_open(self) -> bool:
        return self._held is not None

    def advance(self) -> float | None:
        """Once it also removes what interrupted writes left."""
        more = self._copy_newest()
        if self._held is not None:
            repository, lease = self._held
            if self.config.parity is not None:
                copy_manifests(repository)
                add_parity(
                    repository,
                    self.config.parity,
                    lease.check,
                    self.nearer.scratch(),
                    self.place.copy_lane.progress.moved,
                )
            if not self._swept:
                self._swept = True
                with where_permitted(repository, self._report.warn):
                    self._tell(collect(repository, lease, in_flight=self._keeping()))
        return 0.0 if more else None

    def _copy_newest(self) -> bool:
        self.place.direct_lane.refuse_if_stuck()
        repository, lease = self._open()
        repository.damage.files.update(self.damaged)
        self.place.copy_lane.progress.moved(LEASE_SECONDS)
        lease.check()
        infos = repository.list()
        there = self._of_line(infos)
        self.progress.newest = there[-1] if there else None
        if self._unpruned and self.progress.newest is not None:
            self._prune(repository, lease, self.progress.newest.id)
        near = self._near()
        self._say_what_stays([info for info in infos if info.id not in near])
        done = {*self._done, *repository.damage.snapshots}  # `ckpt scrub` mends those
        wanted = self._wanted([found.info for found in near.values() if found.info.id not in done], there)
        self.progress.waiting = wanted
        if not wanted:
            if self.nearer.sources[0].usable():
                nearest = self.nearer.nearest.storage
                copy_rows(nearest, self.place.copies, self.nearer.copied)
                copy_attempts(nearest, self.place.copies, self.nearer.copied)
            return False
        try:
            with self.progress.under_way(wanted[0]):
                self._copy(near[wanted[0].id], repository, lease, there)
        except StorageFullError:
            if self.line is None:
                return False  # what may go is not known yet
            if self.progress.newest is None or wanted[0].seq > self.progress.newest.seq:
                raise
            self._done.add(wanted[0].id)  # older ones are a luxury
        return True

    def _keeping(self) -> list[str]:
        """What is still to be copied: the data files of an interrupted copy stay."""
        return [info.id for info in self.progress.waiting]

    def write(self, staged: Staged) -> SnapshotCommitted:
        held, progress = self._held, self.place.direct_lane.progress
        progress.moved(GUARD_SECONDS)
        if held is None or not self._guard.acquire(timeout=GUARD_SECONDS):
            return super().write(staged)
        try:
            direct = self.place.direct
            progress.moved(LEASE_SECONDS)
            held[1].check()
            progress.moved()
            codec = self.config.codec  # of `auto` nothing is known of what was not copied
            plain = RawContents(staged, direct)
            contents = plain if codec in (RAW, AUTO) else encoded(staged, direct, codec)
            if not isinstance(self.schedule.policy, KeepAll):
                self._tell(
                    make_room(
                        direct,
                        held[1],
                        self.schedule.policy,
                        contents.new_bytes,
                        line=self.line or _NO_LINE,
                        in_flight=self._keeping(),
                    )
                )
            kept = contents if contents.stands() else plain  # what it was to refer to may have gone for room
            committed = write_snapshot(kept, self.url, progress, partial(self._not_undone, staged))[0]
            self._unpruned = True
            return committed
        finally:
            self._guard.release()

    def release(self) -> None:
        held, self._held = self._held, None
        self._done.clear()
        if held is not None:
            try:
                held[1].release()
            except (CkptError, OSError) as err:
                self._report.warn(f"the lease of {self.url} could not be given back: {ErrorRecord.of(err).message}")

    def _say_what_stays(self, only_here: Sequence[SnapshotInfo]) -> None:
        """Once: what other jobs have made here. Of what nearer tiers have too the trainer says it."""
        line = self.line
        if line is None or self._said:
            return
        self._said = True
        ours = {attempt for attempt, _ in line.before}
        others = [
            info
            for info in only_here
            if not line.has(info) and (not ours or ours & {info.line.attempt, *(one for one, _ in info.line.before)})
        ]
        if others:
            remove = f"`ckpt prune {self.url} --branch {branch_id(others[-1].line)}`"
            many = f"{len(others):,} snapshots of another job, up to step {others[-1].step:,}"
            self._report.warn(f"{self.url} has {many}: they stay until {remove} removes them")

    def _near(self) -> dict[str, CopySource]:
        size = None if self._gather is None else self._gather.ranks.size
        # One of a time when other nodes had the rest is not copied: they are not here for that.
        found, is_all = self.nearer.find(lambda info: info.partial is None or info.partial.size == size)
        if is_all:
            self._done.intersection_update(found)
        return found

    def _open(self) -> tuple[Repository, Lease]:
        if self._held is None:
            self.place.copy_lane.progress.moved(LEASE_SECONDS)
            lease = acquire(self.place.plain, self._holder)
            with on_failure(lease.release):
                repository = adopt_run(self.run, self.place.copies)
                begin(repository, Retention.of(self.schedule.policy).protect_days, self._report.warn)
                completed = self._gather.begin(repository) if self._gather is not None else ()
            self._held = repository, lease
            for snapshot in completed:
                self._report.warn(f"all nodes had copied {snapshot} to {self.url}, and it is committed there now")
        return self._held

    def _copy(self, found: CopySource, repository: Repository, lease: Lease, there: Sequence[SnapshotInfo]) -> None:
        began = time.monotonic()
        info = found.info
        try:
            self._make_room(found, repository, lease, [one.id for one in there])
            copied = self._transfer(found, repository)
        except CopySourceError as err:
            self._not_readable(found, err)
            return
        except (SnapshotSkippedError, SnapshotFailedError) as err:
            self._done.add(info.id)  # a node does not have it, and never will
            self._report.warn(f"{info.id} is not copied to {self.url}: {err.message}")
            return
        self._done.add(info.id)
        self.progress.sent_bytes += copied.sent_bytes
        self.progress.newest = max((*there, info), key=lambda one: (one.seq, one.id))
        self._report.emit(
            SnapshotReplicated(
                snapshot=info.id,
                step=info.step,
                tier=self.url,
                sent_bytes=copied.sent_bytes,
                copy_seconds=time.monotonic() - began,
                latency_seconds=max(0.0, time.time() - info.created),
                time=time.time(),
                encoding=self.encoding.why,
            )
        )
        self._prune(repository, lease, info.id)

    def _transfer(self, found: CopySource, repository: Repository) -> Copied:
        """Copy it as the tier stores it. Raises as `copy_snapshot`."""
        snapshot, put = found.info.id, partial(self._put, found.source, repository)
        if found.info.partial is None:
            return copy_snapshot(found.source, repository, snapshot, put=put, committing=self._guarded)
        assert self._gather is not None
        return self._gather.copy(found.source, repository, snapshot, put)

    def _not_readable(self, found: CopySource, err: CopySourceError) -> None:
        """A snapshot that is gone was forgotten meanwhile; a damaged one is not asked for again there."""
        if isinstance(err.error, StorageMissingError):
            return
        if not isinstance(err.error, FormatError):
            raise err
        url = found.source.storage.url
        self.nearer.damaged.add((url, found.info.id))
        self._report.warn(
            f"snapshot {found.info.id} is damaged at {url} and is not copied from there: {err.error.message}"
        )

    def _make_room(self, found: CopySource, repository: Repository, lease: Lease, there: Sequence[str]) -> None:
        """Nothing that is there goes for something older."""
        if isinstance(self.schedule.policy, KeepAll):
            return
        again = True
        while again:
            nbytes = self._most_bytes(found, repository)
            with self._guarded():
                newest = self.progress.newest is None or found.info.seq > self.progress.newest.seq
                done = make_room(
                    repository,
                    lease,
                    self.schedule.policy,
                    nbytes,
                    line=self.line or _NO_LINE,
                    incoming=found.info,
                    protected={} if newest else dict.fromkeys(there, "there before"),
                    in_flight=self._keeping(),
                )
            # What was to be referred to may be gone: then more has to be written.
            again = done is not None and bool(done.plan.remove) and not self.encoding.is_plain
            self._tell(done)

    def _most_bytes(self, found: CopySource, repository: Repository) -> int:
        """What copying a snapshot writes, or more: how far it can be encoded is not known before."""
        with reading_source():
            manifest, text = found.source.read_text(found.info.id)
        here = {item.name for item in repository.storage.list(names.DATA)}
        nbytes = sum(file.nbytes for file in manifest.files if file.name not in here) + len(text)
        if manifest.info.partial is not None:  # shares are equal, and what others have there is not known
            nbytes = nbytes * manifest.info.partial.size // len(manifest.info.partial.ranks)
        nbytes += more_bytes(self.config.parity, nbytes)
        return nbytes if self.encoding.is_plain else max(nbytes, plan(manifest, repository).most_bytes(text))

    def _prune(self, repository: Repository, lease: Lease, newest: str) -> None:
        """Retention after a copy, which is done: what goes wrong here is not its failure."""
        policy = self.schedule.policy
        if isinstance(policy, KeepAll):
            repository.write_catalog_if_due()
            return
        self._unpruned = True
        if self.line is None:
            return
        try:
            with self._guarded(), where_permitted(repository, self._report.warn):
                self._tell(
                    prune(repository, lease, policy, line=self.line, verified=(newest,), in_flight=self._keeping())
                )
        except CkptError as err:
            self._report.warn(f"retention failed on {self.url}, older snapshots stay there: {err.message}")
        self._unpruned = False

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """While nothing is written straight to the tier: that may take long, and is no stall of this."""
        while not self._guard.acquire(timeout=_LOOK_SECONDS):
            self.place.direct_lane.refuse_if_stuck()
            self.place.copy_lane.progress.moved()
        try:
            yield
        finally:
            self._guard.release()

    def _not_undone(self, staged: Staged, err: CkptError) -> None:
        self._report.warn(f"the data of the failed snapshot {staged.snapshot} stay at {self.url} for now: {err}")

    def _tell(self, done: Pruned | Collected | None) -> None:
        self._report.emit_all(done.events(self.url) if done is not None else ())
