"""Between trainer and writer: sockets, messages with file descriptors, their kinds, and the heartbeat page.

On the wire a message is an 8-byte little-endian length and that many bytes of JSON. File descriptors ride as ancillary
data on the first byte of the message that says how many it has (`"fds": n`), so they arrive before its last byte.

The messages of the writer protocol: their kinds, what each carries, and who sends them when.

To the writer, in this order:

| kind       | carries                                   | meaning |
|---|---|---|
| `start`    | `config`, `path`                          | first message; answered by `started` or `refused` |
| `arena`    | `slot`, `gone`, `layout`, `keys`, `trees`, perhaps one file descriptor | what later jobs refer to |
| `persist`  | `job`                                     | a job in a slot that was sent before |
| `hold`     | `job`                                     | the same, to be kept in memory until a newer job comes |
| `pulse`    | one file descriptor                       | where the trainer says how far it is, see `pulse` |
| `rows`     | `name`, `about`, one file descriptor      | where the trainer records its steps, see `rows.Ring` |
| `cancel`   | `snapshot`, `why`                         | this rank has no part in that snapshot of all ranks |
| `partner`  | `addresses`, `keepers`, `senders`, `moved` | the writers of other machines, see `peers.Peers.meet` |
| `close`    |                                           | finish everything, then exit |
| `leave`    |                                           | the same, but for ranks that failed: see `process` |

To the trainer: perhaps events (whom it waits for, what the tier has), then `started` with `first_seq` and `history`
(see `job.History`), or `refused` with `error` (the writer then exits); per job `event`s, one `done`, perhaps
events of the retention that follows. Jobs are done in the order they were sent. A `done` may say that
a call that hangs keeps its slot: then a `freed` with the `slot` follows, perhaps never. Nothing is sent after
`refused`. A `request` with `what` and `who` may come at any time: what somebody asked the trainer for from outside.
Else nothing but answers to jobs is sent after `started` with one tier that does not hang. Otherwise events come at any
time, and after `close` perhaps `copying`, as soon as only further tiers want something, and again, with the tiers that
`lack` something as texts and how many `seconds` they are waited for, if that takes long; then one `closed` with the
`unfinished` tiers, each a text, as soon as nothing is left to wait for: the writer then goes on by itself. It is `said`
where they are no others than those of `copying`, and nothing is wrong with them.

With replication or parity `started` has a `port`, and rank 0 hears by `mirrored` which `snapshot` all keepers have.

An `arena` has a new `slot`, its number and bytes, which takes the place of one with this number; None: all are known.
No later job names slots that are `gone`. `layout` is of the bytes in all slots, `keys` are the top-level keys in the
state's order, `trees` the skeletons of some of them; what is None, empty or left out is as before.

What a job names is settled when the writer receives it, not when it does it. A `hold` is never answered.

Unix sockets of this user by name, in a folder that only this user can enter.

So no other user can connect, fill the queue of connections, or take a name. With abstract sockets, which need no
folder, all users can: their names are listed. The folder has a random name, which no other user can have taken
before. What a process that was killed has left there goes when the next one listens.

The pulse: one page of memory in which the trainer says what it is doing, readable by the writer after its death.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import json
import math
import mmap
import os
import socket
import stat
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ckpt_engine.copy.host_memory import MORE_FILES, shared_memory
from ckpt_engine.errors import StateError, WriterError
from ckpt_engine.observe import events
from ckpt_engine.observe.metrics import MEASURED, TIMES, RunTimes

_LENGTH = struct.Struct("<Q")
_MAX_FDS = 64
_MAX_MESSAGE_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 20

Body = dict[str, Any]


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


@dataclass(slots=True)
class _Frame:
    """What is left to send of one message, and descriptors (our own duplicates) that go with its first byte."""

    rest: memoryview
    fds: tuple[int, ...]


def duplicates(fds: Sequence[int]) -> tuple[int, ...]:
    """Descriptors of the same files for a message, which has them to itself.

    Raises:
        StateError: this process has as many open files as it may have.
    """
    made: list[int] = []
    try:
        made.extend(map(os.dup, fds))
    except OSError as err:
        _close_all(made)
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
        self._closed = False
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
            if self._closed:
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
            if not self._closed:
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
                self._drop_outgoing()  # the peer is gone: its end of file or pidfd says so to the owner
                return
            _close_all(frame.fds)
            frame.fds = ()
            frame.rest = frame.rest[sent:]
            if not frame.rest:
                self._outgoing.popleft()

    def _drop_outgoing(self) -> None:
        for frame in self._outgoing:
            _close_all(frame.fds)
        self._outgoing.clear()

    def wake(self) -> None:
        """Wake the owner's selector. Any thread."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.wake_fd, 1)

    def clear_wake(self) -> None:
        """Take note of a wake-up."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)

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

    def close(self) -> None:
        """Close everything, unsent messages included. Idempotent, any thread once the owner no longer selects."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._drop_outgoing()
            _close_all(tuple(self._fds))
            self._fds.clear()
            self._sock.close()
            os.close(self.wake_fd)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


