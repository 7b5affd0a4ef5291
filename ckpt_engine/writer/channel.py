"""One end of a connection between trainer and writer.

On the wire a message is an 8-byte little-endian length and that many bytes of JSON. File descriptors ride as ancillary
data on the first byte of the message that says how many it has (`"fds": n`), so they arrive before its last byte. What
messages there are is in `messages`.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ckpt_engine.copy.host_memory import MORE_FILES
from ckpt_engine.errors import StateError, WriterError
from ckpt_engine.observe import events
from ckpt_engine.observe.clock import SystemClock
from ckpt_engine.observe.durability import Ledger
from ckpt_engine.writer.messages import Body, Kind

_LENGTH = struct.Struct("<Q")
_MAX_FDS = 64
_MAX_MESSAGE_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 20


def encode(body: Mapping[str, Any]) -> bytes:
    """The JSON bytes of a message."""
    return json.dumps(body, separators=(",", ":")).encode()


def decode(data: bytes) -> Body:
    """The inverse of `encode`.

    Raises:
        WriterError: not a message.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as err:
        raise WriterError(f"the writer connection carries something else than messages: {err}") from err
    if not isinstance(body, dict):
        raise WriterError(f"the writer connection carries a {type(body).__name__} instead of a message")
    return body


@dataclass(frozen=True, slots=True)
class Received:
    """A message and the file descriptors that came with it; the receiver owns them."""

    body: Body
    fds: tuple[int, ...]


@dataclass(eq=False)
class _Frame:
    """What is left to send of one message, and descriptors (our own duplicates) that go with its first byte.

    They are closed with this object.
    """

    rest: memoryview
    fds: tuple[int, ...]

    def __post_init__(self) -> None:
        weakref.finalize(self, close_all, self.fds).atexit = False


def duplicates(fds: Sequence[int]) -> tuple[int, ...]:
    """Descriptors of the same files for a message, which has them to itself.

    Raises:
        StateError: this process has as many open files as it may have.
    """
    made: list[int] = []
    try:
        made.extend(map(os.dup, fds))
    except OSError as err:
        close_all(made)
        raise StateError(f"cannot share memory with the writer: {err.strerror}", hint=MORE_FILES) from err
    return tuple(made)


