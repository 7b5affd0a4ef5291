"""The control socket of a writer: the same user's processes on the same machine ask it one thing per connection.

A request is a message of `channel` with `what`, and the reply is one, perhaps with file descriptors:

| `what`         | reply                                                                                 |
|---|---|
| `snapshot`     | `snapshot`: its id, or None and `why`; `step`, `manifest`, `run`, `record`, `file`, `nbytes`, \
`durable`, `beat`, and a descriptor of the memory; of several ranks `manifest` is a part record. Takes the `snapshot` \
that is wanted, else it is the newest, and the `rank` whose share it is, else it is its own |
| `held`         | `held`: ids of the snapshots in memory, newest first; or none, and `why`; of several ranks `node`, \
and with replication or parity `guests` (ids by rank), `group`, `parity` (ids), `port` and `secret`, see `peer_service`
|
| `parity`       | `snapshot`: its id, or None and `why`; `shares` that the parity is of, `nbytes`, and a descriptor \
of the memory. Takes the `snapshot` that is wanted |
| `bye`          | `ok`: the writer gives up its name, and ends after what is in flight; not while its trainer lives, \
nor if `snapshot` is given and it holds another one |
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_engine.errors import WaitTimeoutError, WriterError
from ckpt_engine.writer import channel as sockets
from ckpt_engine.writer.channel import Body, Channel, Received, SocketListener

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
        sock = sockets.connect(sockets.name_of(root_url, rank), min(timeout, CONNECT_SECONDS))
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


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply and the descriptors that go with it, which are closed when it is sent."""

    body: Body
    fds: Sequence[int] = ()


Answer = Callable[[Body], Reply | None]
"""What to reply to a request; None: not known yet, to be asked again. Must return at once; on the control thread."""


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
            self._listener = SocketListener(sockets.name_of(self._root_url, self._rank), timeout)
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
        """Get on with a client; whether it stays."""
        channel = client.channel
        channel.clear_wake()
        channel.flush()
        try:
            messages, is_open = channel.receive()
        except WriterError:
            return False  # not one of ours
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