START = "start"
ARENA = "arena"
PERSIST = "persist"
HOLD = "hold"
CANCEL = "cancel"
PULSE = "pulse"
ROWS = "rows"
PARTNER = "partner"
CLOSE = "close"
LEAVE = "leave"

STARTED = "started"
REFUSED = "refused"
EVENT = "event"
DONE = "done"
FREED = "freed"
MIRRORED = "mirrored"
COPYING = "copying"
CLOSED = "closed"
REQUEST = "request"


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply to a request of `control`, and the descriptors that go with it, which are closed when it is sent."""

    body: Body
    fds: Sequence[int] = ()


def nothing(why: str) -> Reply:
    """The reply to who asks for a snapshot that is not to be had here."""
    return Reply({"snapshot": None, "why": why})


Answer = Callable[[Body], Reply | None]
"""What to reply to a request; None: not known yet, to be asked again. Must return at once."""


def event(found: events.Event) -> Body:
    """The message that carries an event."""
    return {"kind": EVENT, "event": events.to_json(found)}


_PLACES = ("/tmp", "/dev/shm")
"""Not what the environment names: who asks may have another one than who listens."""
_BACKLOG = 128
_RETRY_SECONDS = 0.02
_UCRED = struct.Struct("3i")
_TIMEVAL = struct.Struct("ll")


def name_of(root_url: str, rank: int = 0) -> str:
    """The name of the socket of the writer of the run at `root_url` for a rank. Touches no storage."""
    place = root_url.rstrip("/")
    if "://" not in root_url:
        place = str(Path(root_url).expanduser().absolute())
    elif root_url.partition("://")[0].lower() == "file":
        place = str(Path(unquote(urlsplit(root_url).path)))
    if rank:
        place += f"#{rank}"
    return hashlib.sha256(place.encode()).hexdigest()[:32]


def folders() -> list[str]:
    """The folders of this user for such sockets: their names can be had by anybody, so each is looked at."""
    found = []
    for place in _PLACES:
        with suppress(OSError), os.scandir(place) as entries:
            names = sorted(entry.path for entry in entries if entry.name.startswith(_prefix()))
            found += [name for name in names if _is_private(name)]
    return found


def _prefix() -> str:
    return f"ckpt-engine-{os.geteuid()}-"


def _is_private(path: str) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _own_folder() -> str:
    """A folder of this user, made if there is none.

    Raises:
        OSError: none can be made.
    """
    if found := folders():
        return found[0]
    error = OSError("there is no place for sockets")
    for place in _PLACES:
        try:
            return tempfile.mkdtemp(prefix=_prefix(), dir=place)
        except OSError as err:
            error = err
    raise error


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end: who connected, or who listens there."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def connect(name: str, timeout: float) -> socket.socket | None:
    """A connection to the process of this user that listens under a name; None: there is none.

    Raises:
        TimeoutError: it does not take connections.
    """
    for folder in folders():
        sock = _connected(f"{folder}/{name}", timeout)
        if sock is not None:
            return sock
    return None


def _connected(path: str, timeout: float) -> socket.socket | None:
    sock, micros = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), max(1, int(timeout * 1e6))
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(*divmod(micros, 1_000_000)))
        sock.connect(path)
        if peer_of(sock)[1] == os.geteuid():
            return sock
    except (ConnectionRefusedError, FileNotFoundError):
        pass  # the name is free, or who had it was killed
    except BlockingIOError as err:
        sock.close()
        raise TimeoutError(f"{path} takes no connections") from err
    except BaseException:
        sock.close()
        raise
    sock.close()
    return None


class SocketListener:
    """Listens under a name.

    Raises:
        OSError: a living process has the name, or there is no place for it.
    """

    def __init__(self, name: str, timeout: float) -> None:
        folder = _own_folder()
        self._path = Path(folder, name)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            with _alone_in(folder, timeout):
                for left in Path(folder).iterdir():
                    if not _listens(left):
                        left.unlink(missing_ok=True)
                self._sock.bind(str(self._path))
                self._sock.listen(_BACKLOG)
                self._inode = self._path.lstat().st_ino
        except BaseException:
            self._sock.close()
            raise

    def fileno(self) -> int:
        """Readable when somebody connects."""
        return self._sock.fileno()

    def accept(self) -> socket.socket | None:
        """A connection of this user; None: who connected is gone again, or another user."""
        try:
            sock, _ = self._sock.accept()
        except OSError:
            return None
        if peer_of(sock)[1] == os.geteuid():
            return sock
        sock.close()
        return None

    def close(self) -> None:
        """Give up the name: no one new gets in."""
        with suppress(OSError):
            # Before it is closed: as long as it listens the name is not taken.
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()
        self._sock.close()


@contextmanager
def _alone_in(folder: str, timeout: float) -> Iterator[None]:
    """While no other process opens a socket there: one that was just bound is not taken for one that was left.

    Raises:
        BlockingIOError: somebody does for more than `timeout` seconds.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_RETRY_SECONDS)
        yield
    finally:
        os.close(fd)


