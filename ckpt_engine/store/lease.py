"""Takes the lease of a run: one process at a time writes it.

On a local disk it is a lock the kernel frees when its holder dies, on a file that says who holds it. Elsewhere, and on
mounts whose locks other machines do not see, it is an object that its holder renews (`object_lease`). Readers never
need it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict
from functools import partial
from typing import Self

from ckpt_engine.errors import CkptError, LeaseHeldError, SealError
from ckpt_engine.store import names
from ckpt_engine.store.lease_holder import Lease, LeaseHolder, parse_holder
from ckpt_engine.store.lock_scope import lockable
from ckpt_engine.store.object_lease import LeaseSlot, Timing, take
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.sealed_json import seal, stored
from ckpt_engine.store.storage.base import Folder, Storage
from ckpt_engine.store.storage.disk import open_regular, translated, translating
from ckpt_engine.undo import on_failure

RETRY_SECONDS = 0.1
_TEXT_BYTES = 1023
_REMOVED = (errno.ENOENT, errno.ESTALE)
"""The second one is said of an open file that another NFS client has removed."""
_held: set[LocalLease] = set()


def acquire(
    storage: Storage,
    holder: LeaseHolder | None = None,
    wait_seconds: float = 0.0,
    *,
    is_rotating: bool = False,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Lease:
    """Take the lease of the run in `storage`, waiting at most `wait_seconds` for its holder to give it back.

    Args:
        is_rotating: it may be sealed so that this process does not open it, as an interrupted rotation leaves it.

    Raises:
        LeaseHeldError: naming the holder.
        ForeignError: the folder has other files; it is left untouched.
        StorageError: read-only, full, or not a folder.
        CorruptError: the lease file is a link or a pipe: it is neither followed nor written.
    """
    with suppress(SealError) if is_rotating else nullcontext():
        Repository(storage).record()
    holder, timing = holder or LeaseHolder.current(), Timing(clock=clock, pause=pause)
    try:
        folder = lockable(storage)
        if folder is not None:
            return _acquire_lock(folder, holder, wait_seconds, timing)
        return take(LeaseSlot(storage), asdict(holder), wait_seconds, timing)
    except LeaseHeldError as err:
        other = read_holder(storage)
        whose, hint = str(other or "another process"), "stop it, wait for it, or choose another folder"
        if other is not None and other.is_process_of(holder):
            whose = f"another writer of this process: {other}"
            hint = "close() its Checkpointer, or wait until it is done; two runs at the same time need two folders"
        hint = way_out_of_links(storage) or hint
        raise LeaseHeldError(f"the run at {storage.url} is being written by {whose}", hint=hint) from err


def _acquire_lock(storage: Folder, holder: LeaseHolder, wait_seconds: float, timing: Timing) -> LocalLease:
    deadline = timing.clock() + wait_seconds
    while (lease := LocalLease.try_acquire(storage, holder)) is None:
        left = deadline - timing.clock()
        if left <= 0:
            raise LeaseHeldError(f"{storage.url} is locked")
        timing.pause(min(RETRY_SECONDS, left))
    return lease


def read_holder(storage: Storage) -> LeaseHolder | None:
    """Who the lease file names, owner or not; None if it names none, or is unreadable."""
    with suppress(CkptError):
        return stored(storage, names.LEASE, parse_holder)
    return None


def way_out_of_links(storage: Storage) -> str | None:
    """What to do where the lease file has further names, in copies that `cp -al` makes; None: it has one.

    A lock is on the file and not on its name: who holds it may write any of these folders.
    """
    folder = lockable(storage)
    with suppress(OSError):  # it is gone meanwhile
        if folder is not None and (links := os.lstat(folder.path(names.LEASE)).st_nlink) > 1:
            return (
                f"{names.LEASE} has {links} hard links, so that process may write another folder that shares the file "
                f"(`cp -al` makes such copies): if it does, `rm {folder.path(names.LEASE)}` and start again"
            )
    return None


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
                with on_failure(partial(os.close, fd)):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _write_text(fd, seal(asdict(holder)))
            except BlockingIOError:
                return None
        return cls(fd, path)

    def check(self) -> None:
        if self._fd < 0:
            raise LeaseHeldError(f"the lease {self._path} was given back")
        try:
            is_there = os.path.samestat(os.fstat(self._fd), os.lstat(self._path))
        except OSError as err:
            if err.errno not in _REMOVED:
                raise translated(err, "check the lease", self._path) from err
            is_there = False
        if not is_there:
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


def _write_text(fd: int, text: bytes) -> None:
    """Replace what the lease file says. On a full disk the lock alone must do, or nothing could be pruned."""
    nbytes = os.fstat(fd).st_size
    if nbytes > names.SMALL_BYTES:  # not our lease, and more than is to be written or read
        os.ftruncate(fd, _TEXT_BYTES + 1)
        nbytes = _TEXT_BYTES + 1
    padded = text.ljust(max(_TEXT_BYTES, nbytes - 1)) + b"\n"
    try:
        os.pwrite(fd, padded, 0)  # in place and never shorter: needs no new block
        os.fsync(fd)  # on NFS no other machine sees it before
    except OSError as err:
        if err.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def _drop_in_child() -> None:
    """A forked child shares the locks: close its copies (without unlocking), or leases outlive their holder."""
    for lease in list(_held):
        fd, lease._fd = lease._fd, -1
        if fd >= 0:
            os.close(fd)


os.register_at_fork(after_in_child=_drop_in_child)
