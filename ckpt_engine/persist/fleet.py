"""All further tiers of one writer: their threads, what they need of the nearest tier, and their status."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckpt_engine.errors import CkptError, FormatError, StorageMissingError, WriterError
from ckpt_engine.observe.events import Event, Notice, TierDegraded, TierRecovered
from ckpt_engine.persist.job import ErrorRecord, TierConfig, WriterConfig
from ckpt_engine.persist.replicate import BACKOFF, Gate, Replicator
from ckpt_engine.persist.status import AWAY, WORKING, StatusFile, TierStatus
from ckpt_engine.persist.tier import Tier
from ckpt_engine.store.lease import Holder
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.store.storage.open import open_storage
from ckpt_engine.store.throttle import Throttle, paced
from ckpt_engine.store.transfer import RunText, adopt_run

SURVEY_SECONDS = 20.0
"""How long a writer waits at its start to hear what further tiers have."""
UNKNOWN_SEQ_GAP = 100_000
"""Numbers left out for the snapshots that a tier may have which does not answer at the start."""
_END_SECONDS = 2.0


class Fleet:
    """The further tiers. Every method returns at once unless it says otherwise; none lets a tier's failure out.

    Args:
        config: of the writer; with tiers.
        nearest: the storage of `config.url`.
        emit: takes events; called from several threads.

    Raises:
        StorageError: a URL that no storage serves. Nothing is touched yet.
        WriterError: a retention that is impossible.
    """

    run: RunText
    """Of the run, from `join_run` on."""

    def __init__(
        self,
        config: WriterConfig,
        nearest: Storage,
        holder: Holder,
        emit: Callable[[Event], object],
    ) -> None:
        self._emit = emit
        self._nearest = nearest
        self._storages = [open_storage(tier.url, tier.storage_options) for tier in config.tiers]
        self._changed = threading.Condition()
        self._primary = TierStatus(nearest.url, WORKING, since=time.time())
        self._primary_away_from = 0.0
        self._file = StatusFile(nearest.root, holder.pid, holder.host) if isinstance(nearest, LocalStorage) else None
        self._file_lock = threading.Lock()
        self._file_failed = False
        self._started = self._stopping = False
        self._surveys: list[Survey] = []
        self._replicators: list[Replicator] = []
        for number, tier in enumerate(config.tiers):
            nearer = [nearest, *self._storages[:number]]
            self._replicators.append(self._replicator(tier, self._storages[number], nearer, holder))

    def _replicator(
        self, config: TierConfig, storage: Storage, nearer: Sequence[Storage], holder: Holder
    ) -> Replicator:
        limit = config.bandwidth_bytes_per_second
        throttle = Throttle(limit) if limit is not None else None
        gate = Gate(throttle)
        # Storages of their own: what a copy is told to do, direct writes are not.
        copies, direct = (open_storage(config.url, config.storage_options) for _ in range(2))
        sinks = paced(copies, gate, gate.pause), paced(direct, throttle) if throttle else direct
        try:
            tier = Tier(config, storage, holder, nearer, lambda event: replicator.take(event), sinks)
        except (ValueError, TypeError) as err:
            raise WriterError(f"cannot apply the retention {dict(config.keep)}: {err}") from err
        replicator = Replicator(tier, gate, self._emit, self._note, BACKOFF)
        return replicator

    def join_run(self, repository: Repository, timeout: float = SURVEY_SECONDS) -> Repository:
        """Before anything is written: make the nearest tier a place of the run that further tiers hold.

        Where it has snapshots already it is one. Otherwise this waits at most `timeout` seconds for tiers to answer.
        Needs the lease of the nearest tier.

        Raises:
            ForeignError, CorruptError, NewerFormatError, StorageError: of the nearest tier.
        """
        if not repository.ids():
            self._surveys = survey(self._storages, timeout)
            held = next((one.run for one in self._surveys if one.run is not None and one.next_seq > 1), None)
            if held is not None:
                repository = adopt_run(held, repository.storage)
        repository.create_if_absent()
        self.run = RunText.of(repository)
        for replicator in self._replicators:
            replicator.tier.run = self.run
        return repository

    def next_seq(self, timeout: float = SURVEY_SECONDS) -> int:
        """A number that no snapshot of a further tier reaches. Waits at most `timeout` seconds for them to answer."""
        found = self._surveys or survey(self._storages, timeout)
        self._surveys = []
        seq = max(one.next_seq for one in found)
        return seq if all(one.answered for one in found) else seq + UNKNOWN_SEQ_GAP

    def start(self) -> None:
        """Begin to copy; after `join_run`."""
        self._started = True
        for replicator in self._replicators:
            replicator.start()

    def committed(self, snapshot: str | None) -> None:
        """The nearest tier has a new snapshot; None: a further tier has it instead."""
        if snapshot is not None:
            self._primary_worked(snapshot)
        for replicator in self._replicators:
            replicator.wake()
        self._note()

    def protected(self) -> Mapping[str, str]:
        """Snapshots that retention of the nearest tier leaves alone for a moment: they are being copied."""
        copying = [(one.tier.copying, one.tier.storage.url) for one in self._replicators]
        return {info.id: f"being copied to {url}" for info, url in copying if info is not None}

    def gone(self, snapshots: Sequence[str]) -> None:
        """The nearest tier had to make room: copies from what was removed stop."""
        for replicator in self._replicators:
            replicator.drop(snapshots)

    def primary_failed(self, error: BaseException) -> None:
        """The nearest tier did not take a snapshot."""
        record = ErrorRecord.of(error)
        if self._primary.state == WORKING:
            self._primary_away_from = time.monotonic()
        if self._primary.code != record.code:
            self._emit(TierDegraded(self._nearest.url, record.code, record.message))
        self._primary = TierStatus(
            self._nearest.url,
            AWAY,
            newest=self._primary.newest,
            code=record.code,
            message=record.message,
            since=time.time() if self._primary.state == WORKING else self._primary.since,
        )
        self._note()

    def _primary_worked(self, snapshot: str) -> None:
        was_away = self._primary.state == AWAY
        since = time.time() if was_away else self._primary.since
        self._primary = TierStatus(self._nearest.url, WORKING, newest=snapshot, since=since)
        if was_away:
            self._emit(TierRecovered(self._nearest.url, time.monotonic() - self._primary_away_from))

    def working(self) -> Iterator[Replicator]:
        """The further tiers that may take a snapshot instead of the nearest one, nearest first."""
        return (replicator for replicator in self._replicators if replicator.works)

    def drain(self, timeout: float, settled: Callable[[Sequence[str]], object]) -> None:
        """Wait at most `timeout` seconds until every tier has what it wants, then end. Idempotent.

        Args:
            settled: called once, as soon as every tier has what it wants or has failed in its last attempt; told the
                URLs of the latter.
        """
        deadline = time.monotonic() + timeout
        if self._started:
            for replicator in self._replicators:
                replicator.finish()
            self._wait(lambda: all(one.settled for one in self._replicators), deadline)
        settled([one.tier.storage.url for one in self._replicators if not one.idle])
        if self._started:
            self._wait(lambda: all(one.idle or one.ended or one.hopeless for one in self._replicators), deadline)
        self.stop()
        end = time.monotonic() + _END_SECONDS
        for replicator in self._replicators if self._started else ():
            replicator.join(max(0.0, end - time.monotonic()))
        self._write_status(ended=True)

    def stop(self) -> None:
        """End all copies, as they are."""
        self._stopping = True
        for replicator in self._replicators:
            replicator.stop()
        with self._changed:
            self._changed.notify_all()

    def _wait(self, done: Callable[[], bool], deadline: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or done(), max(0.0, deadline - time.monotonic()))

    def status(self) -> list[TierStatus]:
        """All tiers, nearest first."""
        return [self._primary, *(replicator.status() for replicator in self._replicators)]

    def _note(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self._write_status(ended=False)

    def _write_status(self, *, ended: bool) -> None:
        if self._file is None:
            return
        with self._file_lock:
            try:
                self._file.write(self.status(), ended=ended)
                self._file_failed = False
            except OSError as err:
                if not self._file_failed:
                    self._file_failed = True
                    self._emit(Notice("WARNING", f"the status for `ckpt status` cannot be written: {err}"))


@dataclass(slots=True)
class Survey:
    """What a tier had to say at the start. `answered` is False until it has said everything."""

    storage: Storage
    run: RunText | None = None
    next_seq: int = 1
    answered: bool = False


def survey(storages: Sequence[Storage], timeout: float) -> list[Survey]:
    """Ask all storages at once which run and which snapshots they have; wait at most `timeout` seconds for them."""
    found = [Survey(storage) for storage in storages]
    threads = [threading.Thread(target=_ask, args=(one,), name="ckpt-survey", daemon=True) for one in found]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return found


def _ask(one: Survey) -> None:
    repository = Repository(one.storage)
    run: RunText | None = None
    try:
        with suppress(FormatError, StorageMissingError):  # such a tier is complained about when it is opened
            run = RunText.of(repository)
        next_seq = repository.next_seq()
    except CkptError:
        return  # as above
    one.run, one.next_seq, one.answered = run, next_seq, True
