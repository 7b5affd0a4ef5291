"""Touches fresh memory fast.

First touch costs more than the copy into it. It is several times faster in huge pages; but where memory is fragmented
the kernel makes them by compaction, in the middle of the page fault, so look first. And it is several times faster if
asked for beforehand than page by page in the middle of a read.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from contextlib import suppress
from pathlib import Path

from ckpt_engine.copy.host_memory import HUGE_BYTES, LIBC, POPULATE_WRITE
from ckpt_engine.errors import StateError

_ORDER = 9  # 2^9 small pages
_BUDDY = Path("/proc/buddyinfo")


def advise(memory: mmap.mmap) -> None:
    """Ask for huge pages for as much of `memory`, from its start on, as half of those that are free have room for."""
    if len(memory) >= HUGE_BYTES and (nbytes := min(len(memory), free_huge_bytes() // 2)) >= HUGE_BYTES:
        with suppress(OSError):  # a kernel that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE, 0, nbytes)


def free_huge_bytes(buddy: Path = _BUDDY) -> int:
    """Free memory in blocks of at least a huge page; 0 where the kernel does not tell."""
    try:
        lines = buddy.read_text().splitlines()
    except OSError:
        return 0
    zones = (enumerate(line.rpartition("zone")[2].split()[1:]) for line in lines)
    return mmap.PAGESIZE * sum(int(count) << order for counts in zones for order, count in counts if order >= _ORDER)


def populate(address: int, nbytes: int) -> None:
    """Make the pages of fresh memory present and writable. Any thread; releases the GIL.

    Args:
        address: of the first byte; rounded down to a page. Memory that was touched before keeps its content.
        nbytes: up to where.

    Raises:
        StateError: not enough memory.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = address + nbytes - start
    if LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), POPULATE_WRITE) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.EAGAIN):  # those two: an older kernel, whose page faults do it later
            raise StateError(
                f"cannot get {size / 1e9:.2f} GB of memory: {os.strerror(code)}", hint="free memory, or lower `slots`"
            )


STEP_BYTES = 8 << 20
"""Populated at once: four huge pages."""
DEAR_SECONDS = 0.4e-9 * STEP_BYTES
"""Processor time of as many small pages."""


class FreshPages:
    """Makes pages of memory present that `advise` has asked huge ones for, as long as those are cheap. Thread safe.

    A hypervisor that took free memory back gives it again when it is touched. Huge pages then cost two to three times
    as much as small ones, which come from what the machine has kept, and else a third of it.
    """

    _are_dear = False

    def populate(self, address: int, nbytes: int) -> None:
        """As the function of this name."""
        for start in range(address, address + nbytes, STEP_BYTES):
            step = min(STEP_BYTES, address + nbytes - start)
            first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + step) // mmap.PAGESIZE * mmap.PAGESIZE
            # Not for small parts: memory that differs from its neighbours is one more mapping, of which there are few.
            if self._are_dear and step >= HUGE_BYTES:
                LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_NOHUGEPAGE)
            began = time.thread_time()
            populate(start, step)
            if step == STEP_BYTES and time.thread_time() - began > DEAR_SECONDS:
                self._are_dear = True
