"""Unix sockets of this user by name, in a folder that only this user can enter.

So no other user can connect, fill the queue of connections, or take a name. With abstract sockets, which need no
folder, all users can: their names are listed. The folder has a random name, which no other user can have taken
before. What a process that was killed has left there goes when the next one listens."""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ckpt_engine.store.storage.disk import closing_fd
from ckpt_engine.undo import on_failure

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
    micros = max(1, int(timeout * 1e6))
    # One that is refused or missing: the name is free, or who had it was killed.
    with suppress(ConnectionRefusedError, FileNotFoundError), ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(*divmod(micros, 1_000_000)))
        try:
            sock.connect(path)
        except BlockingIOError as err:
            raise TimeoutError(f"{path} takes no connections") from err
        if peer_of(sock)[1] == os.geteuid():
            undo.pop_all()
            return sock
    return None


class SocketListener:
    """Listens under a name.

    Raises:
        OSError: a living process has the name, or there is no place for it.
    """

    def __init__(self, name: str, timeout: float) -> None:
        folder = _own_folder()
        self._path = Path(folder, name)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with on_failure(self._sock.close), _alone_in(folder, timeout):
            for left in Path(folder).iterdir():
                if not _listens(left):
                    left.unlink(missing_ok=True)
            self._sock.bind(str(self._path))
            self._sock.listen(_BACKLOG)
            self._inode = self._path.lstat().st_ino

    def accept(self) -> socket.socket | None:
        """The next connection of this user; None: who connected is gone again, or another user, or this is closed."""
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
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # who waits in `accept` returns
        self._sock.close()


@contextmanager
def _alone_in(folder: str, timeout: float) -> Iterator[None]:
    """While no other process opens a socket there: one that was just bound is not taken for one that was left.

    Raises:
        BlockingIOError: somebody does for more than `timeout` seconds.
    """
    with closing_fd(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)) as fd:
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
