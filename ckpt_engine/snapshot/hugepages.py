"""Ask for huge pages where the kernel has them at hand.

First touch is several times faster in huge pages. But where memory is fragmented the kernel makes them by compaction,
in the middle of the page fault, and that is several times slower than small pages: so look first.
"""

from __future__ import annotations

import mmap
from pathlib import Path

HUGE_BYTES = 2 << 20
_ORDER = 9  # 2^9 small pages
_BUDDY = Path("/proc/buddyinfo")


def advise(memory: mmap.mmap) -> bool:
    """Ask for huge pages for `memory` if there are free ones for twice its size; whether it did."""
    size = len(memory)
    if size < HUGE_BYTES or free_huge_bytes() < 2 * size:
        return False
    memory.madvise(mmap.MADV_HUGEPAGE)
    return True


def free_huge_bytes(buddy: Path = _BUDDY) -> int:
    """Free memory in blocks of at least a huge page; 0 where the kernel does not tell."""
    try:
        lines = buddy.read_text().splitlines()
    except OSError:
        return 0
    total = 0
    for line in lines:
        counts = line.rpartition("zone")[2].split()[1:]
        total += sum(int(count) << order for order, count in enumerate(counts) if order >= _ORDER)
    return total * mmap.PAGESIZE
