"""A disk that fails at a chosen operation, in whichever process writes: the trainer arms it, a mapped file tells."""

from __future__ import annotations

import errno
import json
import mmap
import os
import pickle
import signal
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckpt_engine.store.storage import local
from ckpt_engine.store.storage.base import ObjectInfo
from ckpt_engine.store.storage.disk import Disk, translating
from tests.crash.powerloss import Change, Operation, RecordingDisk, SyncFile, SyncFolder, Write

ERRNO = {"enospc": errno.ENOSPC, "eio": errno.EIO, "read_only": errno.EROFS}
CHANGES = frozenset({"create", "write", "sync", "link", "rename", "remove", "make_folder", "sync_folder"})
GROWS = frozenset({"create", "write", "link", "rename", "make_folder"})
"""What a full disk refuses."""
READS = frozenset({"get", "get_into", "list"})

SABOTAGES = ("no_sync", "manifest_first")
"""Files are never synced; a manifest is written before the data that it names."""

_PLAN, _CONTROL, _LOG = "disk.json", "control", "operations"
_FOREIGN_INODES = 10**9
_ARMED, _MATCHED, _FIRED = 0, 8, 16


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """What fails.

    Args:
        base: folder of all local tiers.
        folder: the one that fails, below `base`.
        fault: of the disk, or "" if none of them fails.
        operations: the names of the methods that fail.
        after, times: as in a draw.
        bytes_per_second: of a slow disk.
        sabotage: a rule of ours that the writer breaks, to see the campaign notice: one of `SABOTAGES`, or "".
    """

    base: str
    folder: str
    fault: str
    operations: frozenset[str]
    after: int
    times: int | None
    bytes_per_second: int = 4_000_000
    sabotage: str = ""

    def write(self, control: Path) -> None:
        """Make it known to the processes of a run."""
        row = {**asdict(self), "operations": sorted(self.operations)}
        (control / _PLAN).write_text(json.dumps(row))
        (control / _CONTROL).write_bytes(bytes(mmap.PAGESIZE))

    @classmethod
    def read(cls, control: Path) -> DiskPlan:
        row = json.loads((control / _PLAN).read_text())
        return cls(**{**row, "operations": frozenset(row["operations"])})


class Control:
    """Shared by all processes of a run and surviving each of them."""

    def __init__(self, folder: Path) -> None:
        with (folder / _CONTROL).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._lock = threading.Lock()

    def arm(self, *, on: bool) -> None:
        """Let the fault strike from now on, or not any more."""
        self._set(_ARMED, int(on))

    @property
    def armed(self) -> bool:
        return self._get(_ARMED) == 1

    @property
    def fired(self) -> int:
        """How often it has struck."""
        return self._get(_FIRED)

    def strikes(self, plan: DiskPlan) -> bool:
        """Whether the operation at hand, which is one of those that may fail, does."""
        with self._lock:
            if not self.armed:
                return False
            matched = self._get(_MATCHED)
            self._set(_MATCHED, matched + 1)
            if matched < plan.after or (plan.times is not None and self.fired >= plan.times):
                return False
            self._set(_FIRED, self.fired + 1)
            return True

    def _get(self, at: int) -> int:
        return int(struct.unpack_from("q", self._map, at)[0])

    def _set(self, at: int, value: int) -> None:
        struct.pack_into("q", self._map, at, value)


