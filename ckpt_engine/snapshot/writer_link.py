"""The trainer's link to its writer: settings, start in the background, replacement when it dies, messages.

What a running writer knows of the arena, and sending it what the next job refers to.

Which arena slots the writer may still need to rescue: the newest complete snapshots, until it surely has newer ones.

With a memory tier the writer makes the newest snapshot that it knows of durable when the trainer is gone. Its slot must
not change before the message of a newer one is with the kernel: a trainer killed in between would leave a slot half
overwritten, and a writer that knows of no other. Of several ranks each keeps two while it fills a third
slot: see `writer.memory_snapshots`.

What the options of a run mean for its writer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckpt_engine.config import Config
from ckpt_engine.copy.job import ErrorRecord, JobDone, PersistJob, TierConfig, WriterConfig
from ckpt_engine.errors import CkptError, ConfigError, SnapshotSkippedError, StorageError, WriterError
from ckpt_engine.observe.events import Event, Notice, SnapshotFailed, WriterLost
from ckpt_engine.snapshot.arena import Slots
from ckpt_engine.snapshot.save_request import SaveHandle
from ckpt_engine.writer.client import Message, WriterClient

OpenWriter = Callable[[bool, Callable[[Event], object]], WriterClient]
"""Starts a writer, with a memory tier or without; tells events to the second argument, on the calling thread."""
Send = Callable[[WriterClient], object]
Failed = Callable[[CkptError], object]
LEASE_WAIT_SECONDS = 60.0
DRAIN_SECONDS = 600.0
"""How long a writer whose trainer is gone, or waits no more, may go on."""
SAID_AFTER_SECONDS = 0.1
REUNION_WAIT_SECONDS = 240.0
"""Writers of dead ranks may write several shares each, and wait for each other; less than ranks wait to start."""


class Coming(Future[WriterClient]):
    """A writer that is being started on a thread of its own, at once.

    Args:
        open_writer: may take as long as waiting for the lease does.
        memory: its first argument.
    """

    def __init__(self, open_writer: OpenWriter, memory: bool) -> None:
        super().__init__()
        self.events: list[Event] = []
        threading.Thread(target=self._run, args=(open_writer, memory), name="ckpt-start", daemon=True).start()

    def _run(self, open_writer: OpenWriter, memory: bool) -> None:
        try:
            self.set_result(open_writer(memory, self.events.append))
        except Exception as err:  # noqa: BLE001 - raised on the training thread
            self.set_exception(err)

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until it has started, or cannot; whether that is so."""
        return bool(futures.wait([self], timeout).done)


def outlives_the_trainer(client: WriterClient, emit: Callable[[Event], object]) -> bool:
    """Whether a writer can be a memory tier; else `emit` says why not."""
    from ckpt_engine.writer.launch import ThreadWriter

    if isinstance(client, ThreadWriter):
        emit(Notice("WARNING", "there is no memory tier: a writer thread ends with the trainer"))
        return False
    return True


