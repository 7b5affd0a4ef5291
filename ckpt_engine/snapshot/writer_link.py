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

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckpt_engine.config import Config, Tier
from ckpt_engine.copy.job import ArenaNews, ErrorRecord, PersistJob, TierConfig, WriterConfig
from ckpt_engine.errors import CkptError, StorageError, WriterError
from ckpt_engine.observe.events import Event, Notice
from ckpt_engine.snapshot.arena import SharedSlot
from ckpt_engine.snapshot.save_request import SaveHandle
from ckpt_engine.state.layout import StatePlan
from ckpt_engine.writer.channel import Body, encode
from ckpt_engine.writer.client import Message, WriterClient, never

OpenWriter = Callable[[bool, Callable[[Event], None]], WriterClient]
"""Starts a writer, with a memory tier or without; tells events to the second argument, on the calling thread."""


class Coming(WriterClient):
    """Stands for a writer that is being started on a thread of its own, at once.

    Where training goes on meanwhile, its snapshots wait in the arena.

    Args:
        open_writer: may take as long as waiting for the lease does.
        memory: its first argument.
        url: of the run.
    """

    def __init__(self, open_writer: OpenWriter, memory: bool, url: str) -> None:
        super().__init__(url)
        self.news = (None,)  # that it has started is found by asking
        self.events: list[Event] = []
        self._later: list[tuple[Body, Sequence[int]]] = []
        self._client: WriterClient | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(open_writer, memory), name="ckpt-start", daemon=True)
        self._thread.start()

    def _run(self, open_writer: OpenWriter, memory: bool) -> None:
        try:
            self._client = open_writer(memory, self.events.append)
        except Exception as err:  # noqa: BLE001 - raised on the training thread
            self._error = err

    @property
    def started(self) -> bool:
        """Whether there is a result."""
        return not self._thread.is_alive()

    def result(self) -> WriterClient:
        """The client, once it has `started`.

        Raises:
            CkptError: why it did not start.
        """
        if self._error is not None:
            raise self._error
        assert self._client is not None
        return self._client

    def wait(self, timeout: float) -> bool:
        self._thread.join(timeout)
        return self.started

    def unwritten(self, timeout: float) -> str | None:  # noqa: ARG002
        return f"waiting for {self._url} to be opened"

    @property
    def flushed(self) -> bool:
        return not self.alive

    @property
    def _goes_on_with_copies(self) -> str:
        return "the writer goes on with it, and then the next run does"

    def close(
        self,
        timeout: float,
        *,
        failed: bool = False,  # noqa: ARG002 - it has nothing
        keeps: bool = False,  # noqa: ARG002
        hurries: Callable[[bool], bool] = never,  # noqa: ARG002
    ) -> bool:
        self.wait(timeout)
        return not self.alive

    def _send(self, body: Body, fds: Sequence[int] = ()) -> None:
        encode(body)  # what is no JSON is refused now
        self._later.append((body, tuple(os.dup(fd) for fd in fds)))

    def hand_over(self, client: WriterClient) -> None:
        """The writer has started: it gets everything, and its outcomes come from `client`."""
        client.take_over(self._mailbox.given_up(), self._later)
        self._let_go()

    def fail(self, error: CkptError) -> None:
        """It does not start: everything that it was sent fails."""
        self._mailbox.lose(ErrorRecord.of(error), expected=False, text=f"no other writer starts: {error.message}")
        self._let_go()

    def _let_go(self) -> None:
        for fd in [fd for _, fds in self._later for fd in fds]:
            with suppress(OSError):
                os.close(fd)
        self._later = []


def outlives_the_trainer(client: WriterClient, emit: Callable[[Event], None]) -> bool:
    """Whether a writer can be a memory tier; else `emit` says why not."""
    from ckpt_engine.writer.launch import ThreadWriter

    if isinstance(client, ThreadWriter):
        emit(Notice("WARNING", "there is no memory tier: a writer thread ends with the trainer"))
        return False
    return True


class Handover:
    """A writer and what it knows.

    Args:
        client: may be `Coming`: then the writer takes its place once it has started.
        arrived: hears of that, on the training thread, before anything is sent.
    """

    def __init__(self, client: WriterClient, arrived: Callable[[WriterClient], object]) -> None:
        self.client = client
        self._arrived = arrived
        self._events: list[Event] = []
        self._slots: set[int] = set()
        self._plan: StatePlan | None = None
        self._lock = threading.Lock()

    def poll(self) -> list[Message]:
        """As of a client. Training thread only, like `close`.

        Raises:
            CkptError: once: the writer did not start, for a reason that concerns more than its snapshots.
        """
        if isinstance(self.client, Coming):
            self._look(self.client)
        found, self._events = self._events, []
        return [*found, *self.client.poll()]

    def close(self, timeout: float, **how: Any) -> bool:
        """As of a client."""
        if isinstance(self.client, Coming):
            self.client.wait(timeout)
            self._look(self.client)
        return self.client.close(timeout, **how)

    def _look(self, coming: Coming) -> None:
        if not (coming.alive and coming.started):
            return
        try:
            client = coming.result()
        except CkptError as err:
            with self._lock:
                coming.fail(err)
            if not isinstance(err, StorageError | WriterError):
                raise
            return
        self._events = coming.events
        self._arrived(client)
        with self._lock:
            coming.hand_over(client)
            self.client = client

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
        keep=config.keep_rules(config.tiers[0]),
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