class FaultyDisk(Disk):
    """A disk under a plan. What lies elsewhere is not touched by it."""

    def __init__(
        self, plan: DiskPlan, control: Control, under: Disk | None = None, victims: Sequence[int] = ()
    ) -> None:
        self._plan = plan
        self._control = control
        self._under = under or Disk()
        self._victims = victims
        self._ours: set[int] = set()

    def create(self, path: str) -> int:
        self._strike("create", path)
        fd = self._under.create(path)
        if self._hits(path):
            self._ours.add(fd)
        else:
            self._ours.discard(fd)
        return fd

    def open(self, path: str) -> int:
        self._strike("create", path)
        fd = self._under.open(path)
        if self._hits(path):
            self._ours.add(fd)
        else:
            self._ours.discard(fd)
        return fd

    def bypass_cache(self, fd: int, *, on: bool) -> None:
        self._under.bypass_cache(fd, on=on)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        if fd in self._ours:
            # Half of what it was given lands before a disk fails.
            try:
                self._strike("write", None, len(data))
            except OSError:
                self._under.write(fd, data[: len(data) // 2], offset)
                raise
        return self._under.write(fd, data, offset)

    def sync(self, fd: int) -> None:
        if fd in self._ours:
            self._strike("sync", None)
        if self._plan.sabotage != "no_sync":
            self._under.sync(fd)

    def link(self, path: str, new_path: str) -> None:
        self._strike("link", path)
        self._under.link(path, new_path)

    def rename(self, path: str, new_path: str) -> None:
        self._strike("rename", path)
        self._under.rename(path, new_path)

    def remove(self, path: str) -> None:
        self._strike("remove", path)
        self._under.remove(path)

    def make_folder(self, path: str) -> None:
        self._strike("make_folder", path)
        self._under.make_folder(path)

    def sync_folder(self, path: str) -> None:
        self._strike("sync_folder", path)
        self._under.sync_folder(path)

    def read(self, what: str, path: str, nbytes: int = 0) -> None:
        """Called before something is read."""
        self._strike(what, path, nbytes)

    def _hits(self, path: str) -> bool:
        return Path(path).is_relative_to(self._plan.folder)

    def _strike(self, what: str, path: str | None, nbytes: int = 0) -> None:
        plan = self._plan
        if (
            what not in plan.operations
            or (path is not None and not self._hits(path))
            or not self._control.strikes(plan)
        ):
            return
        if plan.fault == "power_loss":
            self._die()
        elif plan.fault == "slow_disk":
            time.sleep(0.02 + nbytes / plan.bytes_per_second)
        else:
            raise OSError(ERRNO[plan.fault], os.strerror(ERRNO[plan.fault]))

    def _die(self) -> None:
        """The machine goes down, and this process is the last."""
        for pid in (*self._victims, os.getpid()):
            os.kill(pid, signal.SIGKILL)


class LoggedDisk(RecordingDisk):
    """A recording disk whose record outlives its process, and is continued by the next one."""

    def __init__(self, base: Path, log: Path) -> None:
        super().__init__(base)
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._lock = threading.RLock()
        number = 0
        for operation in read_operations(log):
            if isinstance(operation, Change):
                for name, inode in operation.names.items():
                    path = str(base / name)
                    if inode is None:
                        self._of_path.pop(path, None)
                    else:
                        self._of_path[path] = inode
                        number = max(number, abs(inode) if abs(inode) < _FOREIGN_INODES else 0)
        for _ in range(number):
            next(self._inodes)

    def create(self, path: str) -> int:
        with self._lock:
            return super().create(path)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        with self._lock:
            return super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        with self._lock:
            super().sync(fd)

    def link(self, path: str, new_path: str) -> None:
        with self._lock:
            super().link(path, new_path)

    def rename(self, path: str, new_path: str) -> None:
        with self._lock:
            super().rename(path, new_path)

    def remove(self, path: str) -> None:
        with self._lock:
            super().remove(path)

    def make_folder(self, path: str) -> None:
        with self._lock:
            super().make_folder(path)

    def sync_folder(self, path: str) -> None:
        with self._lock:
            super().sync_folder(path)

    def _record(self, operation: Operation) -> None:
        os.write(self._log, pickle.dumps(operation))


def read_operations(log: Path) -> list[Operation]:
    """What was recorded; an operation whose record is torn did not happen."""
    found: list[Operation] = []
    with log.open("rb") as file:
        while True:
            try:
                found.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):
                return found


def adopt(log: Path, base: Path, number: int, path: Path, data: bytes) -> None:
    """Tell the record of a file that somebody else has put there durably. `number`: unique among such files."""
    inode = _FOREIGN_INODES + number
    folder, name = str(path.parent.relative_to(base)), str(path.relative_to(base))
    operations = (Change(folder, {name: inode}), Write(inode, 0, data), SyncFile(inode), SyncFolder(folder))
    with log.open("ab") as file:
        file.write(b"".join(pickle.dumps(operation) for operation in operations))


def log_of(control: Path) -> Path:
    """The record of a run."""
    return control / _LOG


def install(control: Path, victims: Sequence[int] = ()) -> None:
    """Put the plan in `control` between this process and its local storages, for good.

    Args:
        victims: processes that a power loss kills before this one.
    """
    plan = DiskPlan.read(control)
    under = LoggedDisk(Path(plan.base), log_of(control)) if plan.fault == "power_loss" else None
    disk = FaultyDisk(plan, Control(control), under, victims)
    _interpose(disk)
    real = local.LocalStorage
    get, get_into, listing = real.get, real.get_into, real.list

    def faulty_get(self: Any, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        with translating("read", self.path(name)):
            disk.read("get", self.path(name))
        return get(self, name, start, nbytes)

    def faulty_get_into(self: Any, name: str, start: int, out: memoryview) -> None:
        with translating("read", self.path(name)):
            disk.read("get_into", self.path(name), out.nbytes)
        get_into(self, name, start, out)

    def faulty_list(self: Any, prefix: str) -> Iterator[ObjectInfo]:
        with translating("list", self.root):
            disk.read("list", self.root)
        yield from listing(self, prefix)

    if plan.sabotage == "manifest_first":
        _write_manifests_first(real)
    real.get, real.get_into, real.list = faulty_get, faulty_get_into, faulty_list  # type: ignore[method-assign]


def _interpose(disk: FaultyDisk) -> None:
    """Let every disk be this one, those of subclasses too, which come here with `super()`."""
    inside = threading.local()

    def passing(name: str) -> Any:
        original = getattr(Disk, name)

        def method(self: Any, *args: Any, **named: Any) -> Any:
            if getattr(inside, "now", False):
                return original(self, *args, **named)
            inside.now = True
            try:
                return getattr(disk, name)(*args, **named)
            finally:
                inside.now = False

        return method

    for name in [one for one in vars(Disk) if not one.startswith("_")]:
        setattr(Disk, name, passing(name))


def _write_manifests_first(storage: Any) -> None:
    put = storage.put
    kept: dict[str, bytes] = {}

    def swapped(self: Any, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        if name.startswith("data/"):
            kept[name] = b"".join(bytes(block) for block in blocks)
            return
        put(self, name, blocks, exclusive=exclusive)
        for data in [one for one in kept if name.startswith("snapshots/")]:
            put(self, data, [memoryview(kept.pop(data))])

    storage.put = swapped
