"""What a process that many are forked of has in memory, in pages of 2 MB: a fork copies an entry for each page."""

from __future__ import annotations

import ctypes
from pathlib import Path

_HUGE = 1 << 21
_ADVISED, _NORMAL, _COLLAPSE = 14, 15, 25


def collapse() -> None:
    """Anonymous memory of this process; where the kernel cannot (before Linux 6.1), all stays as it is."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, _, *path = line.split()
        first, end = (int(one, 16) for one in span.split("-"))
        first, end = -(-first // _HUGE) * _HUGE, end // _HUGE * _HUGE
        if rights == "rw-p" and path in ([], ["[heap]"]) and first < end:
            advise(first, end - first, _ADVISED)
            for page in range(first, end, _HUGE):
                advise(page, _HUGE, _COLLAPSE)
            advise(first, end - first, _NORMAL)
