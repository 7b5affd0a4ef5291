"""The lease: one process at a time writes a run.

On a local disk it is a lock the kernel frees when its holder dies, on a file that says who holds it. Elsewhere, and on
mounts whose locks other machines do not see, it is an object with a heartbeat (`lease_objects`). Readers never need it.

Which file locks other machines see: read from the list of mounts.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from ckpt_engine.errors import CkptError, CorruptError, LeaseHeldError
from ckpt_engine.store import container, lease_objects, names
from ckpt_engine.store.container import seal, unseal
from ckpt_engine.store.lease_objects import Lease, LeaseSlot, Timing
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Folder, Storage
from ckpt_engine.store.storage.disk import open_regular, translated, translating

RETRY_SECONDS = 0.1
_TEXT_BYTES = 1023
_COMMAND_CHARACTERS = 10_000


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """Who holds a lease: shown to those who are refused. `started` is wall-clock seconds, for display."""

    pid: int
    host: str
    started: float
    command: str

    @classmethod
    def current(cls) -> Self:
        """This process, from now on."""
        command = " ".join([sys.executable, *sys.argv])[:_COMMAND_CHARACTERS]
        return cls(os.getpid(), socket.gethostname(), time.time(), command)

    def is_process_of(self, other: LeaseHolder) -> bool:
        """Whether both are the same process, at whatever time."""
        return (self.pid, self.host) == (other.pid, other.host)

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.started, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on {self.host} since {since} ({self.command})"


def acquire(
    storage: Storage,
    holder: LeaseHolder | None = None,
    wait_seconds: float = 0.0,
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Lease:
    """Take the lease of the run in `storage`, waiting at most `wait_seconds` for its holder to give it back.

    Raises:
        LeaseHeldError: naming the holder.
        ForeignError: the folder has other files; it is left untouched.
        StorageError: read-only, full, or not a folder.
        CorruptError: the lease file is a link or a pipe: it is neither followed nor written.
    """
    Repository(storage).record()
    holder = holder or LeaseHolder.current()
    try:
        folder = lockable(storage)
        if folder is not None:
            return _acquire_lock(folder, holder, wait_seconds, clock, pause)
        timing = Timing(clock=clock, pause=pause)
        return lease_objects.take(LeaseSlot(storage), asdict(holder), wait_seconds, timing)
    except LeaseHeldError as err:
        other = read_holder(storage)
        if other is not None and other.is_process_of(holder):
            raise LeaseHeldError(
                f"the run at {storage.url} is being written by another writer of this process: {other}",
                hint="close() its Checkpointer, or wait until it is done; two runs at the same time need two folders",
            ) from err
        raise LeaseHeldError(
            f"the run at {storage.url} is being written by {other or 'another process'}",
            hint="stop it, wait for it, or choose another folder",
        ) from err


def _acquire_lock(
    storage: Folder,
    holder: LeaseHolder,
    wait_seconds: float,
    clock: Callable[[], float],
    pause: Callable[[float], None],
) -> LocalLease:
    deadline = clock() + wait_seconds
    while (lease := LocalLease.try_acquire(storage, holder)) is None:
        left = deadline - clock()
        if left <= 0:
            raise LeaseHeldError(f"{storage.url} is locked")
        pause(min(RETRY_SECONDS, left))
    return lease


def read_holder(storage: Storage) -> LeaseHolder | None:
    """Who the lease file names, owner or not; None if it names none, or is unreadable."""
    try:
        return parse_holder(storage.get(names.LEASE), f"{storage.url}/{names.LEASE}")
    except CkptError:
        return None


def parse_holder(text: bytes, where: str) -> LeaseHolder | None:
    """Who a lease file with this text names; None if it was given back.

    Raises:
        CorruptError: it is damaged.
    """
    if not text.strip(b"{} \n"):
        return None
    row = unseal(text, where)
    row.pop("lease", None)
    try:
        holder = LeaseHolder(**row)
        container.require(
            container.is_whole(holder.pid) and container.is_time(holder.started), "no process, or no time"
        )
        container.require(type(holder.host) is str and type(holder.command) is str, "no host, or no command")
        return holder
    except (TypeError, ValueError) as err:
        raise CorruptError(f"{where} is damaged: {err}") from err


class LocalLease(Lease):
    """A lock (`flock`) on the lease file. The kernel frees it when the process dies, however it dies."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        _held.add(self)

    @classmethod
    def try_acquire(cls, storage: Folder, holder: LeaseHolder) -> Self | None:
        """The lease, or None if another process, or another lease of this one, holds it."""
        path = storage.path(names.LEASE)
        with translating("make the folder", storage.root, "choose a folder on a disk where this user may make one"):
            storage.make_folder(storage.root)
        with translating("take the lease", path):
            fd = open_regular(path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _write_text(fd, seal(asdict(holder)))
            except BlockingIOError:
                os.close(fd)
                return None
            except BaseException:
                os.close(fd)
                raise
        return cls(fd, path)

    def check(self) -> None:
        if self._fd < 0:
            raise LeaseHeldError(f"the lease {self._path} was given back")
        there = None
        try:
            mine = os.fstat(self._fd)
            there = Path(self._path).lstat()
        except OSError as err:
            if err.errno not in _REMOVED:
                raise translated(err, "check the lease", self._path) from err
        if there is None or (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino):
            raise LeaseHeldError(
                f"the lease {self._path} was removed or replaced: its folder is gone, or another writer works there",
                hint="stop this run, and any other one in that folder, and start it again",
            )

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                _write_text(fd, b"")
            except OSError as err:
                if err.errno not in _REMOVED:
                    raise translated(err, "give back the lease", self._path) from err
            finally:
                os.close(fd)
                _held.discard(self)

    def _drop_in_child(self) -> None:
        """A forked child shares the lock: close its copy (without unlocking), or the lease outlives its holder."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _write_text(fd: int, text: bytes) -> None:
    """Replace what the lease file says. On a full disk the lock alone must do, or nothing could be pruned."""
    nbytes = os.fstat(fd).st_size
    if nbytes > names.SMALL_BYTES:  # no lease of ours, and more than is to be written or read
        os.ftruncate(fd, _TEXT_BYTES + 1)
        nbytes = _TEXT_BYTES + 1
    padded = text.ljust(max(_TEXT_BYTES, nbytes - 1)) + b"\n"
    try:
        os.pwrite(fd, padded, 0)  # in place and never shorter: needs no new block
        os.fsync(fd)  # on NFS no other machine sees it before
    except OSError as err:
        if err.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


_REMOVED = (errno.ENOENT, errno.ESTALE)
"""The second one is said of an open file that another NFS client has removed."""
_held: set[LocalLease] = set()


def _drop_all_in_child() -> None:
    for lease in list(_held):
        lease._drop_in_child()


os.register_at_fork(after_in_child=_drop_all_in_child)


_MOUNTS = Path("/proc/self/mountinfo")
_UNSHARED = frozenset(
    {"9p", "cifs", "smb3", "virtiofs", "fuse.sshfs", "fuse.rclone", "fuse.s3fs", "fuse.gcsfuse", "fuse.goofys"}
)
"""Types on which a lock holds on this machine only, or may."""
_UNSHARED_OPTIONS = frozenset({"local_lock=all", "local_lock=flock", "nolock", "localflock", "nobrl"})


def locks_are_shared(path: str, mounts: str | None = None) -> bool:
    """Whether a lock (`flock`) keeps out other machines that mount the file system of `path`.

    True on local disks, NFS with its normal options and cluster file systems; also where the system does not tell.

    Args:
        mounts: the text of `/proc/self/mountinfo`.
    """
    if mounts is None:
        try:
            mounts = _MOUNTS.read_text()
        except OSError:
            return True
    best, shared = "", True
    resolved = str(Path(path).resolve())
    for line in mounts.splitlines():
        mounted, _, source = line.partition(" - ")
        fields, tail = mounted.split(), source.split()
        if len(fields) < 6 or len(tail) < 3:
            continue
        point = fields[4].replace("\\040", " ")
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            options = {*fields[5].split(","), *tail[2].split(",")}
            best, shared = point, tail[0] not in _UNSHARED and not options & _UNSHARED_OPTIONS
    return shared


def lockable(storage: Storage) -> Folder | None:
    """The folder of `storage`, if a lock there keeps out everybody."""
    folder = storage.capabilities.folder
    return folder if folder is not None and locks_are_shared(folder.root) else None