def _listens(path: Path) -> bool:
    """Whether somebody listens at a socket, as busy as he may be."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        try:
            sock.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # its queue is full; or it is no socket, and not ours to judge
    return True


_BEAT = struct.Struct("<qd")
_FILL = struct.Struct("<qq")
_FILL_OFFSET = 64
_SPENT_NAMES = (*TIMES, *MEASURED)
_SPENT = struct.Struct(f"<qdq{len(_SPENT_NAMES)}dq")
_SPENT_OFFSET = 128
_SPENT_SECONDS = 1.0
_LOOKS = 3


@dataclass(frozen=True, slots=True)
class Beat:
    """What the trainer said last: the step that it has begun, counted so that the snapshot before it has `step - 1`.

    `instant_monotonic` is the machine's `time.monotonic()` at that moment.
    """

    step: int
    instant_monotonic: float


@dataclass(frozen=True, slots=True)
class Fill:
    """The arena slot that the trainer has begun to fill last, and the job that it fills it for."""

    slot: int
    job: int


@dataclass(frozen=True, slots=True)
class SpentTimes:
    """What the trainer says of its time; see `run_records.Attempt` for these fields."""

    started: float
    step: int
    times: dict[str, float]


class Pulse:
    """The trainer's end: `fd` is what `WriterClient.attach_pulse` takes.

    Raises:
        StateError: the system refuses the memory.
    """

    def __init__(self) -> None:
        self.fd, self._page = shared_memory("ckpt-pulse", mmap.PAGESIZE)
        self._step, self._moment = self._page[:8].cast("q"), self._page[8:16].cast("d")
        self._count, self._spends_at = 0, -math.inf
        self.beat(-1)
        self.fill(-1, -1)

    def beat(self, step: int) -> bool:
        """Say that `step` begins; whether it is time to `spend` again. Costs less than a microsecond."""
        now = time.monotonic()
        self._step[0], self._moment[0] = step, now
        return now >= self._spends_at

    def fill(self, slot: int, job: int) -> None:
        """Say that `slot` changes from now on, for `job`. Costs as little as `beat`."""
        _FILL.pack_into(self._page, _FILL_OFFSET, slot, job)

    def spend(self, times: RunTimes) -> None:
        """Say what the time went into."""
        self._count, self._spends_at = self._count + 1, time.monotonic() + _SPENT_SECONDS
        measured = times.measured()
        values = (*times.seconds.values(), *map(measured.get, MEASURED, repeat(0.0)))
        _SPENT.pack_into(
            self._page, _SPENT_OFFSET, self._count, times.started, times.step, *map(float, values), self._count
        )

    def close(self) -> None:
        """Give the page back; who has the descriptor keeps it. Idempotent."""
        if self.fd >= 0:
            self._step.release()
            self._moment.release()
            self._page.release()
            os.close(self.fd)
            self.fd = -1


def read_pulse(fd: int) -> Beat | None:
    """The last beat; None if there was none, or the descriptor is something else than a pulse.

    Only of a trainer that is gone: a beat under way is read torn.
    """
    found = _read(fd, _BEAT, 0)
    return Beat(*found) if found is not None and found[0] >= 0 else None


def read_fill(fd: int) -> Fill | None:
    """What was filled last; None as `read_pulse`. Only of a trainer that is gone."""
    found = _read(fd, _FILL, _FILL_OFFSET)
    return Fill(*found) if found is not None and found[0] >= 0 else None


def read_spent(fd: int) -> SpentTimes | None:
    """What the time went into, as it was said last; None as `read_pulse`. Also of a trainer that lives."""
    for _ in range(_LOOKS):
        found, again = _read(fd, _SPENT, _SPENT_OFFSET), _read(fd, _SPENT, _SPENT_OFFSET)
        if found is None or found[0] == 0:
            return None
        if found == again and found[0] == found[-1]:
            times = zip(_SPENT_NAMES, (round(max(0.0, one), 6) for one in found[3:-1]), strict=True)
            return SpentTimes(found[1], found[2], {name: seconds for name, seconds in times if seconds})
    return None


def _read(fd: int, kind: struct.Struct, offset: int) -> tuple[Any, ...] | None:
    try:
        data = os.pread(fd, kind.size, offset)
    except OSError:
        return None
    return kind.unpack(data) if len(data) == kind.size else None
