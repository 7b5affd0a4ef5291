"""Moving big blocks between memory and a file, around the page cache where the file system takes that.

Direct I/O needs addresses, offsets and sizes that are multiples of a page. Nobody is asked whether that holds: the
kernel says EINVAL, and the rest goes through the page cache.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from ckpt_engine.store.storage.disk import Disk

PAGE_BYTES = 4096
SLICE_BYTES = 32 << 20
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
