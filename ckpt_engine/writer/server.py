"""The main loop of the writer process.

It ends when the trainer says so, or when the trainer is gone: then it finishes the jobs it has (its descriptors keep
the arena alive), at most `drain_seconds` long. With memory it finishes the job at hand and the newest snapshot, and
lingers: who restarts the training gets that snapshot from memory (see `control`). It does the same if the trainer says
that it has failed, unless the newest snapshot is durable: of several ranks most end by an error when one is lost. Only
the first one knows that alone: the others look whether it was committed, and end then.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_engine.errors import WriterError
from ckpt_engine.observe.events import CLOSED, FAILED, GONE, Notice
from ckpt_engine.writer import channel, unix_sockets
from ckpt_engine.writer.channel import Channel, Received, pidfd_of, readable
from ckpt_engine.writer.messages import Body, Kind

if TYPE_CHECKING:
    from ckpt_engine.writer.control import Control
    from ckpt_engine.writer.job_queue import JobQueue

START_SECONDS = 60.0
"""How long the trainer may take to send `start`."""
_NICE = 10
_LOOK_SECONDS = 1.0
_NAME_SECONDS = 5.0
_END_SECONDS = 10.0
_CLOSED_SECONDS = 20.0
"""How long a trainer that has closed may take to end: other ranks may hear only then that it has failed."""
_CATCH_UP_SECONDS = 10.0
"""Less than what a tier may take without a sign of progress: it is waited for in the tier's lane."""

_early: list[int] = []
"""The signals that came while the trainer lived: they were for the whole job."""

EXIT_OK = 0
EXIT_BROKEN = 1
EXIT_DEADLINE = 3


class PeerWatch:
    """Notices the end of the process at the other end of a socket, even if a fork of it holds the socket open."""

    def __init__(self, sock: socket.socket) -> None:
        self._pid = unix_sockets.peer_of(sock)[0]
        self.fd = pidfd_of(self._pid)
        """Readable once the process has ended; None where the kernel offers no pidfd, or the process is gone."""

    def ended(self, timeout: float = 0.0) -> bool:
        """Whether it has ended, or, where there is a pidfd, does so within `timeout` seconds. Any thread."""
        if self.fd is None:
            return not Path(f"/proc/{self._pid}").exists()
        return bool(readable(timeout, self.fd))


class Reading(Enum):
    """How far what the trainer sends was taken in."""

    UNDER_WAY = auto()
    COMPLETE = auto()
    """Everything: it is gone, and its memory does not change any more."""
    CUT_SHORT = auto()
    """It does not keep to the protocol, or has hung up and lives."""


