"""A further tier as one writer works on it.

It takes its lease, copies one snapshot at a time, and keeps its retention. `CopySchedule` says which one is next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from ckpt_engine.copy.add_parity import add_parity, copy_manifests, more_bytes
from ckpt_engine.copy.codec_selector import AUTO, CodecSelector, EncodeStats
from ckpt_engine.copy.encoded_copy import encoded, put_encoded
from ckpt_engine.copy.job import ErrorRecord, TierConfig
from ckpt_engine.copy.make_room import Collected, Pruned, collect, make_room, prune, where_permitted
from ckpt_engine.copy.transfer import (
    Copied,
    CopySourceError,
    RunText,
    adopt_run,
    copy_data,
    copy_snapshot,
    reading_source,
    scratch_of,
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
    StorageStalledError,
    WaitTimeoutError,
)
from ckpt_engine.observe.events import Event, SnapshotCommitted, SnapshotReplicated
from ckpt_engine.observe.reporter import Reporter
from ckpt_engine.store import names
from ckpt_engine.store.branches import branch_id
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.lease_holder import Lease, LeaseHolder
from ckpt_engine.store.manifest import RAW, Line, Manifest, SnapshotInfo
from ckpt_engine.store.protection import begin
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import KeepAll, Retention, policy_from
from ckpt_engine.store.rows import copy_rows
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.watchdog import ResponsivenessProbe, StuckCallRunner, WatchedSource
from ckpt_engine.undo import on_failure
from ckpt_engine.writer.attempts import copy_attempts
from ckpt_engine.writer.commit_of_ranks import Gather
from ckpt_engine.writer.copy_schedule import CopySchedule
from ckpt_engine.writer.primary_tier import LEASE_SECONDS

GUARD_SECONDS = 60.0
"""How long a snapshot written straight to the tier waits for a collection there."""
_LOOK_SECONDS = 1.0
_NO_LINE = Line("-")
"""Which no snapshot is of."""


@dataclass(frozen=True, slots=True)
class CopySource:
    """A snapshot to copy, and the nearest place that has it."""

    info: SnapshotInfo
    source: Repository


@dataclass(frozen=True, slots=True)
class TierStorages:
    """The storages of one tier, which are all at the same place.

    Args:
        plain: for its lease, which is renewed whatever hangs; watched for signs only, as all others are too.
        copies: for everything else that copying needs, at the tier's bandwidth; watched by the lane `copies`.
        direct: what snapshots are written to that no nearer tier takes; watched by the lane `direct`.
    """

    plain: Storage
    copies: Storage
    direct: Storage


class SecondaryTier:
    """One further tier. `advance` and `release` run in `copies` and `write` in `direct`, the rest anywhere.

    Args:
        config: where and how.
        places: at `config.url`.
        holder: who asks for its lease.
        nearer: all nearer tiers, the nearest first; watched by `copies`.
        emit: takes events.
        copies, direct: the lanes that it works in.
        signs: of life, from the place.
        gather: where nodes have roots of their own: has all of them copy what each has.

    `run` MUST be set before the first `advance`. `line` is that of the trainer, None until it has made a snapshot: so
    long nothing is removed.
    """

    run: RunText
    line: Line | None = None
    damaged: Sequence[str] = ()
    """Data files that are not referred to."""

    def __init__(
        self,
        config: TierConfig,
        places: TierStorages,
        holder: LeaseHolder,
        nearer: Sequence[WatchedSource],
        emit: Callable[[Event], object],
        copies: StuckCallRunner,
        direct: StuckCallRunner,
        signs: ResponsivenessProbe,
        gather: Gather | None = None,
    ) -> None:
        self.config = config
        self.signs = signs
        self.url = places.plain.url
        self.copies = copies
        self.direct = direct
        self.places = places
        self._holder = holder
        self._nearer = nearer
        self._report = Reporter(emit)
        self._gather = gather
        self.next_look_seconds: float | None = None
        """When to look again although nothing has happened here; None: that is of no use."""
        self._direct = Repository(places.direct)
        self._policy = policy_from(config.keep)
        self.encoding = CodecSelector(config.codec)
        self.schedule = CopySchedule(config.every_seconds, config.every_n_steps, self._policy)
        self._held: tuple[Repository, Lease] | None = None
        self._damaged: set[tuple[str, str]] = set()
        self._unpruned = self._said = self._swept = False
        self.sent_bytes = 0
        self._done: set[str] = set()
        """What was sent, or did not fit, and a nearer tier still has: it is not sent again when a limit removes it."""
        self.copied_records: dict[str, tuple[int, str]] = {}
        self._guard = threading.Lock()
        self.copying: SnapshotInfo | None = None
        self.newest: SnapshotInfo | None = None
        self.waiting: tuple[SnapshotInfo, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether its lease is ours."""
        return self._held is not None

    def advance(self) -> bool:
        """Copy the snapshot that is wanted most; False if none is. Once removes what interrupted writes left.

        Raises:
            CkptError: of the tier. What was begun is not visible there; calling again continues.
            CopySourceError: no nearer tier can be read now.
        """
        more = self._copy_newest()
        if self.config.parity is not None and self._held is not None:
            repository, lease = self._held
            copy_manifests(repository)
            add_parity(repository, self.config.parity, lease.check, self._scratch(), self.copies.progress.moved)
        if not self._swept and self._held is not None:
            self._swept = True
            with where_permitted(self._held[0], self._report.warn):
                self._tell(collect(*self._held, in_flight=[info.id for info in self.waiting]))
        return more

    def _copy_newest(self) -> bool:
        self.direct.refuse_if_stuck()
        repository, lease = self._open()
        repository.damage.files.update(self.damaged)
        self.copies.progress.moved(LEASE_SECONDS)
        lease.check()
        infos = repository.list()
        there = self._of_line(infos)
        self.newest = there[-1] if there else None
        if self._unpruned and self.newest is not None:
            self._prune(repository, lease, self.newest.id)
        near = self._near()
        self._say_what_stays([info for info in infos if info.id not in near])
        done = {*self._done, *repository.damage.snapshots}  # `ckpt scrub` mends those
        wanted = self._wanted([found.info for found in near.values() if found.info.id not in done], there)
        self.waiting = tuple(wanted)
        if not wanted:
            if self._nearer[0].usable():
                nearest = self._nearer[0].repository.storage
                copy_rows(nearest, self.places.copies, self.copied_records)
                copy_attempts(nearest, self.places.copies, self.copied_records)
            return False
        self.copying = copying = wanted[0]
        try:
            self._copy(near[copying.id], repository, lease, there)
        except StorageFullError:
            if self.line is None:
                return False  # what may go is not known yet
            if self.newest is None or copying.seq > self.newest.seq:
                raise
            self._done.add(copying.id)  # older ones are a luxury
        finally:
            if self.copying is copying:  # else it was left behind in its source, and another copy is under way
                self.copying = None
        return True

    def leave_source(self) -> str | None:
        """If `advance` hangs in a nearer tier: make it end there, and go without that one; its URL."""
        for source in self._nearer:
            if source.leave():
                self.copying = None
                return source.storage.url
        return None

    def write(self, staged: Staged) -> SnapshotCommitted:
        """Make a snapshot durable here that no nearer tier takes, as this tier stores it.

        Raises:
            WaitTimeoutError: the tier is not open, or busy for too long.
            StorageFullError: it does not fit within the limits of the tier.
            CkptError: it is not durable.
        """
        held, progress = self._held, self.direct.progress
        progress.moved(GUARD_SECONDS)
        if held is None or not self._guard.acquire(timeout=GUARD_SECONDS):
            raise WaitTimeoutError(f"{self.url} is not ready")
        try:
            progress.moved(LEASE_SECONDS)
            held[1].check()
            progress.moved()
            codec = self.config.codec  # of `auto` nothing is known of what was not copied
            plain = RawContents(staged, self._direct)
            contents = plain if codec in (RAW, AUTO) else encoded(staged, self._direct, codec)
            if not isinstance(self._policy, KeepAll):
                keeping, line = [info.id for info in self.waiting], self.line or _NO_LINE
                self._tell(
                    make_room(self._direct, held[1], self._policy, contents.new_bytes, line=line, in_flight=keeping)
                )
            kept = contents if contents.stands() else plain  # what it was to refer to may have gone for room
            committed = write_snapshot(kept, self.url, progress, partial(self._not_undone, staged))[0]
            self._unpruned = True
            return committed
        finally:
            self._guard.release()

    def release(self) -> None:
        """Give back the lease; `advance` takes it again. Never raises: an unreachable tier does not receive it."""
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

    def _of_line(self, infos: Sequence[SnapshotInfo]) -> list[SnapshotInfo]:
        """Those of the trainer's line, once that is known: what others have there is no reason to copy less."""
        return [info for info in infos if self.line is None or self.line.has(info)]

    def _wanted(self, near: Sequence[SnapshotInfo], there: Sequence[SnapshotInfo]) -> list[SnapshotInfo]:
        """What is to be copied, newest first."""
        return self.schedule.wanted(self._of_line(near), self._of_line(there))

    def _near(self) -> dict[str, CopySource]:
        """All snapshots that a nearer tier has, each from the nearest that can be read."""
        found: dict[str, CopySource] = {}
        error: CkptError | None = None
        readable = False
        for source in self._nearer:
            repository = source.repository
            if not source.usable():
                error = error or StorageStalledError(f"{repository.storage.url} hangs")
                continue
            try:
                infos = repository.list()
            except CkptError as err:
                error = err
                continue
            readable = True
            for info in infos:
                if info.partial is not None and (self._gather is None or info.partial.size != self._gather.ranks.size):
                    continue  # of a time when other nodes had the rest: they are not here to copy that
                if (repository.storage.url, info.id) not in self._damaged:
                    found.setdefault(info.id, CopySource(info, repository))
        if not readable and error is not None:
            raise CopySourceError(error)
        if error is None:
            self._done.intersection_update(found)
        return found

    def _open(self) -> tuple[Repository, Lease]:
        if self._held is None:
            self.copies.progress.moved(LEASE_SECONDS)
            lease = acquire(self.places.plain, self._holder)
            with on_failure(lease.release):
                repository = adopt_run(self.run, self.places.copies)
                begin(repository, Retention.of(self._policy).protect_days, self._report.warn)
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
        self.sent_bytes += copied.sent_bytes
        self.newest = max((*there, info), key=lambda one: (one.seq, one.id))
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

    def _put(self, source: Repository, target: Repository, manifest: Manifest) -> tuple[Manifest, Copied]:
        """See `transfer.Put`; as the tier stores it."""
        tally, pick, began = EncodeStats(), self.encoding.pick(), time.monotonic()
        if pick is None:
            stored, copied = copy_data(source, target, manifest, scratch=self._scratch())
            tally.put_bytes, tally.put_seconds = copied.sent_bytes, time.monotonic() - began
        else:
            stored, copied = put_encoded(source, target, manifest, pick, tally)
        self.encoding.done(tally)
        return stored, copied

    def _not_readable(self, found: CopySource, err: CopySourceError) -> None:
        """A snapshot that is gone was forgotten meanwhile; a damaged one is not asked for again there."""
        if isinstance(err.error, StorageMissingError):
            return
        if not isinstance(err.error, FormatError):
            raise err
        url = found.source.storage.url
        self._damaged.add((url, found.info.id))
        self._report.warn(
            f"snapshot {found.info.id} is damaged at {url} and is not copied from there: {err.error.message}"
        )

    def _make_room(self, found: CopySource, repository: Repository, lease: Lease, there: Sequence[str]) -> None:
        """Nothing that is there goes for something older."""
        if isinstance(self._policy, KeepAll):
            return
        again = True
        while again:
            nbytes = self._most_bytes(found, repository)
            with self._guarded():
                newest = self.newest is None or found.info.seq > self.newest.seq
                done = make_room(
                    repository,
                    lease,
                    self._policy,
                    nbytes,
                    line=self.line or _NO_LINE,
                    incoming=found.info,
                    protected={} if newest else dict.fromkeys(there, "there before"),
                    in_flight=[info.id for info in self.waiting],
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
        if isinstance(self._policy, KeepAll):
            repository.write_catalog_if_due()
            return
        self._unpruned = True
        if self.line is None:
            return
        keeping = [info.id for info in self.waiting]
        try:
            with self._guarded(), where_permitted(repository, self._report.warn):
                self._tell(
                    prune(repository, lease, self._policy, line=self.line, verified=(newest,), in_flight=keeping)
                )
        except CkptError as err:
            self._report.warn(f"retention failed on {self.url}, older snapshots stay there: {err.message}")
        self._unpruned = False

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """While nothing is written straight to the tier: that may take long, and is no stall of this."""
        while not self._guard.acquire(timeout=_LOOK_SECONDS):
            self.direct.refuse_if_stuck()
            self.copies.progress.moved()
        try:
            yield
        finally:
            self._guard.release()

    def _scratch(self) -> str | None:
        return next((path for one in self._nearer if one.usable() and (path := scratch_of(one.storage))), None)

    def _not_undone(self, staged: Staged, err: CkptError) -> None:
        self._report.warn(f"the data of the failed snapshot {staged.snapshot} stay at {self.url} for now: {err}")

    def _tell(self, done: Pruned | Collected | None) -> None:
        self._report.emit_all(done.events(self.url) if done is not None else ())
