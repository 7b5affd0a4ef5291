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
`beat`, `pace`, `spent` (None, or `started`, `step` and `times`, see `attempts`) |

The reply to anything else is `error`.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ckpt_engine.errors import CkptError, WaitTimeoutError, WriterError
from ckpt_engine.writer import unix_sockets
from ckpt_engine.writer.channel import Channel, Received
from ckpt_engine.writer.messages import Answer, Body, Reply, nothing
from ckpt_engine.writer.unix_sockets import SocketListener

if TYPE_CHECKING:
    from ckpt_engine.writer.job_queue import JobQueue

SNAPSHOT = "snapshot"
PARITY = "parity"
HELD = "held"
BYE = "bye"
SAVE = "save"
STOP = "stop"
FLUSH = "flush"
STATUS = "status"

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
    deadline = time.monotonic() + timeout
    try:
        sock = unix_sockets.connect(unix_sockets.name_of(root_url, rank), min(timeout, CONNECT_SECONDS))
    except TimeoutError as err:
        raise _silent(root_url, timeout) from err
    if sock is None:
        return None
    channel = Channel(sock)
    try:
        channel.send(request)
        return _reply(channel, root_url, deadline, timeout)
    finally:
        channel.close()


def _reply(channel: Channel, root_url: str, deadline: float, timeout: float) -> Received:
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while True:
            selector.modify(channel, selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.backlog else 0))
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                raise _silent(root_url, timeout)
            channel.flush()
            messages, is_open = channel.receive()
            if messages:
                return messages[0]
            if not is_open:
                raise WriterError(f"the writer of {root_url} hung up without a reply")


def _silent(root_url: str, timeout: float) -> WaitTimeoutError:
    return WaitTimeoutError(f"the writer of {root_url} did not answer within {timeout:.0f} s")


@dataclass(slots=True)
class _Client:
    """A connection: first it has to say something, then it waits, then it has to take in the reply."""

    channel: Channel
    deadline: float
    request: Body | None = None
    replied: bool = False


