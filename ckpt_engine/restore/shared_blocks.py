"""The blocks of one snapshot in a file that the processes of a node share.

The file is in shared memory and has no name any more: it is gone with the last process that has it open. A process that
fetches a block has a lock on it, which the kernel frees if that process dies."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import zlib
from contextlib import suppress
from enum import Enum

from ckpt_engine.copy import memory_limits

SHARED_MEMORY = "/dev/shm"
"""The name of a file in it is random, and removed before anything is written."""
BLOCK_BYTES = 8 << 20
_REGION = 44
"""Each snapshot has 2**44 bytes of the file for itself, most of them never touched; in the second half its table."""
_REGIONS = 1 << 18
_TABLE = 1 << (_REGION - 1)
_PRESENT = b"\x01"


class BlockClaim(Enum):
    """What `SharedBlocks.claim` says of a block."""

    PRESENT = 1
    MINE = 2
    COMING = 3
    TAKEN = 4


def open_shared(name: str) -> tuple[int, bool]:
    """The shared file of this name, made if there is none; whether it was made here.

    Raises:
        OSError: there is no shared memory, or it is full.
    """
    path = f"{SHARED_MEMORY}/{name}"
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
    except FileExistsError:
        return os.open(path, flags), False


def remove_shared(name: str) -> None:
    """Take the name away. A process that has the file open keeps it."""
    with suppress(FileNotFoundError):
        os.unlink(f"{SHARED_MEMORY}/{name}")  # noqa: PTH108


def room_bytes(fd: int) -> int:
    """How much a shared file may hold without taking what others need: what it has, and half of what is free."""
    there = os.statvfs(SHARED_MEMORY)
    free_bytes = there.f_bavail * there.f_frsize
    room = memory_limits.look()  # of a control group, too: shared memory counts there
    if room is not None:
        free_bytes = min(free_bytes, room.nbytes)
    return os.fstat(fd).st_blocks * 512 + free_bytes // 2


class SharedBlocks:
    """The blocks of one snapshot in a shared file. Thread safe.

    Args:
        fd: of the file; every process has opened it for itself.
        snapshot: the same in all processes.
    """

    def __init__(self, fd: int, snapshot: str) -> None:
        self._fd = fd
        # Two snapshots in one region would be noticed by their digests.
        self._base = (zlib.crc32(snapshot.encode()) % _REGIONS) << _REGION
        self._mine: set[int] = set()
        self._changed = threading.Condition()

    def claim(self, block: int) -> BlockClaim:
        """PRESENT: read it. MINE: fetch it, `put` it or `give_up`. COMING: another thread does. TAKEN: a neighbour."""
        with self._changed:
            if self._is_present(block):
                return BlockClaim.PRESENT
            if block in self._mine:
                return BlockClaim.COMING
            if not self._lock(block, fcntl.F_WRLCK):
                return BlockClaim.TAKEN
            if self._is_present(block):  # it has come just before the lock
                self._lock(block, fcntl.F_UNLCK)
                return BlockClaim.PRESENT
            self._mine.add(block)
            return BlockClaim.MINE

    def put(self, block: int, data: memoryview) -> None:
        """Share a block that was claimed.

        Raises:
            OSError: shared memory is full; the block is given up.
        """
        try:
            at = self._base + block * BLOCK_BYTES
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], at + done)
            os.pwrite(self._fd, _PRESENT, self._base + _TABLE + block)
        finally:
            self.give_up(block)

    def give_up(self, block: int) -> None:
        """Let others fetch a block that was claimed."""
        with self._changed:
            self._mine.discard(block)
            self._lock(block, fcntl.F_UNLCK)
            self._changed.notify_all()

    def read(self, block: int, start: int, out: memoryview) -> None:
        """Fill `out` from byte `start` of a block that is present."""
        at = self._base + block * BLOCK_BYTES + start
        done = 0
        while done < len(out):
            done += os.preadv(self._fd, [out[done:]], at + done)

    def wait(self, seconds: float) -> None:
        """Return when this process has fetched a block, or given one up, or after `seconds`."""
        with self._changed:
            self._changed.wait(seconds)

    def _is_present(self, block: int) -> bool:
        return os.pread(self._fd, 1, self._base + _TABLE + block) == _PRESENT

    def _lock(self, block: int, kind: int) -> bool:
        """Locks belong to the open file, so that those of other processes, and only those, are in the way."""
        wanted = struct.pack("hhqqi", kind, os.SEEK_SET, self._base + _TABLE + block, 1, 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, wanted)
        except BlockingIOError:
            return False
        return True
