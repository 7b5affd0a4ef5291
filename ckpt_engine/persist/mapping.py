"""Map a shared memory file at a huge-page boundary, and let the kernel put huge pages under it.

Without huge pages every direct write has to look up each small page of the arena: several times the processor time,
taken from training. Shared memory gets none by itself on most systems, but may ask (`MADV_COLLAPSE`, Linux 6.1) if
address and size are aligned.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

HUGE_BYTES = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE
_FIXED = 0x10  # MAP_FIXED
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


def map_shared(fd: int, nbytes: int, *, writable: bool) -> Any:
    """The first `nbytes` bytes of a shared memory file as an object with the buffer protocol.

    The memory starts at a multiple of `HUGE_BYTES`. It stays mapped as long as the object or anything made from its
    buffer lives.

    Args:
        writable: else it is for reading only, and mapped at once.

    Raises:
        OSError: the system refuses.
    """
    room = nbytes + HUGE_BYTES
    base = _call_mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    start = -(-base // HUGE_BYTES) * HUGE_BYTES
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    flags = mmap.MAP_SHARED | _FIXED | (0 if writable else mmap.MAP_POPULATE)
    try:
        _call_mmap(start, nbytes, protection, flags, fd)
    except OSError:
        _LIBC.munmap(base, room)
        raise
    buffer = (ctypes.c_char * nbytes).from_address(start)
    # At the end of the interpreter other threads may still use the memory: the kernel takes it back then.
    weakref.finalize(buffer, _LIBC.munmap, base, room).atexit = False
    return buffer


def collapse(address: int, nbytes: int) -> bool:
    """Make fresh shared memory present in huge pages; whether it worked. Any thread; releases the GIL.

    Args:
        address, nbytes: multiples of `HUGE_BYTES`, of memory that holds nothing yet.
    """
    for position in range(address, address + nbytes, HUGE_BYTES):
        ctypes.memset(position, 0, 1)  # only memory that is there is collapsed
    return int(_LIBC.madvise(address, nbytes, _COLLAPSE)) == 0


def _call_mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found = _LIBC.mmap(address, nbytes, protection, flags, fd, 0)
    if found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)
