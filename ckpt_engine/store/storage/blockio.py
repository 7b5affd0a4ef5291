"""Moving big blocks between memory and a file, around the page cache where the file system takes that.

Direct I/O needs addresses, offsets and sizes that are multiples of a page. Nobody is asked whether that holds: the
kernel says EINVAL, and the rest goes through the page cache.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from ckpt_engine.store.storage.disk import Disk
from ckpt_engine.store.storage.regular import open_regular

PAGE_BYTES = 4096
SLICE_BYTES = 64 << 20
"""Bytes per system call: big enough to run at the device's rate, small enough to be interrupted."""
DIRECT_MIN_BYTES = 1 << 20
"""Below this the page cache is faster."""


def write_blocks(disk: Disk, fd: int, blocks: Sequence[memoryview]) -> int:
    """Write `blocks` back to back from the start of an empty file; returns its size. Not synced.

    Raises:
        OSError: from the file system; the file is then of no use.
    """
    end = 0
    for block in blocks:
        data = block.cast("B")
        done = _write_direct(disk, fd, data, end) if len(data) >= DIRECT_MIN_BYTES and end % PAGE_BYTES == 0 else 0
        while done < len(data):
            done += disk.write(fd, data[done : done + SLICE_BYTES], end + done)
        end += len(data)
    return end


def _write_direct(disk: Disk, fd: int, data: memoryview, start: int) -> int:
    """Write the whole pages of `data`; returns how many bytes were taken, 0 where direct writes are impossible."""
    whole = len(data) - len(data) % PAGE_BYTES
    done = 0
    try:
        disk.bypass_cache(fd, on=True)
    except OSError as err:
        if err.errno != errno.EINVAL:
            raise
        return 0
    try:
        while done < whole:
            done += disk.write(fd, data[done : min(done + SLICE_BYTES, whole)], start + done)
    except OSError as err:
        if err.errno != errno.EINVAL:
            raise
    finally:
        disk.bypass_cache(fd, on=False)
    return done


def read_into(path: str, start: int, out: memoryview) -> int:
    """Fill `out` from `start` on; returns how many bytes there were, fewer only at the end of the file.

    What the page cache has is copied from there; the rest is read around it where `out` and `start` are aligned: that
    is faster, takes a fifth of the processor time and evicts nothing. Several threads may read one file.

    Raises:
        CorruptError: it is no regular file.
        OSError: from the file system.
    """
    reader = _Reader(path)
    try:
        done = 0
        while done < len(out):
            part = out[done : done + SLICE_BYTES]
            got = reader.cached(part, start + done)
            if got is None:
                got = reader.direct(part, start + done) or reader.buffered(part, start + done)
            if got == 0:
                break
            done += got
        return done
    finally:
        reader.close()


class _Reader:
    """Three ways to read one file; `None` or 0 says that a way is not possible here."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = open_regular(path, os.O_RDONLY)
        self._direct_fd: int | None = None
        self._direct_works = True
        self._probe_works = True

    def close(self) -> None:
        os.close(self._fd)
        if self._direct_fd is not None:
            os.close(self._direct_fd)

    def cached(self, part: memoryview, at: int) -> int | None:
        """The bytes that the page cache has at `at`; None if it has none or cannot say."""
        if len(part) < DIRECT_MIN_BYTES or not self._probe_works:
            return None
        try:
            # Ask for one page first: asked for all, the kernel starts to read ahead what is then read a second time.
            os.preadv(self._fd, [part[:PAGE_BYTES]], at, os.RWF_NOWAIT)
            return os.preadv(self._fd, [part], at, os.RWF_NOWAIT)
        except BlockingIOError:
            return None
        except OSError as err:
            if err.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            self._probe_works = False
            return None

    def direct(self, part: memoryview, at: int) -> int:
        """Read whole pages around the page cache; 0 where that is impossible."""
        whole = len(part) - len(part) % PAGE_BYTES
        if whole < DIRECT_MIN_BYTES or at % PAGE_BYTES or not self._direct_works:
            return 0
        try:
            if self._direct_fd is None:
                self._direct_fd = open_regular(self._path, os.O_RDONLY | os.O_DIRECT)
            return os.preadv(self._direct_fd, [part[:whole]], at)
        except OSError as err:
            if err.errno != errno.EINVAL:
                raise
            self._direct_works = False
            return 0

    def buffered(self, part: memoryview, at: int) -> int:
        """Read through the page cache."""
        return os.preadv(self._fd, [part], at)