class Handover:
    """A writer, and what waits for one that is coming.

    Args:
        writer: one that is coming gets what it is given once it has started; training goes on meanwhile.
        arrived: hears of that, on the training thread, before anything is given.
    """

    def __init__(self, writer: WriterClient | Coming, arrived: Callable[[WriterClient], object]) -> None:
        self._coming = writer if isinstance(writer, Coming) else None
        self.client: WriterClient | None = None
        """None: it is coming, or does not start."""
        self._error: CkptError | None = None
        self._arrived = arrived
        self._waiting: deque[tuple[Send, Failed]] = deque()
        self._messages: list[Message] = []
        self._lock = threading.Lock()
        if not isinstance(writer, Coming):
            arrived(writer)
            self.client = writer

    def poll(self) -> list[Message]:
        """As of a client. Training thread only, like `wait` and `close`.

        Raises:
            CkptError: once: the writer did not start, for a reason that concerns more than its snapshots.
        """
        coming = self._coming
        if coming is not None and coming.done():
            self._coming = None
            client: WriterClient | None = None
            error: CkptError | None = None
            try:
                client = coming.result()
                self._messages += coming.events
                self._arrived(client)
            except Exception as err:  # noqa: BLE001 - raised below, or said
                client, error = None, err if isinstance(err, CkptError) else ErrorRecord.of(err).exception()
                self._messages.append(WriterLost(f"no other writer starts: {error.message}"))
            with self._lock:
                self.client, self._error = client, error
                while self._waiting:
                    self._send(*self._waiting.popleft())
            if error is not None and not isinstance(error, StorageError | WriterError):
                raise error
        messages, self._messages = self._messages, []
        return [*messages, *(self.client.poll() if self.client is not None else ())]

    def refusal(self, emit: Callable[[Event], object]) -> BaseException | None:
        """Why it cannot start, once that is known; None: it has started. `emit` hears at once what it says."""
        coming = self._coming
        if coming is None:
            return None
        while not coming.wait(SAID_AFTER_SECONDS):
            while coming.events:
                emit(coming.events.pop(0))
        return coming.exception()

    @property
    def flushed(self) -> bool:
        """As of a client; one that is coming has got nothing yet."""
        return self.client is not None and self.client.flushed

    @property
    def died(self) -> bool:
        """As of a client."""
        return self.client is not None and self.client.died

    def wait(self, timeout: float) -> object:
        """As of a client."""
        if self._coming is not None:
            return self._coming.wait(timeout)
        return self.client is not None and self.client.wait(timeout)

    def close(self, timeout: float, **how: Any) -> bool:
        """As of a client."""
        if self._coming is not None and self._coming.wait(timeout):
            self._messages = self.poll()
        return self.client.close(timeout, **how) if self.client is not None else self._coming is None

    def unwritten(self, timeout: float) -> str | None:
        """As of a client."""
        return "waiting for a writer to start" if self.client is None else self.client.unwritten(timeout)

    def give(self, send: Send, failed: Failed) -> None:
        """Have something sent, now or once the writer has started. Any thread; in turn.

        Args:
            failed: takes why it was not sent.
        """
        with self._lock:
            if self.client is None and self._error is None:
                self._waiting.append((send, failed))
            else:
                self._send(send, failed)

    def _send(self, send: Send, failed: Failed) -> None:
        try:
            if self._error is not None:
                raise self._error
            assert self.client is not None
            send(self.client)
        except Exception as err:  # noqa: BLE001 - whatever it is, `failed` says it
            failed(ErrorRecord.of(err).exception())


@dataclass(frozen=True, slots=True)
class _Told:
    slot: int
    handle: SaveHandle | None
    writer: int


class Newest:
    """The slots of snapshots that the writer knows of, oldest first.

    Args:
        release: takes the slots that may change; called on the training thread.
        of_ranks: of several ranks two of the newest may not, else one.
    """

    def __init__(self, release: Callable[[int], None], *, of_ranks: bool) -> None:
        self._release = release
        self.keep = 2 if of_ranks else 1
        self._told: deque[_Told] = deque()
        self._why: CkptError | None = None
        self.unsettled = False
        """Whether `settle` may find something to do."""
        self.writer = 0
        """Counts the writers: those that were lost, and the one there is."""

    def tell(self, slot: int, handle: SaveHandle | None, writer: int) -> None:
        """A writer got the message of the snapshot in `slot`. Any thread, one at a time, oldest first.

        Args:
            handle: its `held` is set once the message cannot be lost any more; None for snapshots that become durable.
            writer: which one it was; it may be lost by now.
        """
        self._told.append(_Told(slot, handle, writer))
        self.unsettled = True

    def settle(self, flushed: Callable[[], bool]) -> None:
        """Release what is no longer needed. Training thread only.

        Args:
            flushed: whether everything sent so far is with the kernel, and the writer alive.
        """
        self.unsettled = False  # before the look: `tell` may come at any time
        while self._told and self._told[0].writer != self.writer:
            self._give_up(self._told.popleft())
        # Count first: what is sent after the question is not part of the answer.
        count = len(self._told)
        waiting = [one.handle for one in list(self._told)[:count] if one.handle is not None and not one.handle.held]
        if not (waiting or count > self.keep):
            return
        if not flushed():
            self.unsettled = True
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


