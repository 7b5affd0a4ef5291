"""Does the jobs of the trainer one after another on one thread of the writer.

It makes the parts of the writer that its settings ask for: nearest tier, further tiers, replicas, parity.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ckpt_engine.copy.job import Started, WriterConfig
from ckpt_engine.errors import CkptError
from ckpt_engine.observe.events import CLOSED, FAILED, GONE, MemoryFlushed, Notice
from ckpt_engine.writer import channel
from ckpt_engine.writer.hooks import Hooks
from ckpt_engine.writer.memory_rescue import MemoryRescue, TrainerLife
from ckpt_engine.writer.memory_snapshots import Ids, MemorySnapshots, MessageDecoder, StagedJob
from ckpt_engine.writer.messages import Body, Kind
from ckpt_engine.writer.persister import Emit, Persister

if TYPE_CHECKING:
    from ckpt_engine.writer.peers import Peers

_IDLE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _QueueItem:
    """Work that waits, for an order or for none. `flush`: it is only in memory, and its outcome is not reported."""

    work: Callable[[], object]
    order: StagedJob | None = None
    flush: bool = False


class JobQueue(threading.Thread):
    """Opens a persister, lets it do the jobs in order, and closes it.

    `put`, `flush`, `finish`, `abandon` and `skip_waiting` may be called from any thread and never wait. The queue is
    bounded by the arena: a trainer sends no job without a free slot. What is only in memory queues when it is
    to be flushed, else never: the newest replaces the rest.

    Args:
        emit: takes the messages to the trainer, on any thread; answers `start` with `started` or `refused`.
        on_exit: called once on this thread, last; with the text of the error if that broke down.
        on_open: called once on this thread when the lease is taken, before `started` is sent.
        on_news: called, on any thread, when what is offered from memory may have changed.
        caught_up: waits until everything that the trainer has sent so far was put; whether that is so.

    `opened` says whether the lease was taken, `ended` whether the persister is closed.
    """

    def __init__(
        self,
        config: WriterConfig,
        emit: Emit,
        on_exit: Callable[[str | None], None],
        on_open: Callable[[], object] = lambda: None,
        on_news: Callable[[], object] = lambda: None,
        caught_up: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(name="ckpt-writer", daemon=True)
        self._hooks = Hooks(config, emit)
        self._on_exit = on_exit
        self._on_open = on_open
        self._intake = MessageDecoder()
        ids = Ids()
        self.held = MemorySnapshots(ids, on_news, config.ranks)
        self.persister = Persister(config, partial(self.held.recent.forward, self._hooks.emit), ids)
        self._todo: deque[_QueueItem] = deque()
        self._at_hand: StagedJob | None = None
        self._broken: str | None = None
        self._changed = threading.Condition()
        self.rescue = MemoryRescue(self.held, self.persister, self._changed, caught_up)
        self._finishing = self.opened = self.ended = False
        self.peers = self._open_peers()

    def _open_peers(self) -> Peers | None:
        config = self.persister.config
        if not (config.ranks.mirrors and config.memory):
            return None
        from ckpt_engine.writer.peers import Peers

        return Peers(
            config.ranks,
            lambda: self.persister.primary.run if self.opened else None,
            lambda order: self.rescue.caught_up() and self.held.intact(order),
            self._hooks.emit,
        )

    def put(self, body: Body, fds: Sequence[int] = ()) -> None:
        """Take a message; `fds` are owned from now on. One that is not of the protocol breaks the writer down."""
        with self._changed:
            if self.ended:
                channel.close_all(fds)
                return
            try:
                self._take(body, fds)
            except Exception:  # noqa: BLE001 - reported to the trainer, which starts a new writer
                self._broken = traceback.format_exc()
                self._todo.clear()
                self._finishing = True
            self._changed.notify()

    def _take(self, body: Body, fds: Sequence[int]) -> None:
        match body["kind"]:
            case Kind.PULSE:
                self.held.take_pulse(fds[0])
            case Kind.ROWS:
                self.persister.rows.attach(body, fds[0])
            case Kind.PARTNER:
                if self.peers is not None:
                    self.peers.meet(body)
            case Kind.CANCEL:
                self._todo.append(_QueueItem(partial(self.persister.cancel, body["snapshot"], body["why"])))
            case kind:
                order = self._intake.take(body, fds)
                if order is None:
                    return
                self.held.pace = order.job.pace
                # At once, not in the queue: the trainer fills the slot of the one before as soon as this was sent.
                if self.persister.config.memory and order.problem is None:
                    self.held.hold(order)
                    if self.peers is not None:
                        self.peers.offer(order)
                if kind == Kind.PERSIST:
                    self._todo.append(_QueueItem(partial(self.persister.persist, order), order))
                elif order.problem is not None:
                    text = f"step {order.job.step} is not kept in memory: {order.problem}"
                    self._hooks.emit(channel.event(Notice("WARNING", text)))

    def flush(self) -> int | None:
        """Let the newest snapshot in memory become durable although the trainer lives; its step, None: there is none.

        It waits for its turn like a job, so that numbers stay in order. A newer one that comes meanwhile is what the
        trainer wants by then, and this one is left. Of several ranks the writers of all must be asked, within the
        patience of a recovery: what becomes durable is the newest snapshot that all of them hold.
        """
        with self._changed:
            newest = self.held.newest
            if newest is None:
                return None
            coming = newest is self._at_hand or any(turn.order is newest for turn in self._todo)
            if not newest.durable and not coming and not self._finishing:
                self._todo.append(_QueueItem(partial(self.rescue.flush, newest), newest, flush=True))
                self._changed.notify()
            return newest.job.step

    def finish(self, *, failed: bool = False, why: str | None = None) -> None:
        """Exit after what is queued, and after what is in memory has become durable.

        Args:
            failed: the trainer ends because of an error.
            why: see `Hooks.why`.
        """
        self._hooks.why = why
        self._hooks.ending = FAILED if failed else CLOSED
        self.persister.finish()
        with self._changed:
            self._finishing = True
            self._changed.notify()

    def abandon(self, ending: str, why: str | None = None) -> None:
        """The trainer is gone, and everything it sent was put: exit after what is needed to lose nothing.

        With memory that is the job at hand and the newest one; else all of them.

        Args:
            ending: how, one of `events.ENDS`. If it has said so (not `GONE`), nothing is kept where its newest share
                is written, and then committed.
            why: see `Hooks.why`.
        """
        self._hooks.why = why
        self._hooks.ending = ending
        with self._changed:
            newest = self.held.newest
            is_written = ending != GONE and newest is not None and newest.durable
            if newest is not None:
                # They are older, and given no numbers any more: the highest number is that of the newest.
                self._todo = deque(one for one in self._todo if one.order is newest)
            self._intake.close()  # memory that no order needs
            self.rescue.trainer = TrainerLife.WRITTEN if is_written else TrainerLife.GONE
            self._finishing = True
            self.persister.leave_alone()
            self._changed.notify()
        if self.persister.config.memory:
            self.held.seal(self.persister.primary.run)

    def disown(self) -> None:
        """The trainer has hung up and lives: exit after what is queued. What is in memory may change now."""
        self._hooks.ending = FAILED
        with self._changed:
            self.held.close()
            self._finishing = True
            self._changed.notify()
        if self.persister.config.memory:
            self.held.seal(self.persister.primary.run)

    def skip_waiting(self) -> None:
        """Exit after the message at hand and what is in memory, leaving further tiers as they are."""
        with self._changed:
            self._todo.clear()
            self._finishing = self.rescue.is_hurried = True
            self._changed.notify()
            nothing_to_rescue = not self.persister.config.memory or self.rescue.ended_at is not None
        if nothing_to_rescue:
            self.persister.secondary.stop()

    def run(self) -> None:
        """The thread."""
        try:
            started = self._open()
            if started is not None:
                self._serve(started)
        except BaseException:  # noqa: BLE001 - reported to the trainer, which starts a new writer
            self._broken = traceback.format_exc()
        finally:
            self._let_go()  # further tiers may take long yet, and need no memory
            try:
                self.persister.close(self._hooks.ending)
                self._hooks.finish(self._hooks.ending if self.opened else None)
                if self.opened and self._broken is None:
                    self.persister.drain()
            except Exception:  # noqa: BLE001 - reported like any other: the trainer must not wait for a thread that is gone
                self._broken = self._broken or traceback.format_exc()
            self.persister.secondary.stop()
            with self._changed:
                self._let_go()
                self.ended = True
            self._on_exit(self._broken)

    def _let_go(self) -> None:
        with self._changed:
            self._todo.clear()
            self._intake.close()
            if self.rescue.trainer is TrainerLife.PRESENT:
                self.held.close()

    def _open(self) -> Started | None:
        try:
            started = self.persister.open(self.held.spent)
        except CkptError as err:
            self._hooks.emit({"kind": Kind.REFUSED, "code": err.code, "message": err.message, "hint": err.hint})
            return None
        self._on_open()
        self.opened = True
        port = self.peers.server.port if self.peers is not None else 0
        self._hooks.emit({"kind": Kind.STARTED, **asdict(replace(started, port=port))})
        return started

    def _serve(self, started: Started) -> None:
        self.persister.prepare(started)
        self.held.changed()
        while (turn := self._next()) is not None:
            try:
                turn.work()
            finally:
                with self._changed:
                    self._at_hand = None
            if turn.flush and turn.order is not None:
                # Not before: a flush that is asked for while the order is at hand waits for this.
                self._hooks.emit(channel.event(MemoryFlushed(turn.order.job.step, time.monotonic())))
            del turn  # and the memory of its slot, while the next one is waited for
        if self._broken is None:
            self.rescue.run()

    def _next(self) -> _QueueItem | None:
        """The next turn, its order numbered; None: no more will come."""
        with self._changed:
            while not self._todo and not self._finishing:
                self._changed.wait(_IDLE_SECONDS)
            if not self._todo:
                return None
            turn = self._todo.popleft()
            self._at_hand = turn.order
            if turn.order is not None and turn.order.problem is None:
                self.persister.ids.of(turn.order)
            return turn