class Serving:
    """One trainer being served.

    Args:
        sock: connected to the trainer.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._peer = PeerWatch(sock)
        self._channel = Channel(sock)
        self._queue: JobQueue | None = None
        self._control: Control | None = None
        self._parting: Kind | None = None
        """How the trainer has said that it ends: `CLOSE`, or `LEAVE` where its memory is left to this writer."""
        self._behind: deque[threading.Event] = deque()
        self._reading = Reading.UNDER_WAY
        self._end_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable once what is in memory is to be served no more."""
        self._status = EXIT_OK

    def run(self) -> int:
        """Serve until the end; the exit status."""
        try:
            self._attend()
            # One that lives and has hung up tells nothing of its memory any more.
            has_all = self._parting is Kind.LEAVE or self._peer.ended()
        except WriterError as err:
            _complain(str(err))
            self._status, has_all = EXIT_BROKEN, False
        self._reading = Reading.COMPLETE if has_all else Reading.CUT_SHORT
        while self._behind:
            self._behind.popleft().set()
        self._channel.close()
        if self._queue is not None and (self._parting is Kind.LEAVE or not self._queue.ended):
            self._status = self._drain(self._queue)
        if self._control is not None:
            self._control.close(_NAME_SECONDS)  # so that what it has just said is sent
        return self._status

    def _attend(self) -> None:
        """Receive until the trainer is gone, or the queue has ended and everything is said.

        Raises:
            WriterError: the trainer does not keep to the protocol.
        """
        deadline = time.monotonic() + START_SECONDS
        fds = () if self._peer.fd is None else (self._peer.fd,)
        while True:
            behind = [self._behind.popleft() for _ in range(len(self._behind))]
            # What the trainer sent before its end counts: it is read after the look at that.
            gone = self._peer.ended()
            received, is_open, _ = self._channel.exchange(0.0 if behind or gone else _LOOK_SECONDS, *fds)
            for item in received:
                self._take(item)
            for one in behind:
                one.set()
            if gone or not is_open:
                return
            if self._queue is None and time.monotonic() > deadline:
                raise WriterError(f"the trainer did not say what to write within {START_SECONDS:.0f} s")
            if self._queue is not None and self._queue.ended and not self._channel.backlog:
                return

    def _caught_up(self) -> bool:
        """Wait until everything that the trainer has sent so far was taken; whether that is so. Not on this thread."""
        taken = threading.Event()
        self._behind.append(taken)
        if self._reading is Reading.UNDER_WAY:
            self._channel.wake()
            if not taken.wait(_CATCH_UP_SECONDS):
                return False
        return self._reading is not Reading.CUT_SHORT

    def _take(self, item: Received) -> None:
        kind = item.body.get("kind")
        if kind == Kind.START:
            self._begin(item.body)
        elif self._queue is None:
            raise WriterError(f"the trainer sent {kind!r} before {Kind.START.value!r}")
        elif kind == Kind.LEAVE and self._queue.opened and self._queue.rescue.may_lose:
            self._leave(self._queue, item.body)
        elif kind in (Kind.CLOSE, Kind.LEAVE):
            self._parting = Kind.CLOSE
            self._queue.finish(failed=item.body["failed"], why=item.body["why"])
        else:
            self._queue.put(item.body, item.fds)

    def _leave(self, queue: JobQueue, body: Body) -> None:
        """The trainer ends, and does not touch its memory any more: everything but its end is as if it died."""
        self._parting = Kind.LEAVE
        queue.abandon(FAILED if body["failed"] else CLOSED, body["why"])
        self._handlers.leave(serves=True)
        self._poke()

    def _begin(self, body: Body) -> None:
        # Where the trainer finds packages that are not installed for this interpreter; our own folders come first.
        sys.path += [folder for folder in body["path"] if folder not in sys.path]
        import msgspec

        from ckpt_engine.copy.job import WriterConfig
        from ckpt_engine.writer.control import ControlHandlers
        from ckpt_engine.writer.job_queue import JobQueue

        self._config = config = msgspec.convert(body["config"], WriterConfig)
        # Linux keeps this per thread: threads started from here on inherit it. The I/O priority follows from it.
        os.nice(_NICE)
        self._queue = JobQueue(config, self._channel.send, self._queue_ended, self._listen, self._poke, self._caught_up)
        self._handlers = ControlHandlers(self._queue, self._forward, lambda: not self._peer.ended(), self._take_leave)
        if self._queue.peers is not None:
            self._queue.peers.answer = self._handlers.answer
        self._queue.start()

    def _listen(self) -> None:
        """Take requests from outside from now on: the run is ours."""
        from ckpt_engine.writer.control import Control

        rank = self._config.ranks.rank
        if rank and not self._config.memory:
            return
        control = Control(self._config.url, self._handlers.answer, rank)
        try:
            control.open(_NAME_SECONDS)
        except WriterError as err:
            text = f"the writer takes no requests from outside: {err.message}"
            self._channel.send(channel.event(Notice("WARNING", text)))
            control.close(_NAME_SECONDS)
        else:
            self._control = control

    def _poke(self) -> None:
        if self._control is not None:
            self._control.poke()
        if self._queue is not None and self._queue.peers is not None:
            self._queue.peers.poke()

    def _forward(self, what: str, who: str) -> bool:
        # A trainer that takes nothing in is not sent more and more.
        return not self._channel.backlog and self._channel.send({"kind": Kind.REQUEST, "what": what, "who": who})

    def _take_leave(self) -> None:
        if self._control is not None:
            self._control.hang_up()
        os.eventfd_write(self._end_fd, 1)

    def _queue_ended(self, broken: str | None) -> None:
        if broken:
            self._status = EXIT_BROKEN
            _complain(broken)
        self._channel.wake()

    def _drain(self, queue: JobQueue) -> int:
        """The trainer is gone: finish what it left, bounded in time. SIGTERM limits that to what would be lost."""
        if not queue.opened:
            return self._status  # still waiting for the lease: there is nothing to finish
        _silence()
        if self._parting is None:  # `CLOSE` is left alone below, `LEAVE` was done when it came
            if self._peer.fd is None or self._peer.ended(_END_SECONDS):
                queue.abandon(GONE)
            else:
                queue.disown()  # it lives, speaks to us no more, and does with its memory what it wants
        self._handlers.leave(serves=self._parting is not Kind.CLOSE)
        if self._control is None and self._parting is not Kind.CLOSE:
            self._listen()  # who had the name may be gone by now
        self._poke()
        self._heed_termination(queue)
        began = time.monotonic()
        deadline = began + self._config.drain_seconds
        while queue.is_alive():
            queue.join(max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic())))
            if queue.is_alive() and time.monotonic() >= deadline:
                return EXIT_DEADLINE
            if self._parting is Kind.CLOSE and (self._peer.ended() or time.monotonic() >= began + _CLOSED_SECONDS):
                queue.persister.leave_alone()
            if self._lingering(queue) == 0.0:
                queue.held.let_go()
        if self._parting is not Kind.CLOSE:
            self._linger(queue)
        return self._status

    def _heed_termination(self, queue: JobQueue) -> None:
        """From now on SIGTERM is for the writer. One that came before was for the whole job."""

        def stop(_number: int, _frame: object) -> None:
            queue.skip_waiting()
            os.eventfd_write(self._end_fd, 1)

        if signal.SIGTERM in signal.sigpending():
            _early.append(signal.sigwait([signal.SIGTERM]))
        signal.signal(signal.SIGTERM, stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        if _early:
            os.eventfd_write(self._end_fd, 1)

    def _lingering(self, queue: JobQueue) -> float | None:
        """Seconds for which what is in memory is still to be served; None: it is not durable yet."""
        if (rescued_at := queue.rescue.ended_at) is None:
            return None
        return max(0.0, rescued_at + self._config.linger_seconds - time.monotonic())

    def _linger(self, queue: JobQueue) -> None:
        """Serve what is in memory, as long as it may be wanted."""
        while self._control is not None and queue.held.newest is not None and (left := self._lingering(queue)):
            if readable(left, self._end_fd):
                return


def main(arguments: list[str]) -> int:
    """Serve the trainer at the other end of the socket whose descriptor number is the only argument."""
    faulthandler.enable()
    # The trainer decides when to stop: signals to the whole job must not take the snapshot in flight with them.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # heeded when the trainer is gone
    signal.signal(signal.SIGTERM, lambda number, _: _early.append(number))  # the threads of hooks do not block it
    return Serving(socket.socket(fileno=int(arguments[0]))).run()


def _complain(text: str) -> None:
    """Say something on stderr, which the trainer shows if this process breaks down."""
    with contextlib.suppress(OSError):  # the trainer is gone, and with it the reader of this
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def _silence() -> None:
    """Let go of the pipe to the trainer: a fork of it may hold the other end without ever reading."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