@dataclass(slots=True)
class InFlightJob:
    """A snapshot on its way to a writer, and then to its storage.

    Args:
        job: of the writer.
        handle: of the user.
        about: what `WriterClient.describe` takes before the job.
        memory: the writer keeps it.
        handed_on: the first writer died with it.
    """

    job: PersistJob
    handle: SaveHandle
    about: tuple[Any, ...]
    memory: bool
    handed_on: bool = False


@dataclass(eq=False)
class InFlight:
    """The snapshots that are to become durable and whose outcome is not known, and those that no writer takes.

    Where the writer dies the slots are as they were, and the next writer gets the jobs: each once, as it may be what
    the first one died of. Of several ranks the others have settled the snapshot without this one: it fails.

    Args:
        slots: of the arena.
        newest: hears of what a writer gets.
        emit: takes events, on the training thread.
        tier: how the nearest place is called in them.
        next_writer: starts one in place of one that died; None: of several ranks.
    """

    _slots: Slots
    newest: Newest
    _emit: Callable[[Event], object]
    _tier: str
    _next_writer: Callable[[], Handover] | None
    _open: dict[int, InFlightJob] = field(default_factory=dict, init=False)
    _held: set[int] = field(default_factory=set, init=False)
    unsent: dict[int, tuple[InFlightJob, CkptError, Handover | None]] = field(default_factory=dict, init=False)
    """Jobs that no writer has, by number, and why; with the writer that has not taken a complete slot."""
    failures: list[CkptError] = field(default_factory=list, init=False)
    """Background errors that have not been shown yet, oldest first."""
    ends: bool = field(default=False, init=False)
    """No other writer starts."""
    jobs: int = field(default=0, init=False)
    """How many there have been; the number of the newest one."""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, one: InFlightJob) -> None:
        """A slot is about to be filled."""
        if one.handle.durable:
            self._open[one.job.job] = one
            if one.memory:
                self._slots.retain(one.job.slot)

    def drop(self) -> None:
        """The slot of the newest job is not filled after all."""
        self._open.pop(self.jobs, None)

    def give(self, one: InFlightJob, writer: Handover) -> None:
        """Give a job whose slot is complete to a writer. Any thread."""
        told = self.newest.writer

        def send(client: WriterClient) -> None:
            client.describe(*one.about)
            (client.submit if one.handle.durable else client.hold)(one.job)
            if one.memory:
                self.newest.tell(one.job.slot, None if one.handle.durable else one.handle, told)

        writer.give(send, lambda error: self.refuse(one, error, writer))

    def refuse(self, one: InFlightJob, error: CkptError, writer: Handover | None = None) -> None:
        """No writer has the job. Any thread. `writer`: the one that has not taken the complete slot."""
        self.unsent[one.job.job] = (one, error, writer)

    def go_on(self, writer: Handover | None) -> None:
        """What is not sent goes to the next writer where its own one died, or fails. `writer`: there is."""
        for number in list(self.unsent):  # copiers add to it meanwhile
            one, error, refused = self.unsent[number]
            died = refused is not None and refused.died
            if died and refused is writer:
                continue  # it died after the last look at its messages
            del self.unsent[number]
            if died and self._may_go_on(one):
                self._hand_on(one)
            else:
                if one.memory:
                    self._slots.release(one.job.slot)  # the writer does not know of it
                self._lack(one, error)

    def settle(self, done: JobDone) -> None:
        """The outcome of a job is known."""
        one = self._open.pop(done.job, None)
        if one is None:
            return
        if done.slot_held:
            self._held.add(one.job.slot)  # a call that hangs may still read it: `SlotFreed` gives it back
        else:
            self._slots.release(one.job.slot)
        if done.error is not None:
            self._fail(one.handle, done.error.exception())
        one.handle.snapshot = done.snapshot_id

    def freed(self, slot: int) -> None:
        """A call that was hanging has ended."""
        self._slots.release(slot)
        self._held.discard(slot)

    def lose(self, lost: Sequence[JobDone]) -> None:
        """The writer died, with these jobs and with all that it knew.

        It will not become known when the slots of its hanging calls are free: others take their place.
        """
        for slot in self._held:
            self._slots.discard(slot)
        self._held.clear()
        found = [(self._open[done.job], done.error) for done in lost if done.job in self._open]
        for one, _ in found:
            if one.memory and self._may_go_on(one):
                self._slots.retain(one.job.slot)  # for the next writer, which keeps it as well
        self.newest.lose(WriterError("the writer was lost before it knew of the snapshot"))
        for one, error in found:
            if self._may_go_on(one):
                self._hand_on(one)
            elif error is not None:
                self._lack(one, error.exception())

    def _may_go_on(self, one: InFlightJob) -> bool:
        return one.handle.durable and not (one.handed_on or self.ends) and self._next_writer is not None

    def _hand_on(self, one: InFlightJob) -> None:
        assert self._next_writer is not None
        one.handed_on = True
        self._emit(Notice("INFO", f"step {one.job.step}: the next writer takes the snapshot, which is in host memory"))
        self.give(one, self._next_writer())

    def _lack(self, one: InFlightJob, error: CkptError) -> None:
        job, hint = one.job, error.hint or ""
        self._emit(SnapshotFailed(job.snapshot or "", job.step, self._tier, error.code, error.message, hint))
        if one.handle.durable:
            self.settle(JobDone(job.job, None, ErrorRecord.of(error)))
        else:
            self._fail(one.handle, error)

    def _fail(self, handle: SaveHandle, error: CkptError) -> None:
        handle.error = error
        if not isinstance(error, SnapshotSkippedError):  # another rank was busy: no failure of anything
            self.failures.append(error)


