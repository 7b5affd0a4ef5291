"""The trainer's link to its writer: its settings, its start in the background, its replacement, and what it gets to
know.

A writer that is being started on a thread of its own, because its lease may have to wait for another one.

What a running writer knows of the arena, and sending it what the next job refers to.

Which arena slots the writer may still need to rescue: the newest complete snapshots, until it surely has newer ones.

With a memory tier the writer makes the newest snapshot that it knows of durable when the trainer is gone. Its slot must
not change before the message of a newer one is with the kernel: a trainer killed in between would leave a slot half
overwritten, and a writer that knows of no other. Of several ranks each keeps two while it fills a third
slot: see `writer.memory_snapshots`.

What the options of a run mean for its writer.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ckpt_engine.config import Config, Tier
from ckpt_engine.copy.job import ArenaNews, ErrorRecord, History, JobDone, PersistJob, TierConfig, WriterConfig
from ckpt_engine.errors import CkptError, StorageError, WriterError
from ckpt_engine.observe.events import Event, Notice, SnapshotFailed, WriterLost
from ckpt_engine.snapshot.arena import SharedSlot
from ckpt_engine.snapshot.save_request import SaveHandle
from ckpt_engine.state.layout import StatePlan
from ckpt_engine.writer.client import Message, WriterClient, never


class Coming:
    """See `WriterClient`. Training goes on meanwhile, and its snapshots wait in the arena.

    Args:
        starting: starts the writer.
        tier: that it writes to, for events.
        arrived: hears of it, on the training thread, before anything else.
    """

    def __init__(self, starting: Starting, tier: str, arrived: Callable[[WriterClient], object]) -> None:
        self.first_seq = self.peer_port = 0
        self.history: History | None = None
        self._starting = starting
        self._tier = tier
        self._arrived = arrived
        self._lock = threading.Lock()
        self._client: WriterClient | None = None
        self._later: list[Callable[[WriterClient], object]] = []
        self._fds: list[int] = []
        self._jobs: list[PersistJob] = []
        self._failed: CkptError | None = None
        self._mail: list[Message] = []

    @property
    def alive(self) -> bool:
        return self._failed is None and (self._client is None or self._client.alive)

    def unwritten(self, timeout: float) -> str | None:
        """As `WriterClient` has it."""
        return f"waiting for {self._tier} to be opened" if self._client is None else self._client.unwritten(timeout)

    @property
    def flushed(self) -> bool:
        return self._failed is not None if self._client is None else self._client.flushed

    def meet(self, others: Mapping[str, Any]) -> None:
        self._tell(lambda client: client.meet(others))

    def describe(self, news: ArenaNews) -> None:
        with self._lock:
            if self._client is None and news.slot is not None:
                slot, fd, nbytes = news.slot
                news = replace(news, slot=(slot, self._kept(fd), nbytes))
        self._tell(lambda client: client.describe(news))

    def attach_pulse(self, fd: int) -> None:
        with self._lock:
            if self._client is None:
                fd = self._kept(fd)
        self._tell(lambda client: client.attach_pulse(fd))

    def cancel(self, snapshot: str, why: str) -> None:
        self._tell(lambda client: client.cancel(snapshot, why))

    def submit(self, job: PersistJob) -> None:
        self._give(job, lambda client: client.submit(job), durable=True)

    def hold(self, job: PersistJob) -> None:
        self._give(job, lambda client: client.hold(job), durable=False)

    def poll(self) -> list[Message]:
        """As of a client. Training thread only, like all that follows.

        Raises:
            CkptError: once: the writer did not start, for a reason that concerns more than its snapshots.
        """
        if self._client is None and self._failed is None and self._starting.done:
            self._look()
        found, self._mail = self._mail, []
        return found if self._client is None else [*found, *self._client.poll()]

    def wait(self, timeout: float) -> bool:
        if self._client is not None:
            return self._client.wait(timeout)
        self._starting.wait(timeout)
        return self._starting.done

    def drain(self, timeout: float) -> bool:
        return self._client.drain(timeout) if self._client is not None else not self._jobs

    def close(
        self, timeout: float, *, failed: bool = False, keeps: bool = False, hurries: Callable[[], bool] = never
    ) -> bool:
        if self._client is None and self._failed is None:
            self._starting.wait(timeout)
            if self._starting.done:
                self._look()
        if self._client is None:
            return self._failed is not None
        return self._client.close(timeout, failed=failed, keeps=keeps, hurries=hurries)

    def _tell(self, what: Callable[[WriterClient], object]) -> None:
        with self._lock:
            if self._client is not None:
                what(self._client)
            elif self._failed is None:
                self._later.append(what)

    def _give(self, job: PersistJob, what: Callable[[WriterClient], object], *, durable: bool) -> None:
        with self._lock:
            if self._client is not None:
                what(self._client)
                return
            if self._failed is not None:
                raise WriterError(self._failed.message)
            self._later.append(lambda client: self._hand_over(client, job, what, durable=durable))
            if durable:
                self._jobs.append(job)

    def _hand_over(
        self, client: WriterClient, job: PersistJob, what: Callable[[WriterClient], object], *, durable: bool
    ) -> None:
        try:
            what(client)
        except CkptError as err:  # it is lost again, which it says itself
            if durable:
                self._mail += self._not_taken(job, err)

    def _kept(self, fd: int) -> int:
        """A descriptor that stays open until it is sent."""
        self._fds.append(os.dup(fd))
        return self._fds[-1]

    def _look(self) -> None:
        """Take the writer that has started, and tell it everything; or fail all that waits for it."""
        try:
            client = self._starting.result()
        except CkptError as err:
            with self._lock:
                self._failed = err
                self._let_go()
            self._mail += [message for job in self._jobs for message in self._not_taken(job, err)]
            self._mail.append(WriterLost(f"no other writer starts: {err.message}"))
            if not isinstance(err, StorageError | WriterError):
                raise
            return
        self._mail += self._starting.events
        self.first_seq, self.peer_port, self.history = client.first_seq, client.peer_port, client.history
        self._arrived(client)
        with self._lock:
            for what in self._later:
                what(client)
            self._client = client
            self._let_go()

    def _let_go(self) -> None:
        self._later = []
        for fd in self._fds:
            with suppress(OSError):
                os.close(fd)
        self._fds = []

    def _not_taken(self, job: PersistJob, error: CkptError) -> list[Message]:
        record = ErrorRecord.of(error)
        failed = SnapshotFailed("", job.step, self._tier, record.code, record.message, hint=record.hint or "")
        return [failed, JobDone(job.job, None, record)]


OpenWriter = Callable[[bool, Callable[[Event], None]], WriterClient]
"""Starts a writer, with a memory tier or without; tells events to the second argument, on the calling thread."""


class Starting:
    """Begins to start a writer at once.

    Args:
        open_writer: may take as long as waiting for the lease does.
        memory: its first argument.
    """

    def __init__(self, open_writer: OpenWriter, memory: bool) -> None:
        self.events: list[Event] = []
        self._client: WriterClient | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(open_writer, memory), name="ckpt-start", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether there is a result."""
        return not self._thread.is_alive()

    def wait(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for it."""
        self._thread.join(timeout)

    def result(self) -> WriterClient:
        """The client, once `done`.

        Raises:
            CkptError: why it did not start.
        """
        if self._error is not None:
            raise self._error
        assert self._client is not None
        return self._client

    def _run(self, open_writer: OpenWriter, memory: bool) -> None:
        try:
            self._client = open_writer(memory, self.events.append)
        except Exception as err:  # noqa: BLE001 - raised on the training thread
            self._error = err


def outlives_the_trainer(client: WriterClient, emit: Callable[[Event], None]) -> bool:
    """Whether a writer can be a memory tier; else `emit` says why not."""
    from ckpt_engine.writer.launch import ThreadWriter

    if isinstance(client, ThreadWriter):
        emit(Notice("WARNING", "there is no memory tier: a writer thread ends with the trainer"))
        return False
    return True


class Handover:
    """A running writer and what it knows."""

    def __init__(self, client: WriterClient | Coming) -> None:
        self.client = client
        self._slots: set[int] = set()
        self._plan: StatePlan | None = None
        self._lock = threading.Lock()

    def announce(self, slot: SharedSlot, known: Iterable[SharedSlot], plan: StatePlan) -> None:
        """Send what the next job refers to, unless the writer knows it, and let it free what is no longer used.

        Every earlier job has been submitted by then: the fence comes before the next snapshot.
        """
        with self._lock:
            gone = self._slots - {one.index for one in known}
            is_new = slot.index not in self._slots
            self._slots = self._slots - gone | {slot.index}
            before, self._plan = self._plan, plan
            if not (gone or is_new or plan is not before):
                return
            trees = {} if before is None else before.trees
            news = ArenaNews(
                (slot.index, slot.fd, slot.nbytes) if is_new else None,
                tuple(sorted(gone)),
                None if before is not None and plan.layout is before.layout else plan.layout,
                () if plan is before else tuple(plan.trees),
                {key: tree for key, tree in plan.trees.items() if key not in trees or trees[key] is not tree},
            )
            self.client.describe(news)

    def send(self, job: PersistJob, *, durable: bool) -> None:
        """Hand over a staged snapshot.

        Raises:
            WriterError: see `WriterClient.submit`.
        """
        with self._lock:
            if durable:
                self.client.submit(job)
            else:
                self.client.hold(job)


KEPT = 1
KEPT_OF_RANKS = 2


@dataclass(frozen=True, slots=True)
class _Told:
    slot: int
    handle: SaveHandle | None
    writer: int


class Newest:
    """The slots of snapshots that the writer knows of, oldest first.

    Args:
        release: takes the slots that may change; called on the training thread.
        keep: so many of the newest may not.
    """

    def __init__(self, release: Callable[[int], None], keep: int = 1) -> None:
        self._release = release
        self.keep = keep
        self._told: deque[_Told] = deque()
        self._why: CkptError | None = None
        self.writer = 0
        """Counts the writers: those that were lost, and the one there is."""

    def tell(self, slot: int, handle: SaveHandle | None, writer: int) -> None:
        """A writer got the message of the snapshot in `slot`. Any thread, one at a time, oldest first.

        Args:
            handle: set to held once the message cannot be lost any more; None for snapshots that become durable.
            writer: which one it was; it may be lost by now.
        """
        self._told.append(_Told(slot, handle, writer))

    def settle(self, flushed: Callable[[], bool]) -> None:
        """Release what is no longer needed. Training thread only.

        Args:
            flushed: whether everything sent so far is with the kernel, and the writer alive.
        """
        if not self._told:
            return
        while self._told and self._told[0].writer != self.writer:
            self._give_up(self._told.popleft())
        # Count first: what is sent after the question is not part of the answer.
        count = len(self._told)
        waiting = [one.handle for one in list(self._told)[:count] if one.handle is not None and not one.handle.held]
        if not (waiting or count > self.keep) or not flushed():
            return
        for handle in waiting:
            handle.held = True
        for _ in range(count - self.keep):
            self._release(self._told.popleft().slot)

    def lose(self, why: CkptError) -> None:
        """The writer is gone, and with it everything it knew."""
        self._why = why
        self.writer += 1
        while self._told:
            self._give_up(self._told.popleft())

    def _give_up(self, told: _Told) -> None:
        if told.handle is not None and not told.handle.held:
            told.handle.error = self._why
        self._release(told.slot)


LEASE_WAIT_SECONDS = 60.0
DRAIN_SECONDS = 600.0
"""How long a writer whose trainer is gone, or waits no more, may go on."""
REUNION_WAIT_SECONDS = 240.0
"""Writers of dead ranks may write several shares each, and wait for each other; less than ranks wait to start."""


def writer_config(config: Config, *, memory: bool, ranks: bool) -> WriterConfig:
    """How the writer of a run works.

    Args:
        memory: whether it holds the newest snapshot in memory.
        ranks: whether it is one of several.
    """
    nearest, *further = config.tiers
    return WriterConfig(
        url=nearest.url,
        storage_options=nearest.for_storage(),
        keep=config.root_keep_rules(),
        drain_seconds=DRAIN_SECONDS + config.wait_at_end,
        end_wait_seconds=config.wait_at_end,
        lease_wait_seconds=REUNION_WAIT_SECONDS if ranks and memory else LEASE_WAIT_SECONDS,
        tiers=tuple(_tier(config, tier) for tier in further),
        fatal=nearest.on_failure == "fail",
        memory=memory,
        linger_seconds=config.linger,
        codec=nearest.codec,
    )


def _tier(config: Config, tier: Tier) -> TierConfig:
    return TierConfig(
        url=tier.url,
        storage_options=tier.for_storage(),
        keep=config.keep_rules(tier),
        every_seconds=tier.every,
        every_n_steps=tier.every_n_steps,
        bandwidth_bytes_per_second=tier.bandwidth,
        fatal=tier.on_failure == "fail",
        codec=tier.codec,
    )
