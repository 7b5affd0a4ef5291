"""A further tier as one writer works on it: takes its lease, copies one snapshot at a time, keeps its retention."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckpt_engine.errors import CkptError, FormatError, StorageFullError, StorageMissingError, WaitTimeoutError
from ckpt_engine.observe.events import Event, Notice, SnapshotReplicated, SnapshotsForgotten
from ckpt_engine.persist.job import ErrorRecord, TierConfig
from ckpt_engine.persist.rhythm import Rhythm
from ckpt_engine.store import layout
from ckpt_engine.store.collect import collect, make_room, prune
from ckpt_engine.store.lease import Holder, Lease, acquire
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention import KeepAll, policy_from
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.transfer import RunText, SourceError, adopt_run, copy_snapshot, scratch_of

GUARD_SECONDS = 60.0
"""How long a snapshot written straight to the tier waits for a collection there."""


@dataclass(frozen=True, slots=True)
class Found:
    """A snapshot to copy, and the nearest place that has it."""

    info: SnapshotInfo
    source: Repository


class Tier:
    """One further tier. `advance`, `release` and `sweep` belong to one thread, the rest may be called from any.

    Args:
        config: where and how.
        storage: at `config.url`.
        holder: who asks for its lease.
        nearer: the storages of all nearer tiers, the nearest first.
        emit: takes events.
        sinks: what copies and what direct writes are put into: the same place, at its bandwidth.

    `run` MUST be set before the first `advance`.
    """

    run: RunText

    def __init__(
        self,
        config: TierConfig,
        storage: Storage,
        holder: Holder,
        nearer: Sequence[Storage],
        emit: Callable[[Event], object],
        sinks: tuple[Storage, Storage],
    ) -> None:
        self.config = config
        self.storage = storage
        self._holder = holder
        self._nearer = [Repository(one) for one in nearer]
        self._emit = emit
        self._sink, direct = sinks
        self._direct = Repository(direct)
        self._policy = policy_from(config.keep)
        self._rhythm = Rhythm(config.every_seconds, config.every_n_steps, self._policy)
        self._lease: Lease | None = None
        self._repository: Repository | None = None
        self._damaged: set[tuple[str, str]] = set()
        self._unpruned = False
        self._done: set[str] = set()
        """What was sent, or did not fit: it is not sent again when a limit removes it."""
        self._guard = threading.Lock()
        self.copying: SnapshotInfo | None = None
        self.newest: SnapshotInfo | None = None
        self.waiting: tuple[SnapshotInfo, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether its lease is ours."""
        return self._repository is not None

    def advance(self) -> bool:
        """Copy the snapshot that is wanted most; False if none is.

        Raises:
            CkptError: of the tier. What was begun is not visible there; calling again continues.
            SourceError: no nearer tier can be read now.
        """
        repository = self._open()
        assert self._lease is not None
        self._lease.check()
        there = repository.list()
        self.newest = there[-1] if there else None
        if self._unpruned and self.newest is not None:
            self._unpruned = False
            self._prune(repository, self.newest.id)
        near = self._near()
        wanted = self._rhythm.wanted([found.info for found in near.values() if found.info.id not in self._done], there)
        self.waiting = tuple(wanted)
        if not wanted:
            return False
        self.copying = wanted[0]
        try:
            self._copy(near[wanted[0].id], repository, there)
        except StorageFullError:
            if self.newest is None or wanted[0].seq > self.newest.seq:
                raise
            self._done.add(wanted[0].id)  # older ones are a luxury
        finally:
            self.copying = None
        return True

    @contextmanager
    def writing(self, nbytes: int) -> Iterator[Repository]:
        """The tier's repository, to write a snapshot of `nbytes` bytes into it that no nearer tier takes.

        Raises:
            WaitTimeoutError: it is not open, or busy for too long.
            StorageFullError: it does not fit within the limits of the tier.
            LeaseHeldError: the lease is lost.
        """
        repository, lease = self._repository, self._lease
        if repository is None or lease is None or not self._guard.acquire(timeout=GUARD_SECONDS):
            raise WaitTimeoutError(f"{self.storage.url} is not ready")
        try:
            lease.check()
            if not isinstance(self._policy, KeepAll):
                make_room(repository, lease, self._policy, nbytes, in_flight=[info.id for info in self.waiting])
            yield self._direct
            self._unpruned = True
        finally:
            self._guard.release()

    def sweep(self) -> None:
        """Remove what interrupted writes left, once the tier is open. Raises as `advance`."""
        if self._repository is not None and self._lease is not None:
            collect(self._repository, self._lease, in_flight=[info.id for info in self.waiting])

    def release(self) -> None:
        """Give back the lease; `advance` takes it again. Never raises: a tier that is away cannot be told."""
        lease, self._lease, self._repository = self._lease, None, None
        self._done.clear()
        if lease is not None:
            try:
                lease.release()
            except (CkptError, OSError) as err:
                self._say(f"the lease of {self.storage.url} could not be given back: {ErrorRecord.of(err).message}")

    def _near(self) -> dict[str, Found]:
        """All snapshots that a nearer tier has, each from the nearest that can be read."""
        found: dict[str, Found] = {}
        error: CkptError | None = None
        readable = False
        for repository in self._nearer:
            try:
                infos = repository.list()
            except CkptError as err:
                error = err
                continue
            readable = True
            for info in infos:
                if (repository.storage.url, info.id) not in self._damaged:
                    found.setdefault(info.id, Found(info, repository))
        if not readable and error is not None:
            raise SourceError(error)
        return found

    def _open(self) -> Repository:
        if self._repository is None:
            lease = acquire(self.storage, self._holder)
            try:
                self._repository = adopt_run(self.run, self.storage)
            except BaseException:
                lease.release()
                raise
            self._lease = lease
        return self._repository

    def _copy(self, found: Found, repository: Repository, there: Sequence[SnapshotInfo]) -> None:
        began = time.monotonic()
        info = found.info
        try:
            self._make_room(found, repository, [one.id for one in there])
            copied = copy_snapshot(
                found.source, repository, info.id, sink=self._sink, scratch=scratch_of(self._nearer[0].storage)
            )
        except SourceError as err:
            self._not_readable(found, err)
            return
        self._done.add(info.id)
        self.newest = max((*there, info), key=lambda one: (one.seq, one.id))
        now = time.time()
        self._emit(
            SnapshotReplicated(
                snapshot=info.id,
                step=info.step,
                tier=self.storage.url,
                sent_bytes=copied.sent_bytes,
                copy_seconds=time.monotonic() - began,
                latency_seconds=max(0.0, now - info.created),
                time=now,
            )
        )
        self._prune(repository, info.id)

    def _not_readable(self, found: Found, err: SourceError) -> None:
        """A snapshot that is gone was forgotten meanwhile; a damaged one is not asked for again there."""
        if isinstance(err.error, StorageMissingError):
            return
        if not isinstance(err.error, FormatError):
            raise err
        url = found.source.storage.url
        self._damaged.add((url, found.info.id))
        self._say(f"snapshot {found.info.id} is damaged at {url} and is not copied from there: {err.error.message}")

    def _make_room(self, found: Found, repository: Repository, there: Sequence[str]) -> None:
        """Nothing that is there goes for something older."""
        if isinstance(self._policy, KeepAll):
            return
        assert self._lease is not None
        try:
            manifest = found.source.read(found.info.id)
            text = found.source.storage.get(layout.manifest_name(found.info.id))
            nbytes = sum(file.nbytes for file in manifest.files) + len(text)
        except CkptError as err:
            raise SourceError(err) from err
        with self._guard:
            keeping = [info.id for info in self.waiting]
            newest = self.newest is None or found.info.seq > self.newest.seq
            done = make_room(
                repository,
                self._lease,
                self._policy,
                nbytes,
                incoming=found.info,
                protected={} if newest else dict.fromkeys(there, "there before"),
                in_flight=keeping,
            )
        if done is not None and done.plan.remove:
            self._emit(SnapshotsForgotten(done.plan.remove, done.collected.freed_bytes))

    def _prune(self, repository: Repository, newest: str) -> None:
        """Retention after a copy, which is done: what goes wrong here is not its failure."""
        if isinstance(self._policy, KeepAll):
            return
        assert self._lease is not None
        keeping = [info.id for info in self.waiting]
        try:
            with self._guard:
                pruned = prune(repository, self._lease, self._policy, verified=(newest,), in_flight=keeping)
        except CkptError as err:
            self._say(f"retention failed on {self.storage.url}, older snapshots stay there: {err.message}")
            return
        if pruned.plan.remove:
            self._emit(SnapshotsForgotten(pruned.plan.remove, pruned.collected.freed_bytes))

    def _say(self, message: str) -> None:
        self._emit(Notice("WARNING", message))
