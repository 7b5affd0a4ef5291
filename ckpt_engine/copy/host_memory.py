"""Host memory of the arena: whether there is room, how it is mapped, touching fresh pages fast.

The kernel gives out memory that it does not have, and kills somebody later. So look first: at the machine
(`MemAvailable`) and at every control group from the process's own up to the root, version 1 and 2. The page cache
counts as free, as the kernel gives it up; shared memory does not.

Touch fresh memory fast: huge pages where the kernel has them at hand, and many pages per system call.

First touch costs more than the copy into it. It is several times faster in huge pages; but where memory is fragmented
the kernel makes them by compaction, in the middle of the page fault, so look first. And it is several times faster if
asked for beforehand than page by page in the middle of a read.

Shared memory is mapped from a multiple of a huge page on. Without huge pages every direct write looks up each small
page of the arena: several times the processor time, taken from training. Most systems give shared memory none by
itself, but it may ask (`MADV_COLLAPSE`, Linux 6.1) if address and size are aligned.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ckpt_engine.errors import CorruptError, StateError
from ckpt_engine.observe.units import size

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
        writable: else it is for reading only.

    Raises:
        OSError: the system refuses.
    """
    room = nbytes + HUGE_BYTES
    base = _call_mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    start = -(-base // HUGE_BYTES) * HUGE_BYTES
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    try:
        _call_mmap(start, nbytes, protection, mmap.MAP_SHARED | _FIXED, fd)
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
    """Make shared memory present, most of it in huge pages; whether there are any. Any thread; releases the GIL.

    Args:
        address, nbytes: multiples of `HUGE_BYTES`. What is there stays.
    """
    for position in range(address, address + nbytes, HUGE_BYTES):
        _LIBC.madvise(position, mmap.PAGESIZE, _POPULATE_WRITE)  # only memory that is there is collapsed
    # Of a part the kernel may say "not now" (its pages are still on the way to a list): the others are collapsed.
    return int(_LIBC.madvise(address, nbytes, _COLLAPSE)) == 0 or ctypes.get_errno() == errno.EAGAIN


def _call_mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found = _LIBC.mmap(address, nbytes, protection, flags, fd, 0)
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
    fd = -1
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(fd, max(1, nbytes))
        return fd, shared_bytes(fd, nbytes, writable=True)
    except OSError as err:
        if fd >= 0:
            os.close(fd)
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
RESERVE = 0.05
"""Share of what is available that is left to everybody else."""
WRITER_BYTES = 32_000_000
"""What a writer process takes beside the arena, twice what was measured."""
_MEMINFO = Path("/proc/meminfo")
_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory that can still be had, in bytes, and what it is limited by."""

    nbytes: int
    limit: str


@dataclass(frozen=True, slots=True)
class Fit:
    """The arena that has room.

    Args:
        slots: at least 1.
        memory: whether there is still a memory tier.
        warning: what is missing, and what to do; None if nothing is.
        process: whether there is room for a writer process; else a thread of the trainer writes.
    """

    slots: int
    memory: bool
    warning: str | None = None
    process: bool = True


def look(meminfo: Path = _MEMINFO, membership: Path = _MEMBERSHIP, cgroups: Path = _CGROUPS) -> MemoryLimit | None:
    """The least of what machine and control groups have left; None where nothing tells.

    Args:
        meminfo, membership, cgroups: where the kernel tells it.
    """
    rooms = [*_machine(meminfo), *_groups(membership, cgroups)]
    return min(rooms, key=lambda room: room.nbytes, default=None)


def plan_arena(
    slot_bytes: int,
    slots: int,
    *,
    memory: bool,
    room: MemoryLimit | None,
    held_bytes: int = 0,
    kept: int = 1,
    process: bool = False,
    started: bool = False,
) -> Fit:
    """How many of the wanted slots have room: first fewer slots, then no memory tier, then no writer process, and
    always one slot.

    Args:
        slot_bytes: of each slot; 0: not known yet.
        slots: as wanted.
        memory: whether a memory tier is wanted.
        room: None if unknown; then everything has room.
        held_bytes: what the arena occupies already and would reuse.
        kept: slots with complete snapshots while one more is filled, with a memory tier.
        process: the writer is to be a process, which takes memory of its own; else it is a thread.
        started: it is there, and what it takes is not available any more.
    """
    if room is None:
        return Fit(slots, memory)
    left = int(room.nbytes * (1.0 - RESERVE)) + held_bytes
    free = left - WRITER_BYTES if process and not started else left
    if free < max(1, slot_bytes) and process:
        alone = left + WRITER_BYTES if started else left
        found = max(1, min(slots, alone // max(1, slot_bytes)))
        return Fit(
            found,
            False,
            f"too little host memory for a writer process: {size(left)} are available ({room.limit}). Snapshots go on, "
            f"written by a thread of the trainer, with {_shown(found, lost=memory)}. Give the job more memory, or set "
            "`writer: thread`" + (" and remove the memory tier" if memory else ""),
            process=False,
        )
    found = min(slots, free // max(1, slot_bytes))
    if found >= slots:
        return Fit(slots, memory)
    still = memory and found > kept
    found, lost = max(1, found), memory and not still
    return Fit(
        found,
        still,
        f"too little host memory for the arena: {slots} slots of {size(slot_bytes)} need {size(slots * slot_bytes)}, "
        f"{size(free)} are available ({room.limit}). Snapshots go on with {_shown(found, lost=lost)}. Give the job "
        f"more memory, or set `slots: {found}`" + (" and remove the memory tier" if lost else ""),
    )


def _shown(slots: int, *, lost: bool) -> str:
    return f"{slots} slot{'s' if slots > 1 else ''}" + (" and without the memory tier" if lost else "")


def _machine(meminfo: Path) -> Iterator[MemoryLimit]:
    found = _fields(meminfo).get("MemAvailable:")
    if found is not None:
        yield MemoryLimit(found * 1024, "MemAvailable of this machine")


def _groups(membership: Path, cgroups: Path) -> Iterator[MemoryLimit]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for mount in (cgroups, cgroups / "unified"):
                yield from _walk(mount, path, ("memory.max", "memory.current", ""))
        elif "memory" in controllers.split(","):
            yield from _walk(cgroups / "memory", path, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))


def _walk(mount: Path, path: str, names: tuple[str, str, str]) -> Iterator[MemoryLimit]:
    """The group and all groups above it: each has a limit of its own."""
    group = mount.joinpath(*PurePosixPath(path).parts[1:])
    if not group.is_dir():
        group = mount  # a container sees its own group as the root, and gets the host's path
    limit_name, usage_name, prefix = names
    while True:
        limit, usage = _number(group / limit_name), _number(group / usage_name)
        if limit is not None and usage is not None:
            stat = _fields(group / "memory.stat")
            cache = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
            yield MemoryLimit(max(0, limit - max(0, usage - cache)), f"limit of control group {group}")
        if group == mount:
            return
        group = group.parent


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no file, or no limit (`max`)."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _fields(path: Path) -> dict[str, int]:
    """First and second word of each line that has a number there."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


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
    total = 0
    for line in lines:
        counts = line.rpartition("zone")[2].split()[1:]
        total += sum(int(count) << order for order, count in enumerate(counts) if order >= _ORDER)
    return total * mmap.PAGESIZE


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
    if _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _POPULATE_WRITE) != 0:
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

    def __init__(self) -> None:
        self._are_dear = False

    def populate(self, address: int, nbytes: int) -> None:
        """As the function of this name."""
        for start in range(address, address + nbytes, STEP_BYTES):
            step = min(STEP_BYTES, address + nbytes - start)
            first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + step) // mmap.PAGESIZE * mmap.PAGESIZE
            # Not for small parts: memory that differs from its neighbours is one more mapping, of which there are few.
            if self._are_dear and step >= HUGE_BYTES:
                _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_NOHUGEPAGE)
            began = time.thread_time()
            populate(start, step)
            if step == STEP_BYTES and time.thread_time() - began > DEAR_SECONDS:
                self._are_dear = True
