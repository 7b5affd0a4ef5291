"""Whether this machine has room for the arena.

The kernel gives out memory that it does not have, and kills somebody later. So look first: at the machine
(`MemAvailable`) and at every control group from the process's own up to the root, version 1 and 2. The page cache
counts as free, as the kernel gives it up; shared memory does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ckpt_engine.observe.units import size

RESERVE = 0.05
"""Share of what is available that is left to everybody else."""
WRITER_BYTES = 32_000_000
"""What a writer process takes beside the arena, twice what was measured."""


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


def look(
    meminfo: Path = Path("/proc/meminfo"),
    membership: Path = Path("/proc/self/cgroup"),
    cgroups: Path = Path("/sys/fs/cgroup"),
) -> MemoryLimit | None:
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
            f"too little host memory for a writer process: {size(left)} are available ({room.limit}). Snapshots "
            f"continue, written by a thread of the trainer, with {_shown(found, lost=memory)}. Give the job more "
            "memory, or set `writer: thread`" + (" and remove the memory tier" if memory else ""),
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
        f"{size(free)} are available ({room.limit}). Snapshots continue with {_shown(found, lost=lost)}. Give the job "
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