def writer_config(config: Config, *, memory: bool, ranks: bool) -> WriterConfig:
    """How the writer of a run works.

    Args:
        memory: whether it holds the newest snapshot in memory.
        ranks: whether it is one of several.

    Raises:
        ConfigError: a tier has parity, and its library is not installed.
    """
    if any(tier.parts for tier in config.tiers) and find_spec("pyeclib") is None:
        raise ConfigError("parity needs pyeclib", hint="pip install 'ckpt-engine[parity]'")
    nearest, *further = config.tiers
    return WriterConfig(
        url=nearest.url,
        storage_options=nearest.for_storage(),
        keep=config.keep_rules(config.tiers[0]),
        drain_seconds=DRAIN_SECONDS + config.wait_at_end,
        end_wait_seconds=config.wait_at_end,
        lease_wait_seconds=REUNION_WAIT_SECONDS if ranks and memory else LEASE_WAIT_SECONDS,
        tiers=tuple(
            TierConfig(
                url=tier.url,
                storage_options=tier.for_storage(),
                keep=config.keep_rules(tier),
                every_seconds=tier.every,
                every_n_steps=tier.every_n_steps,
                bandwidth_bytes_per_second=tier.bandwidth,
                fatal=tier.on_failure == "fail",
                codec=tier.codec,
                parity=tier.parts,
            )
            for tier in further
        ),
        fatal=nearest.on_failure == "fail",
        memory=memory,
        linger_seconds=config.linger,
        codec=nearest.codec,
        parity=nearest.parts,
        on={**config.on.model_dump(exclude_none=True), "folder": str(Path.cwd())} if config.on.model_fields_set else {},
    )