class Control:
    """Listens, and answers on a thread of its own. No client can make it wait, nor use up more than a little memory.

    Args:
        root_url: of the run.
        answer: see `Answer`.
        rank: whose writer this is.
    """

    def __init__(self, root_url: str, answer: Answer, rank: int = 0) -> None:
        self._root_url = root_url
        self._rank = rank
        self._answer = answer
        self._listener: SocketListener | None = None
        self._clients: list[_Client] = []
        self._stopping = False
        self._lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="ckpt-control", daemon=True)

    def open(self, timeout: float) -> None:
        """Take the name and begin. Another writer of this user that still has it gets a `bye`.

        Raises:
            WriterError: the name is not to be had within `timeout` seconds.
        """
        try:
            reply = ask(self._root_url, {"what": BYE}, timeout, self._rank)
            if reply is not None and not reply.body.get("ok"):
                raise WriterError("another writer of this run serves its trainer")
            self._listener = SocketListener(unix_sockets.name_of(self._root_url, self._rank), timeout)
        except OSError as err:
            raise WriterError(str(err)) from err
        self._thread.start()

    def poke(self) -> None:
        """Ask again for the replies that were not known. Any thread."""
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def hang_up(self) -> None:
        """Give up the name: no one new gets in. On the control thread, from `answer`."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def close(self, timeout: float) -> None:
        """End, after what is just being said; waits at most `timeout` seconds for the thread. Idempotent."""
        self._stopping = True
        self.poke()
        if self._thread.is_alive():
            self._thread.join(timeout)
        with self._lock:
            if not self._thread.is_alive() and self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        finally:
            for client in self._clients:
                client.channel.close()
            self.hang_up()

    def _turn(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_fd, selectors.EVENT_READ)
            if self._listener is not None and len(self._clients) < _CLIENTS:
                selector.register(self._listener, selectors.EVENT_READ)
            for client in self._clients:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.channel.backlog else 0)
                selector.register(client.channel, wanted, client)
            ready = selector.select(self._patience())
        news = False
        for key, _ in ready:
            if key.fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
                news = True
            elif key.fileobj is self._listener:
                self._accept(self._listener)
        now = time.monotonic()
        touched = {id(key.data) for key, _ in ready if key.data is not None}
        for client in self._clients[:]:
            keep = client.deadline > now
            if keep and (id(client) in touched or (news and client.request is not None)):
                keep = self._attend(client)
            if not keep:
                self._clients.remove(client)
                client.channel.close()

    def _patience(self) -> float | None:
        if not self._clients:
            return None
        return max(0.0, min(client.deadline for client in self._clients) - time.monotonic())

    def _accept(self, listener: SocketListener) -> None:
        sock = listener.accept()
        if sock is None:
            return
        channel = Channel(sock, most_bytes=_REQUEST_BYTES, takes_fds=False)
        self._clients.append(_Client(channel, time.monotonic() + REQUEST_SECONDS))

    def _attend(self, client: _Client) -> bool:
        """Advance the exchange with a client; whether it stays."""
        channel = client.channel
        channel.clear_wake()
        channel.flush()
        try:
            messages, is_open = channel.receive()
        except WriterError:
            return False  # not one of our processes
        if client.replied:
            return is_open and channel.backlog
        if client.request is None and messages:
            client.request = messages[0].body
            client.deadline = time.monotonic() + REPLY_SECONDS
        if client.request is None or not is_open:
            return is_open
        try:
            reply = self._answer(client.request)
        except Exception as err:  # noqa: BLE001 - said to who asked; the next one is answered all the same
            reply = Reply({"error": f"{type(err).__name__}: {err}"})
        if reply is None:
            return True
        channel.send(reply.body, reply.fds)
        for fd in reply.fds:
            os.close(fd)
        client.replied = True
        client.deadline = time.monotonic() + TAKE_SECONDS
        return channel.backlog


class ControlHandlers:
    """Answers requests. `answer` belongs to the control thread, everything else may be called from any.

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
        self._ranks, self._peers, self._memory, self._flush = queue.ranks, queue.peers, queue.held, queue.flush
        self._forward = forward
        self._trainer_lives = trainer_lives
        self._bye = bye
        self._attended = self._serves = True
        self.said_bye = False
        """Whether the writer is not needed any more."""

    def leave(self, *, serves: bool) -> None:
        """The trainer is gone, and everything it sent was taken in.

        Args:
            serves: what is in memory is for the restarted training; else that was closed, and nothing is served.
        """
        self._serves = serves
        self._attended = False

    def answer(self, request: Body) -> Reply | None:
        """See `Answer`."""
        what = request.get("what")
        if what in (SNAPSHOT, PARITY, HELD):
            return self._of_memory(request)
        if what == BYE:
            return self._take_leave()
        if what in (SAVE, STOP):
            who = str(request.get("who", "somebody"))[:_WHO_LETTERS]
            return Reply({"trainer": self._attended and self._trainer_lives() and self._forward(what, who)})
        if what == FLUSH:
            return Reply(self._flushed())
        if what == STATUS:
            return Reply(self._status())
        return Reply({"error": f"the writer does not know the request {what!r}"})

    def _of_memory(self, request: Body) -> Reply | None:
        """The reply to what is only served once the trainer is gone; None: what it sent last is still to come."""
        if self._attended and not self._trainer_lives():
            return None
        if self._attended or not self._serves:
            why = "its trainer is alive" if self._attended else "the run was closed"
            return Reply({"held": [], "why": why}) if request["what"] == HELD else nothing(why)
        if request["what"] == HELD:
            return self._list()
        if request["what"] == PARITY:
            return self._parity(str(request.get("snapshot")))
        return self._snapshot(request.get("snapshot"))

    def _list(self) -> Reply | None:
        ids = self._memory.ids()
        if ids is None:
            return None
        body: Body = {"held": ids}
        if self._ranks.several:
            body["node"] = self._ranks.node
        if self._peers is not None:
            body |= {"host": self._peers.host, "port": self._peers.port, "secret": self._ranks.session}
            body |= {"group": list(self._peers.parity.group), "parity": self._peers.parity.ids()}
        return Reply(body)

    def _snapshot(self, wanted: object) -> Reply | None:
        try:
            return self._memory.offer(None if wanted is None else str(wanted))
        except (CkptError, OSError, ValueError) as err:
            return nothing(str(err))

    def _parity(self, wanted: str) -> Reply:
        found = self._peers.parity.get(wanted) if self._peers is not None else None
        if found is None:
            return nothing(f"the parity of {wanted} is not kept here")
        shares = [asdict(share) for share in found.shares]
        return Reply({"snapshot": wanted, "shares": shares, "nbytes": found.nbytes}, (found.fd,))

    def _flushed(self) -> Body:
        if not (self._attended and self._trainer_lives()):
            return {"step": None, "why": "its trainer is gone: what it left becomes durable anyway"}
        step = self._flush()
        return {"step": step} if step is not None else {"step": None, "why": "no snapshot is in memory"}

    def _take_leave(self) -> Reply | None:
        if self._attended:
            return Reply({"ok": False}) if self._trainer_lives() else None
        self.said_bye = True
        self._memory.let_go()
        self._bye()
        return Reply({"ok": True})

    def _status(self) -> Body:
        newest = self._memory.newest
        return {
            "pid": os.getpid(),
            "trainer": self._attended and self._trainer_lives(),
            "held": None if newest is None else {"step": newest.job.step, "durable": newest.durable},
            "held_created": None if newest is None else newest.job.created,
            "beat": (beat := self._memory.beat) and asdict(beat),
            "spent": (spent := self._memory.spent()) and asdict(spent),
            "pace": dict(self._memory.pace),
        }