class Channel:
    """One end of a connection. Any thread may `send` and ask for the `backlog`; the rest is for the one that owns it.

    The owner waits in a selector for `fileno()` (to read, and to write while `backlog` is true) and for `wake_fd`
    (to read), and calls `receive`, `flush` or `clear_wake`. Nothing here ever waits: what the socket does not take at
    once is kept and sent by `flush`. The amount kept is bounded by what the protocol lets be outstanding.

    Args:
        most_bytes: of one message that is received.
        takes_fds: False: file descriptors that come are an error, and are never opened here.
    """

    def __init__(self, sock: socket.socket, *, most_bytes: int = _MAX_MESSAGE_BYTES, takes_fds: bool = True) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._most_bytes = most_bytes
        self._ancillary_bytes = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize) if takes_fds else 0
        self._lock = threading.Lock()
        self._outgoing: deque[_Frame] = deque()
        self._incoming = bytearray()
        self._fds: deque[int] = deque()
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """The socket's descriptor, -1 once closed."""
        return self._sock.fileno()

    @property
    def backlog(self) -> bool:
        """Whether `flush` has something to send. Any thread; what another one is sending just now is waited for.

        False: the kernel has everything, and the peer reads it even if this process dies now; or the peer is gone.
        """
        with self._lock:
            return bool(self._outgoing)

    def send(self, body: Mapping[str, Any], fds: Sequence[int] = ()) -> bool:
        """Send a message in order, at once or later; `fds` are duplicated and stay the caller's.

        Returns:
            False when the channel is closed: the message went nowhere.

        Raises:
            StateError: as `duplicates`; nothing was sent.
        """
        data = encode({**body, "fds": len(fds)} if fds else body)
        frame = memoryview(_LENGTH.pack(len(data)) + data)
        with self._lock:
            if self.fileno() < 0:
                return False
            self._outgoing.append(_Frame(frame, duplicates(fds)))
            if len(self._outgoing) > 1:
                return True  # the owner already waits until the socket takes more
            self._send_some()
            if self._outgoing:
                os.eventfd_write(self.wake_fd, 1)
        return True

    def flush(self) -> None:
        """Send as much of the backlog as the socket takes now."""
        with self._lock:
            if self.fileno() >= 0:
                self._send_some()

    def _send_some(self) -> None:
        while self._outgoing:
            frame = self._outgoing[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", frame.fds))] if frame.fds else []
            try:
                sent = self._sock.sendmsg([frame.rest[:_CHUNK_BYTES]], ancillary, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._outgoing.clear()  # the peer is gone: its end of file or pidfd says so to the owner
                return
            frame.fds = ()
            frame.rest = frame.rest[sent:]
            if not frame.rest:
                self._outgoing.popleft()

    def wake(self) -> None:
        """Wake the owner's selector. Any thread."""
        with self._lock:
            if self.fileno() >= 0:
                os.eventfd_write(self.wake_fd, 1)

    def clear_wake(self) -> None:
        """Take note of a wake-up."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)

    def exchange(self, timeout: float, *others: int) -> tuple[list[Received], bool, set[int]]:
        """Wait until there is something to do, at most `timeout` seconds; then send and receive what is possible.

        Args:
            others: further descriptors that end the wait once they can be read.

        Returns:
            What `receive` does; and the descriptors that were ready before.

        Raises:
            WriterError: the peer does not speak this protocol.
        """
        ready = readable(timeout, self.fileno(), self.wake_fd, *others, writes=self.fileno() if self.backlog else -1)
        self.clear_wake()
        self.flush()
        return *self.receive(), ready

    def receive(self) -> tuple[list[Received], bool]:
        """Everything that has arrived, and whether the connection is still open for reading.

        Raises:
            WriterError: the peer does not speak this protocol.
        """
        is_open = True
        while len(self._incoming) <= self._most_bytes + _CHUNK_BYTES:
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(
                    _CHUNK_BYTES, self._ancillary_bytes, socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                break
            except OSError:  # reset: the peer died with unread data
                is_open = False
                break
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                    self._fds.extend(numbers)
            if flags & socket.MSG_CTRUNC:
                raise WriterError("file descriptors were lost on the way to the writer", hint="raise `ulimit -n`")
            if not data:
                is_open = False
                break
            self._incoming += data
        return self._whole_messages(), is_open

    def _whole_messages(self) -> list[Received]:
        found, start = [], 0
        while len(self._incoming) - start >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(self._incoming, start)
            if nbytes > self._most_bytes:
                raise WriterError(f"a message of {nbytes} bytes announced on the writer connection")
            stop = start + _LENGTH.size + nbytes
            if len(self._incoming) < stop:
                break
            body = decode(bytes(self._incoming[start + _LENGTH.size : stop]))
            wanted = body.pop("fds", 0)
            if not isinstance(wanted, int) or not 0 <= wanted <= len(self._fds):
                raise WriterError(f"a message came with {len(self._fds)} of its {wanted!r:.20} file descriptors")
            found.append(Received(body, tuple(self._fds.popleft() for _ in range(wanted))))
            start = stop
        del self._incoming[:start]
        return found

    def hang_up(self) -> None:
        """Receive no more: the owner gets an end of file. Any thread."""
        with self._lock, contextlib.suppress(OSError):  # it is closed, or the peer is gone
            self._sock.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close everything, unsent messages included. Idempotent, any thread once the owner no longer selects."""
        with self._lock:
            if self.fileno() < 0:
                return
            self._outgoing.clear()
            close_all(tuple(self._fds))
            self._fds.clear()
            self._sock.close()
            os.close(self.wake_fd)


def readable(timeout: float, *fds: int, writes: int = -1) -> set[int]:
    """Which of these descriptors can be read; waits at most `timeout` seconds for the first one.

    Args:
        writes: one of them, for which it is enough that it can be written.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN | (select.POLLOUT if fd == writes else 0))
    return {fd for fd, _ in poll.poll(timeout * 1000)}


def pidfd_of(pid: int) -> int | None:
    """Readable when the process ends, even if a fork of it holds the connection open; None: there is no such thing."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def close_all(fds: Sequence[int]) -> None:
    """Close these descriptors."""
    for fd in fds:
        os.close(fd)


def event(found: events.Event) -> Body:
    """The message that carries an event."""
    return {"kind": Kind.EVENT, "event": events.to_json(found)}


@dataclass(eq=False)
class RecentEvents:
    """The events among the messages that were sent last. Any thread."""

    _sent: deque[tuple[float, dict[str, Any]]] = field(default_factory=partial(deque, maxlen=16), init=False)

    def forward(self, emit: Callable[[Body], object], body: Body) -> object:
        """Remember the event in a message, if it carries one, and give the message to `emit`."""
        if body["kind"] == Kind.EVENT:
            self._sent.append((time.time(), body["event"]))
        return emit(body)

    def to_json(self) -> dict[str, Any]:
        """The newest events, each a time and a text, and by place how many bytes per second were written."""
        sent, ledger = [(at, events.from_json(one)) for at, one in tuple(self._sent)], Ledger((), SystemClock())
        for _, one in sent:
            ledger.emit(one)
        return {
            "events": [(at, events.line(one)) for at, one in sent[-5:]],
            "rates": {tier.url: tier.bytes_per_second for tier in ledger.standing.tiers},
        }
