"""Raw reads and writes of a file, the references for persisting and restoring."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

BLOCK_BYTES = 16 << 20


class SharedBuffer:
    """Touched shared memory of the same kind as the engine's arena (a memfd)."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("benchmark", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, self.nbytes)
            self.memory = mmap.mmap(fd, self.nbytes)
        finally:
            os.close(fd)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.tensor.fill_(1)


def direct_write(path: Path, buffer: memoryview, *, block_bytes: int = BLOCK_BYTES) -> float:
    """Write `buffer` to a new file around the page cache and sync it; seconds from opening to synced.

    Raises:
        OSError: the file system takes no direct writes.
    """
    path.unlink(missing_ok=True)
    began = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
    try:
        done = 0
        while done < len(buffer):
            done += os.pwrite(fd, buffer[done : done + block_bytes], done)
        os.fsync(fd)
    finally:
        os.close(fd)
    return time.perf_counter() - began


def buffered_write(path: Path, buffer: memoryview) -> float:
    """Write `buffer` to a new file through the page cache and sync it; seconds from opening to synced."""
    path.unlink(missing_ok=True)
    began = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        done = 0
        while done < len(buffer):
            done += os.pwrite(fd, buffer[done : done + BLOCK_BYTES], done)
        os.fsync(fd)
    finally:
        os.close(fd)
    return time.perf_counter() - began


Prepare = Callable[[int, int], object]
"""`prepare(address, nbytes)` makes the pages of a block of new memory present before it is read into."""


def direct_read(path: Path, out: memoryview, *, threads: int = 1, prepare: Prepare | None = None) -> float:
    """Read whole pages of a file around the page cache into `out`; seconds."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def fill(start: int) -> None:
        if prepare is not None:
            prepare(_address(out) + start, min(BLOCK_BYTES, len(out) - start))
        os.preadv(fd, [out[start : min(start + BLOCK_BYTES, len(out))]], start)

    began = time.perf_counter()
    try:
        if threads == 1:
            for start in range(0, len(out), BLOCK_BYTES):
                fill(start)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(fill, range(0, len(out), BLOCK_BYTES)))
    finally:
        os.close(fd)
    return time.perf_counter() - began


def buffered_read(path: Path, out: memoryview, *, prepare: Prepare | None = None) -> float:
    """Read a file through the page cache into `out`; seconds."""
    fd = os.open(path, os.O_RDONLY)
    began = time.perf_counter()
    try:
        done = 0
        if prepare is not None:
            prepare(_address(out), len(out))
        while done < len(out) and (got := os.preadv(fd, [out[done : done + BLOCK_BYTES]], done)):
            done += got
    finally:
        os.close(fd)
    return time.perf_counter() - began


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def evict(path: Path) -> None:
    """Drop a file's pages from the page cache of this machine (a hypervisor's cache stays as it is).

    Raises:
        RuntimeError: pages stayed, so a read would not be cold.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    share = cached_share(path)
    if share > 0.001:
        raise RuntimeError(f"{share:.1%} of {path} stayed in the page cache")


def warm(path: Path) -> None:
    """Bring a whole file into the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(BLOCK_BYTES):
            pass


def cached_share(path: Path) -> float:
    """How much of a file is in the page cache (`mincore`)."""
    nbytes = path.stat().st_size
    if nbytes == 0:
        return 0.0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), nbytes) as view:
        pages = -(-nbytes // mmap.PAGESIZE)
        present = (ctypes.c_ubyte * pages)()
        base = ctypes.c_ubyte.from_buffer(view)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.mincore(ctypes.c_void_p(ctypes.addressof(base)), ctypes.c_size_t(nbytes), present) != 0:
                raise OSError(ctypes.get_errno(), "mincore")
        finally:
            del base
        return sum(byte & 1 for byte in bytes(present)) / pages
