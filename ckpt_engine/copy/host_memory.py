"""Shared memory for the arena.

It is mapped from a multiple of a huge page on. Without huge pages every direct write looks up each small page of the
arena: several times the processor time, taken from training. Most systems give shared memory none, but it may ask
(`MADV_COLLAPSE`, Linux 6.1) if address and size are aligned.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from functools import partial
from typing import Any

from ckpt_engine.errors import CorruptError, StateError
from ckpt_engine.observe.units import size
from ckpt_engine.undo import on_failure

HUGE_BYTES = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE
POPULATE_WRITE = 23
_FIXED = 0x10  # MAP_FIXED
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


def map_shared(fd: int, nbytes: int, *, writable: bool) -> Any:
    """The first `nbytes` bytes of a shared memory file as an object with the buffer protocol.

    The memory starts at a multiple of `HUGE_BYTES`. It stays mapped as long as the object or anything made from its
    buffer lives.

    Args:
        writable: else it is for reading only.

    Raises:
        OSError: the system refuses.
    """
    room = nbytes + HUGE_BYTES
    base = _call_mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    start = -(-base // HUGE_BYTES) * HUGE_BYTES
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    with on_failure(partial(LIBC.munmap, base, room)):
        _call_mmap(start, nbytes, protection, mmap.MAP_SHARED | _FIXED, fd)
    buffer = (ctypes.c_char * nbytes).from_address(start)
    # At the end of the interpreter other threads may still use the memory: the kernel takes it back then.
    weakref.finalize(buffer, LIBC.munmap, base, room).atexit = False
    return buffer


def shared_bytes(fd: int, nbytes: int, *, writable: bool) -> memoryview:
    """The first `nbytes` bytes of a shared memory file, see `map_shared`.

    Raises:
        CorruptError: it has fewer.
        OSError: the system refuses.
    """
    # Reading beyond the end of a shared file kills the process (SIGBUS), so trust the file, not the message.
    if (size := os.fstat(fd).st_size) < nbytes:
        raise CorruptError(f"shared memory has {size} bytes instead of {nbytes}")
    return memoryview(map_shared(fd, max(1, nbytes), writable=writable)).cast("B")[:nbytes]


def collapse(address: int, nbytes: int) -> bool:
    """Make shared memory present, most of it in huge pages; whether there are any. Any thread; releases the GIL.

    Args:
        address, nbytes: multiples of `HUGE_BYTES`. What is there stays.
    """
    for position in range(address, address + nbytes, HUGE_BYTES):
        LIBC.madvise(position, mmap.PAGESIZE, POPULATE_WRITE)  # only memory that is there is collapsed
    # Of a part the kernel may say "not now" (its pages are still on the way to a list): the others are collapsed.
    return int(LIBC.madvise(address, nbytes, _COLLAPSE)) == 0 or ctypes.get_errno() == errno.EAGAIN


def _call_mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found = LIBC.mmap(address, nbytes, protection, flags, fd, 0)
    if found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)


def shared_memory(name: str, nbytes: int) -> tuple[int, memoryview]:
    """New shared memory: its descriptor, and its bytes, all of them zero.

    Args:
        name: shown by the system.

    Raises:
        StateError: the system refuses it.
    """
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        with on_failure(partial(os.close, fd)):
            os.ftruncate(fd, max(1, nbytes))
            return fd, shared_bytes(fd, nbytes, writable=True)
    except OSError as err:
        raise StateError(
            f"cannot reserve {size(nbytes)} of host memory: {err.strerror}", hint=_WAYS_OUT.get(err.errno or 0, _LESS)
        ) from err


_LESS = "lower `slots`, or give the job more memory"
_NO_MEMFD = "allow the system call memfd_create, which this sandbox refuses: snapshots are staged in what it makes"
MORE_FILES = "raise the limit of open files (`ulimit -n`)"
_WAYS_OUT = {
    errno.EFBIG: "raise the limit of the size of files (`ulimit -f`): it is for shared memory and for data files alike",
    errno.EMFILE: MORE_FILES,
    errno.ENFILE: MORE_FILES,
    errno.ENOSYS: _NO_MEMFD,
    errno.EPERM: _NO_MEMFD,
    errno.EACCES: _NO_MEMFD,
}
"""What to do where the system refuses shared memory, by its error."""
