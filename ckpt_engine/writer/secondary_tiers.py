"""All further tiers of one writer.

They are asked at the start what they know of the run, and each has a thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ckpt_engine.copy.job import WriterConfig
from ckpt_engine.copy.transfer import RunText, adopt_run
from ckpt_engine.errors import (
    CkptError,
    FormatError,
    StorageMissingError,
)
from ckpt_engine.observe.events import Event, Notice
from ckpt_engine.store.lease_holder import LeaseHolder
from ckpt_engine.store.manifest import Line
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.base import Storage, Throttle, metered
from ckpt_engine.store.storage.retries import ask_apart
from ckpt_engine.store.storage.watchdog import (
    CallProgress,
    ResponsivenessProbe,
    StuckCallRunner,
    WatchedSource,
    WatchedStorage,
)
from ckpt_engine.writer.commit_of_ranks import Gather
from ckpt_engine.writer.copy_target import NearerTiers, TierPlace
from ckpt_engine.writer.node_member_tier import NodeMemberTier
from ckpt_engine.writer.replicate import RECENT_SECONDS, CopyThrottle, Replicator
from ckpt_engine.writer.run_records import StatusWriter, TierHealth, TierStatus, Unfinished
from ckpt_engine.writer.secondary_tier import SecondaryTier

TELL_SECONDS = 3.0
"""A longer wait of the trainer is said."""
SURVEY_SECONDS = 20.0
"""How long a writer waits at its start to hear what further tiers have."""
UNKNOWN_SEQ_GAP = 100_000
"""Numbers left out for the snapshots that a tier may have which does not answer at the start."""
_END_SECONDS = 2.0
_LOOK_SECONDS = 0.25
"""A tier that gives no sign does not say so."""
_REMEMBERED = 1000


class SecondaryTiers:
    """The further tiers, perhaps none. Every method returns at once unless it says otherwise.

    None lets a tier's failure out.

    Args:
        config: of the writer.
        emit: takes events; called from several threads.
    """

    def __init__(self, config: WriterConfig, emit: Callable[[Event], object]) -> None:
        self._emit = emit
        self._config = config
        self._changed = threading.Condition()
        self._newest: str | None = None
        """At the nearest tier, of what this writer has made."""
        self._primary_lacks: list[str] = []
        self._stopping = self._finishing = False
        self._surveys: list[Future[Survey | None]] = []
        self.replicators: list[Replicator] = []
        """One for each tier, from `open` on."""

    def place(self, nearest: Storage, holder: LeaseHolder) -> None:
        """Before all else but `finish` and `stop`: where the nearest tier is, and who asks for leases."""
        self._nearest = nearest
        self._holder = holder
        self._primary = TierHealth(nearest.url, self._emit)
        self._status = StatusWriter(nearest, holder, self.status, self._emit)

    def open(self) -> None:
        """Make what works on each tier; libraries of object stores are slow to import.

        Raises:
            StorageError: a URL that no storage serves, or a library that cannot be imported. Nothing is touched yet.
        """
        self.replicators = [self._replicator(number) for number in range(len(self._config.tiers))]

    @property
    def _follows(self) -> bool:
        """Whether rank 0's writer has asked the tiers for this one."""
        return self._config.ranks.rank != 0

    def _replicator(self, number: int) -> Replicator:
        config = self._config.tiers[number]
        limit = config.bandwidth_bytes_per_second
        throttle = Throttle(limit) if limit is not None else None
        url = self._open(number).url
        signs = ResponsivenessProbe()
        copies = StuckCallRunner(url, keeps=False)
        direct = StuckCallRunner(url, ended=lambda: replicator.wake())
        gate = CopyThrottle(throttle)
        # Storages of their own: what stops a copy does not stop direct writes.
        written = metered(self._open(number), lambda meter: CopyThrottle(throttle) if throttle is not None else meter)
        place = TierPlace(
            WatchedStorage(self._open(number), signs),
            WatchedStorage(WatchedStorage(metered(self._open(number), lambda _: gate), copies.progress), signs),
            Repository(WatchedStorage(written, direct.progress)),
            copies,
            direct,
            signs,
        )
        nearest = open_storage(self._config.url, self._config.storage_options)
        nearer = NearerTiers(
            [WatchedSource(one, copies.progress) for one in (nearest, *map(self._open, range(number)))]
        )
        tier = (
            NodeMemberTier(config, place, nearer, self._config.ranks)
            if self._follows
            else SecondaryTier(config, place, nearer, self._holder, self._emit, self._gather(gate, copies.progress))
        )
        replicator = Replicator(tier, gate, self._emit, self._note)  # `direct` refers to it
        return replicator

    def _gather(self, gate: CopyThrottle, progress: CallProgress) -> Gather | None:
        ranks = self._config.ranks
        if not ranks.places:
            return None

        def pause(seconds: float) -> None:
            progress.moved(seconds)
            gate.pause(seconds)

        return Gather(ranks, pause)

    def _open(self, number: int) -> Storage:
        tier = self._config.tiers[number]
        return open_storage(tier.url, tier.storage_options)

    def survey(self, *, say: bool = False, needed: bool = True) -> None:
        """Hear which run and which snapshots the tiers have, once. Waits at most `SURVEY_SECONDS` for all of them.

        Args:
            say: the trainer waits, too: say so if it takes long.
            needed: the run is not known yet. Otherwise, and after `finish`, tiers that give no sign are left out.
        """
        if self._surveys or self._follows:
            return
        places = [replicator.tier.place.plain for replicator in self.replicators]
        self._surveys = [ask_apart(partial(surveyed, place), "ckpt-survey") for place in places]
        for survey in self._surveys:
            survey.add_done_callback(lambda _: self._look())

        def late() -> list[Replicator]:
            return [of for one, of in zip(self._surveys, self.replicators, strict=True) if not one.done()]

        def enough() -> bool:
            return not late() or ((self._finishing or not needed) and all(one.silent for one in late()))

        began = time.monotonic()
        self._wait(enough, began + TELL_SECONDS)
        if say and not enough():
            urls = ", ".join(one.tier.url for one in late())
            text = f"waiting for {urls} to say which run this is, up to {SURVEY_SECONDS:.0f} s"
            self._emit(Notice("WARNING", f"{text}: {self._nearest.url} is empty"))
        self._wait(enough, began + SURVEY_SECONDS)

    def _heard(self) -> list[Survey]:
        """What the tiers have said by now that have answered the survey."""
        return [found for one in self._surveys if one.done() and (found := one.result()) is not None]

    def join_run(self, repository: Repository, *, say: bool = False) -> Repository:
        """Before anything is written: make the nearest tier a place of the run that further tiers hold.

        Where it has snapshots already it is one. Otherwise this is what `survey` has found, which waits for that. Needs
        the lease of the nearest tier.

        Args:
            say: as of `survey`.

        Raises:
            ForeignError, CorruptError, NewerFormatError, StorageError: of the nearest tier.
        """
        if not repository.ids():
            self.survey(say=say)
            known = [one.run for one in self._heard() if one.next_seq > 1 and one.run is not None]
            if known:
                repository = adopt_run(known[0], repository.storage)
        repository.create_if_absent()
        run = RunText.of(repository)
        for replicator in self.replicators:
            replicator.tier.run = run
        return repository

    def next_seq(self) -> int:
        """A number that no snapshot of a further tier reaches. Waits as `survey` does, where no run has to be found."""
        self.survey(needed=False)
        found = self._heard()
        seq = max((one.next_seq for one in found), default=1)
        return seq if len(found) == len(self._surveys) else seq + UNKNOWN_SEQ_GAP

    def finish(self) -> None:
        """The trainer is about to end."""
        self._finishing = True
        self._look()

    def start(self) -> None:
        """Begin to copy; after `join_run`."""
        for replicator in self.replicators:
            replicator.start()
        if self._stopping:
            self.stop()

    def learn(self, line: Line, damaged: Sequence[str], seconds: float | None) -> None:
        """What the trainer makes is of this line, and its cadence wants copies so far apart; None: it does not know.

        Args:
            damaged: data files that are not referred to.
        """
        for replicator in self.replicators:
            replicator.tier.line = line
            replicator.tier.damaged = damaged
            replicator.tier.schedule = replicator.tier.schedule.paced(seconds)

    def committed(self, snapshot: str) -> None:
        """The nearest tier has a new snapshot."""
        self._newest = snapshot
        self._primary_lacks.clear()
        self._primary.worked()
        self._wake()

    def committed_elsewhere(self, snapshot: str) -> None:
        """A further tier has a new snapshot, which the nearest one does not have."""
        self._primary_lacks.append(snapshot)
        del self._primary_lacks[:-_REMEMBERED]
        self._wake()

    def _wake(self) -> None:
        for replicator in self.replicators:
            replicator.wake()
        self._note()

    def protected(self) -> Mapping[str, str]:
        """Snapshots that retention of the nearest tier leaves alone for a moment: they are being copied, or what is
        copied next is stored as the difference to them.
        """
        tiers = [one.tier for one in self.replicators]
        bases = {
            newest.id: f"the next copy to {tier.url} is made against it"
            for tier in tiers
            if tier.encoding.needs_bases and (newest := tier.progress.newest) is not None
        }
        copying = [(tier.progress.copying, tier.url) for tier in tiers]
        return bases | {info.id: f"being copied to {url}" for info, url in copying if info is not None}

    def gone(self, snapshots: Sequence[str]) -> None:
        """The nearest tier had to make room: copies from what was removed stop."""
        for replicator in self.replicators:
            replicator.drop(snapshots)

    def primary_failed(self, error: BaseException) -> None:
        """The nearest tier did not take a snapshot."""
        self._primary.failed(error)
        self._note()

    def working(self) -> Iterator[Replicator]:
        """The further tiers that may take a snapshot instead of the nearest one: the nearest first, but those that
        seem to hang last.
        """
        for hanging in (False, True):
            for replicator in self.replicators:
                if replicator.works and replicator.health.hangs == hanging:
                    yield replicator

    def drain(
        self,
        timeout: float,
        nearest_hangs: bool,
        settled: Callable[[Sequence[Unfinished]], object],
        waits: Callable[[Sequence[Unfinished]], object],
    ) -> None:
        """After `start`: wait at most `timeout` seconds until every tier has what it wants, then end. Idempotent.

        Args:
            nearest_hangs: whether the nearest tier is one that does not have everything.
            settled: called once, when the trainer need not wait any more: every tier has what it wants, has failed in
                its last attempt, or gives no sign, or `end_wait_seconds` are over; with those that lack something.
            waits: called once if that takes long, and the tiers that it waits for make progress; with these.
        """
        deadline = time.monotonic() + timeout
        for replicator in self.replicators:
            replicator.finish()
        self._wait_for_the_end(min(deadline, time.monotonic() + self._config.end_wait_seconds), waits)
        left = [one.unfinished(self._newest) for one in self.replicators if not one.idle]
        if nearest_hangs:
            left.insert(0, Unfinished(self._nearest.url, tuple(self._primary_lacks), "it hangs"))
        settled(left)
        self._wait(lambda: all(one.idle or one.ended or one.hopeless for one in self.replicators), deadline)
        self.stop()
        end = time.monotonic() + _END_SECONDS
        for replicator in self.replicators:
            replicator.join(max(0.0, end - time.monotonic()))
        self._status.end(_END_SECONDS)

    def _wait_for_the_end(self, deadline: float, waits: Callable[[Sequence[Unfinished]], object]) -> None:
        def left() -> list[Replicator]:
            return [one for one in self.replicators if not (one.settled or one.silent)]

        self._wait(lambda: not left(), min(deadline, time.monotonic() + TELL_SECONDS))
        # One that has just stopped answering is left soon, and the end says that.
        self._wait(
            lambda: not left() or any(one.tier.place.signs.silent_seconds < RECENT_SECONDS for one in left()), deadline
        )
        late = [one.unfinished(self._newest) for one in left()]
        if late and time.monotonic() < deadline:
            waits(late)
            self._wait(lambda: not left(), deadline)

    def stop(self) -> None:
        """End all copies, as they are."""
        self._stopping = True
        for replicator in self.replicators:
            replicator.stop()
        self._look()

    def _wait(self, done: Callable[[], bool], deadline: float) -> None:
        with self._changed:
            while not (self._stopping or done()) and (left := deadline - time.monotonic()) > 0.0:
                self._changed.wait(min(left, _LOOK_SECONDS))

    def status(self) -> list[TierStatus]:
        """All tiers, nearest first."""
        return [self._primary.status(newest=self._newest), *(replicator.status() for replicator in self.replicators)]

    def _look(self) -> None:
        """Have those who wait look whether they still have to."""
        with self._changed:
            self._changed.notify_all()

    def _note(self) -> None:
        self._look()
        if self.replicators:
            self._status.note()


@dataclass(frozen=True, slots=True)
class Survey:
    """What a tier has at the start: its run, if there is one, and a number that no snapshot reaches."""

    run: RunText | None
    next_seq: int


def surveyed(storage: Storage) -> Survey | None:
    """Ask a tier. None: it fails, which is complained about when it is opened."""
    repository = Repository(storage)
    run: RunText | None = None
    with suppress(CkptError):
        with suppress(FormatError, StorageMissingError):
            run = RunText.of(repository)
        return Survey(run, repository.next_seq())
    return None
