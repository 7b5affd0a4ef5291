"""What the kernel reports about pages of files and of memory."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
from pathlib import Path

PAGE_BYTES = 4096
_libc = ctypes.CDLL(None)


def is_resident(fd: int, at: int) -> bool:
    """Whether the page cache has the page at `at`, as far as the kernel says so.

    Asked with `RWF_NOWAIT` for a page that is missing, the kernel reads ahead what is then read a second time.
    """
    answer = ctypes.c_ubyte(0)
    try:
        page = mmap.mmap(fd, 1, access=mmap.ACCESS_COPY, offset=at - at % mmap.ALLOCATIONGRANULARITY)
    except (OSError, ValueError):  # a file system without maps; the end of the file
        return False
    with page:
        _libc.mincore(ctypes.byref(ctypes.c_char.from_buffer(page)), ctypes.c_size_t(1), ctypes.byref(answer))
    return bool(answer.value & 1)


_PAGEMAP = Path("/proc/self/pagemap")
_PAGEMAP_SCAN = 0xC0606610
_HUGE = 1 << 6  # PAGE_IS_HUGE


def is_in_huge_page(address: int) -> bool:
    """Whether the memory at `address` is part of a huge page; also True where the kernel cannot say (before 6.7)."""
    start, region = address - address % PAGE_BYTES, (ctypes.c_uint64 * 3)()
    # struct pm_scan_arg: its size, flags, from, to, where it ended, room for regions, how many, pages to be found at
    # most, categories that are inverted, that a page must have, any of which it must have, and that are returned.
    ask = (ctypes.c_uint64 * 12)(
        96, 0, start, start + PAGE_BYTES, 0, ctypes.addressof(region), 1, 0, 0, _HUGE, 0, _HUGE
    )
    try:
        with _PAGEMAP.open("rb", buffering=0) as pagemap:
            return int(fcntl.ioctl(pagemap, _PAGEMAP_SCAN, ask)) > 0
    except OSError:
        return True
