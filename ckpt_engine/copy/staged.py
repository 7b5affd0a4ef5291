"""A staged snapshot as its writer sees it: a slot of the arena, mapped, cut into pieces and digested.

Without huge pages every direct write looks up each small page of the arena: several times the processor time, taken
from training. Most systems give shared memory none by itself, but it may ask (`MADV_COLLAPSE`, Linux 6.1) if address
and size are aligned.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckpt_engine.copy.job import EntryLayout, Layout
from ckpt_engine.errors import CorruptError, WriterError
from ckpt_engine.store.container import PIECE_BYTES, digest
from ckpt_engine.store.manifest import Entry, Piece


class ArenaSlot:
    """One shared buffer. It stays alive while it is retained, whatever becomes of the trainer. Thread safe.

    Args:
        fd: a descriptor of the buffer, owned by this object from now on.
        nbytes: its size.

    It is made with one reference.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = fd
        self._nbytes = nbytes
        self._memory: memoryview | None = None
        self._users = 1
        self._lock = threading.Lock()

    @contextmanager
    def image(self, nbytes: int) -> Iterator[memoryview]:
        """The first `nbytes` bytes, to read; valid inside the `with` only.

        Raises:
            WriterError: the slot is smaller, or the memory cannot be mapped.
        """
        if nbytes > self._nbytes:
            raise WriterError(f"an image of {nbytes} bytes does not fit an arena slot of {self._nbytes} bytes")
        with self._lock:
            if self._memory is None:
                self._memory = self._map()
            memory = self._memory
        with memory[:nbytes] as image:
            yield image

    def _map(self) -> memoryview:
        try:
            # Mapped after the trainer has filled it: populating then costs no page faults and allocates nothing.
            return shared_bytes(self._fd, self._nbytes, writable=False)
        except (OSError, ValueError, CorruptError) as err:
            raise WriterError(f"cannot map an arena slot of {self._nbytes} bytes: {err}") from err

    def reading_fd(self) -> int:
        """A new descriptor of the buffer that can only be read; the caller closes it.

        Raises:
            OSError: the system refuses.
        """
        with self._lock:
            return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def retain(self) -> None:
        """Keep the memory until one more `release`."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """Let go of the memory, once for each time it was retained."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._memory = None
                os.close(self._fd)
                self._fd = -1


HUGE_BYTES = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE
_POPULATE_WRITE = 23
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
    """Make shared memory present in huge pages; whether it worked. Any thread; releases the GIL.

    Args:
        address, nbytes: multiples of `HUGE_BYTES`. What is there stays.
    """
    for position in range(address, address + nbytes, HUGE_BYTES):
        _LIBC.madvise(position, mmap.PAGESIZE, _POPULATE_WRITE)  # only memory that is there is collapsed
    return int(_LIBC.madvise(address, nbytes, _COLLAPSE)) == 0


def _call_mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found = _LIBC.mmap(address, nbytes, protection, flags, fd, 0)
    if found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)


_MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of bytes of a file."""

    offset: int
    nbytes: int


def cut(entry: EntryLayout, piece_bytes: int = PIECE_BYTES) -> tuple[Extent, ...]:
    """Where the pieces of an entry are: in order, without gaps, each of at most `piece_bytes`.

    Pieces are whole rows (first dimension), so that a change of some rows changes few pieces; rows bigger than a piece
    are cut as well. An empty entry has no pieces.
    """
    rows = entry.shape[0] if entry.shape else 1
    step = piece_bytes
    if rows and entry.nbytes % rows == 0 and 0 < entry.nbytes // rows <= piece_bytes:
        row_bytes = entry.nbytes // rows
        step = piece_bytes // row_bytes * row_bytes
    return tuple(
        Extent(entry.offset + start, min(step, entry.nbytes - start)) for start in range(0, entry.nbytes, step)
    )


@dataclass(frozen=True, slots=True)
class CutLayout:
    """A layout with its pieces, worked out once for all snapshots that use it.

    Args:
        nbytes: logical bytes, header and padding excluded.
        entry_bytes: logical bytes by entry name.
    """

    layout: Layout
    extents: tuple[tuple[Extent, ...], ...]
    nbytes: int
    entry_bytes: dict[str, int]

    @classmethod
    def of(cls, layout: Layout) -> CutLayout:
        """Cut `layout`.

        Raises:
            ValueError: an entry lies outside the file, or its size does not fit its shape.
        """
        for entry in layout.entries:
            if entry.offset < layout.header_nbytes or entry.offset + entry.nbytes > layout.nbytes:
                raise ValueError(f"entry {entry.name!r} lies outside the data file")
            if (entry.nbytes == 0) != (math.prod(entry.shape) == 0):
                raise ValueError(f"entry {entry.name!r} of shape {entry.shape} cannot have {entry.nbytes} bytes")
        sizes = {entry.name: entry.nbytes for entry in layout.entries}
        return cls(layout, tuple(cut(entry) for entry in layout.entries), sum(sizes.values()), sizes)

    def blank_digests(self) -> list[str]:
        """As many digests as there are pieces, and as long, of nothing."""
        return [digest(b"")] * sum(map(len, self.extents))

    def entries(self, digests: Sequence[str]) -> dict[str, Entry]:
        """The manifest's entries, given the digests of all pieces in order."""
        found: dict[str, Entry] = {}
        left = iter(digests)
        try:
            for entry, extents in zip(self.layout.entries, self.extents, strict=True):
                pieces = [Piece(0, one.offset, one.nbytes, next(left), one.nbytes) for one in extents]
                found[entry.name] = Entry(entry.dtype, entry.shape, tuple(pieces), entry.container_dtype)
        except StopIteration:
            raise ValueError(f"{len(digests)} digests are too few") from None
        if next(left, None) is not None:
            raise ValueError(f"{len(digests)} digests are too many")
        return found


class Digesting:
    """Digests the pieces of a file image on its own threads, while the caller writes the same memory to storage.

    Several threads at once cost training less than one that works longer: a parallel region of the training waits for
    whichever of its threads has lost its core for the longest time.

    Either `result` or `abandon` MUST be called; after it nothing refers to `image` any more.
    """

    def __init__(self, image: memoryview, cut_layout: CutLayout) -> None:
        self._image = image
        self._extents = [extent for extents in cut_layout.extents for extent in extents]
        self._digests = [""] * len(self._extents)
        self._next = itertools.count()
        self._error: BaseException | None = None
        self._abandoned = threading.Event()
        self._cpu_seconds: list[float] = []
        count = max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)), len(self._extents)))
        self._threads = [threading.Thread(target=self._run, name=f"ckpt-digest-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the threads that have ended."""
        return sum(self._cpu_seconds)

    def _run(self) -> None:
        began = time.thread_time()
        try:
            # One step of `itertools.count` is atomic.
            while not self._abandoned.is_set() and (index := next(self._next)) < len(self._extents):
                extent = self._extents[index]
                with self._image[extent.offset : extent.offset + extent.nbytes] as piece:
                    self._digests[index] = digest(piece)
        except BaseException as err:  # noqa: BLE001 - handed to the caller, who raises it
            self._error = err
            self._abandoned.set()
        finally:
            self._cpu_seconds.append(time.thread_time() - began)

    def result(self) -> list[str]:
        """The digests of all pieces in layout order; waits for the threads, whose work is bounded."""
        self._join()
        if self._error is not None:
            raise self._error
        return self._digests

    def abandon(self) -> None:
        """Stop after the pieces at hand."""
        self._abandoned.set()
        self._join()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()
