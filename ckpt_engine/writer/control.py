"""The control socket of a writer: the same user's processes on the same machine ask it one thing per connection.

A request is a message of `channel` with `what`, and the reply is one, perhaps with file descriptors:

| `what`         | reply                                                                                 |
|---|---|
| `snapshot`     | `snapshot`: its id, or None and `why`; `step`, `manifest`, `run`, `record`, `file`, `nbytes`, \
`durable`, `beat`, and a descriptor of the memory; of several ranks `manifest` is a part record. Takes the `snapshot` \
that is wanted, else it is the newest |
| `held`         | `held`: ids of the snapshots in memory, newest first; or none, and `why`; of several ranks `node`, \
and with replication or parity `group`, `parity` (ids), `host`, `port` and `secret`, see `peer_service` |
| `parity`       | `snapshot`: its id, or None and `why`; `shares` that the parity is of, `nbytes`, and a descriptor \
of the memory. Takes the `snapshot` that is wanted |
| `bye`          | `ok`: the writer gives up its name, and ends after what is in flight; not while its trainer lives |
| `save`, `stop` | `trainer`: whether there is one that heard it; takes `who`, text for people |
| `flush`        | `step` of the newest snapshot in memory, which becomes durable now if it is not; None, and `why`, \
if there is none, or no trainer; of several ranks the writers of all are to be asked |
| `status`       | `pid`, `trainer`, `held` (None, or `step` and `durable`), `held_created`, \
`beat`, `pace`, `spent` (None, or what `pulse.SpentTimes` has), `events` (the newest, each a time and a text), and \
`rates` (bytes per second, or None, by place) |

The reply to anything else is `error`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING, Any

from ckpt_engine.errors import CkptError, WaitTimeoutError, WriterError
from ckpt_engine.writer import unix_sockets
from ckpt_engine.writer.channel import Channel, Received, close_all
from ckpt_engine.writer.messages import Answer, Body, Reply, nothing
from ckpt_engine.writer.unix_sockets import SocketListener

if TYPE_CHECKING:
    from ckpt_engine.writer.job_queue import JobQueue

Question = StrEnum("Question", ["SNAPSHOT", "PARITY", "HELD", "BYE", "SAVE", "STOP", "FLUSH", "STATUS"])
"""What a request asks for."""

REQUEST_SECONDS = 5.0
"""How long a client may take to say what it wants."""
TAKE_SECONDS = 30.0
"""How long it may take to take in the reply."""
REPLY_SECONDS = 120.0
"""How long it is let wait for the reply."""
CONNECT_SECONDS = 1.0
"""How long it may take to connect: a writer that lives takes connections at once."""
_REQUEST_BYTES = 64 << 10
_CLIENTS = 16
_WHO_LETTERS = 200


def ask(root_url: str, request: Mapping[str, Any], timeout: float, rank: int = 0) -> Received | None:
    """The reply of the writer of the run at `root_url`; None if this user has none there, on this machine.

    Args:
        request: see above.
        timeout: seconds.
        rank: whose writer, where there are several.

    Returns:
        The reply; its descriptors are the caller's to close.

    Raises:
        WaitTimeoutError: it does not answer in time.
        WriterError: it says something else than a reply.
    """
    who = f"the writer of {root_url}"
    try:
        sock = unix_sockets.connect(unix_sockets.name_of(root_url, rank), min(timeout, CONNECT_SECONDS))
    except TimeoutError as err:
        raise _silent(who, timeout) from err
    if sock is None:
        return None
    with closing(Channel(sock)) as channel:
        channel.send(request)
        return _message(channel, who, timeout)


def _message(channel: Channel, who: str, seconds: float) -> Received:
    """The next message of `who`, who may take so many seconds for it."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        messages, is_open, _ = channel.exchange(left)
        if messages:
            return messages[0]
        if not is_open:
            raise WriterError(f"{who} hung up without a reply")
    raise _silent(who, seconds)


def _silent(who: str, timeout: float) -> WaitTimeoutError:
    return WaitTimeoutError(f"{who} did not answer within {timeout:.0f} s")


@dataclass(eq=False)
class Control:
    """Listens, and answers each client on a thread of its own.

    No client can make another one wait, nor use up more than a little memory.

    Args:
        root_url: of the run.
        answer: see `Answer`; called for one request at a time.
        rank: whose writer this is.
    """

    _root_url: str
    _answer: Answer
    _rank: int = 0
    _listener: SocketListener | None = field(default=None, init=False)
    _clients: set[Channel] = field(default_factory=set, init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _answering: threading.Lock = field(default_factory=threading.Lock, init=False)

    def open(self, timeout: float) -> None:
        """Take the name and begin. Another writer of this user that still has it gets a `bye`.

        Raises:
            WriterError: the name is not to be had within `timeout` seconds.
        """
        try:
            reply = ask(self._root_url, {"what": Question.BYE}, timeout, self._rank)
            if reply is not None and not reply.body.get("ok"):
                raise WriterError("another writer of this run serves its trainer")
            self._listener = SocketListener(unix_sockets.name_of(self._root_url, self._rank), timeout)
        except OSError as err:
            raise WriterError(str(err)) from err
        threading.Thread(target=self._run, name="ckpt-control", daemon=True).start()

    def poke(self) -> None:
        """Ask again for the replies that were not known. Any thread."""
        with self._changed:
            for channel in self._clients:
                channel.wake()

    def hang_up(self) -> None:
        """Give up the name: no one new gets in. Any thread, also from `answer`."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def close(self, timeout: float) -> None:
        """End, after what is just being said; waits at most `timeout` seconds for that. Idempotent."""
        self.hang_up()
        with self._changed:
            for channel in self._clients:
                channel.hang_up()
            self._changed.wait_for(lambda: not self._clients, timeout)

    def _run(self) -> None:
        while (listener := self._listener) is not None:
            with self._changed:
                if not self._changed.wait_for(lambda: len(self._clients) < _CLIENTS, REQUEST_SECONDS):
                    continue
            sock = listener.accept()
            if sock is None:
                continue
            channel = Channel(sock, most_bytes=_REQUEST_BYTES, takes_fds=False)
            with self._changed:
                self._clients.add(channel)
            threading.Thread(target=self._serve, args=(channel,), name="ckpt-request", daemon=True).start()

    def _serve(self, channel: Channel) -> None:
        try:
            with suppress(WriterError, WaitTimeoutError):  # not one of our processes, or it says nothing
                self._converse(channel)
        finally:
            with self._changed:
                self._clients.discard(channel)
                channel.close()
                self._changed.notify_all()

    def _converse(self, channel: Channel) -> None:
        """Hear one request, wait until its reply is known, and send that."""
        request, is_open = _message(channel, "a client", REQUEST_SECONDS).body, True
        deadline = time.monotonic() + REPLY_SECONDS
        while (reply := self._reply_to(request)) is None:
            left = deadline - time.monotonic()
            _, is_open, _ = channel.exchange(max(0.0, left))
            if not is_open or left <= 0:
                return
        channel.send(reply.body, reply.fds)
        close_all(reply.fds)
        deadline = time.monotonic() + TAKE_SECONDS
        while channel.backlog and is_open and (left := deadline - time.monotonic()) > 0:
            _, is_open, _ = channel.exchange(left)

    def _reply_to(self, request: Body) -> Reply | None:
        with self._answering:
            try:
                return self._answer(request)
            except Exception as err:  # noqa: BLE001 - said to who asked; the next one is answered all the same
                return Reply({"error": f"{type(err).__name__}: {err}"})


class MemoryUse(Enum):
    """Who gets what is in memory."""

    TRAINER = auto()
    """Its trainer, which lives as far as is known."""
    RESTART = auto()
    """The restarted training: the trainer is gone."""
    CLOSED = auto()
    """The run was closed: nothing is served."""


class ControlHandlers:
    """Answers requests. `answer` is called for one at a time, everything else from any thread.

    Args:
        queue: of the writer: has the snapshots in memory, and what is kept for ranks of other machines.
        forward: tells the trainer what somebody asked it for, and who; whether that was possible.
        trainer_lives: asks the system, in case its end has not been noticed yet.
        bye: called when the restarted training needs this writer no more; gives up the name.
    """

    def __init__(
        self,
        queue: JobQueue,
        forward: Callable[[str, str], bool],
        trainer_lives: Callable[[], bool],
        bye: Callable[[], object],
    ) -> None:
        self._queue = queue
        self._forward = forward
        self._trainer_lives = trainer_lives
        self._bye = bye
        self._use = MemoryUse.TRAINER
        self._handlers: Mapping[object, Callable[[Body], Reply | None]] = {
            **dict.fromkeys((Question.SNAPSHOT, Question.PARITY, Question.HELD), self._of_memory),
            Question.BYE: self._take_leave,
            **dict.fromkeys((Question.SAVE, Question.STOP), self._pass_on),
            Question.FLUSH: self._flushed,
            Question.STATUS: self._status,
        }

    def leave(self, *, serves: bool) -> None:
        """The trainer is gone, and everything it sent was taken in.

        Args:
            serves: what is in memory is for the restarted training; else that was closed, and nothing is served.
        """
        self._use = MemoryUse.RESTART if serves else MemoryUse.CLOSED

    def answer(self, request: Body) -> Reply | None:
        """See `Answer`."""
        return self._handlers.get(request.get("what"), _unknown)(request)

    def _of_memory(self, request: Body) -> Reply | None:
        """The reply to what is only served once the trainer is gone; None: what it sent last is still to come."""
        if self._use is MemoryUse.TRAINER and not self._trainer_lives():
            return None
        if self._use is not MemoryUse.RESTART:
            why = "its trainer is alive" if self._use is MemoryUse.TRAINER else "the run was closed"
            return Reply({"held": [], "why": why}) if request["what"] == Question.HELD else nothing(why)
        if request["what"] == Question.HELD:
            return self._list()
        if request["what"] == Question.PARITY:
            return self._parity(str(request.get("snapshot")))
        return self._snapshot(request.get("snapshot"))

    def _list(self) -> Reply | None:
        ids = self._queue.held.ids()
        if ids is None:
            return None
        body: Body = {"held": ids}
        if (ranks := self._queue.persister.config.ranks).several:
            body["node"] = ranks.node
        if self._queue.peers is not None:
            body |= {
                "host": self._queue.peers.server.host,
                "port": self._queue.peers.server.port,
                "secret": ranks.session,
            }
            body |= {"group": list(self._queue.peers.parity.group), "parity": self._queue.peers.parity.ids()}
        return Reply(body)

    def _snapshot(self, wanted: object) -> Reply | None:
        try:
            return self._queue.held.offer(None if wanted is None else str(wanted))
        except (CkptError, OSError, ValueError) as err:
            return nothing(str(err))

    def _parity(self, wanted: str) -> Reply:
        found = self._queue.peers.parity.get(wanted) if self._queue.peers is not None else None
        if found is None:
            return nothing(f"the parity of {wanted} is not kept here")
        shares = [asdict(share) for share in found.shares]
        return Reply({"snapshot": wanted, "shares": shares, "nbytes": found.nbytes}, (found.fd,))

    def _pass_on(self, request: Body) -> Reply:
        who = str(request.get("who", "somebody"))[:_WHO_LETTERS]
        return Reply(
            {
                "trainer": self._use is MemoryUse.TRAINER
                and self._trainer_lives()
                and self._forward(request["what"], who)
            }
        )

    def _flushed(self, _: Body) -> Reply:
        if not (self._use is MemoryUse.TRAINER and self._trainer_lives()):
            return Reply({"step": None, "why": "its trainer is gone: what it left becomes durable anyway"})
        step = self._queue.flush()
        return Reply({"step": step} if step is not None else {"step": None, "why": "no snapshot is in memory"})

    def _take_leave(self, _: Body) -> Reply | None:
        if self._use is MemoryUse.TRAINER:
            return Reply({"ok": False}) if self._trainer_lives() else None
        self._queue.held.let_go()
        self._bye()
        return Reply({"ok": True})

    def _status(self, _: Body) -> Reply:
        newest = self._queue.held.newest
        return Reply(
            {
                "pid": os.getpid(),
                "trainer": self._use is MemoryUse.TRAINER and self._trainer_lives(),
                "held": None if newest is None else {"step": newest.job.step, "durable": newest.durable},
                "held_created": None if newest is None else newest.job.created,
                "beat": (beat := self._queue.held.beat) and asdict(beat),
                "spent": (spent := self._queue.held.spent()) and asdict(spent),
                "pace": dict(self._queue.held.pace),
                **self._queue.held.recent.to_json(),
            }
        )


def _unknown(request: Body) -> Reply:
    return Reply({"error": f"the writer does not know the request {request.get('what')!r}"})
