"""The lease: one process at a time writes a run.

On a local disk it is a lock the kernel frees when its holder dies, on a file that says who holds it. Elsewhere, and on
mounts whose locks other machines do not see, it is an object that its holder goes on rewriting, and that expires when
it does not. Readers never need it.

No wall clock is trusted: who wants such a lease watches the object, and takes it when it has seen no change for the
holder's own `ttl_seconds` by its own clock. To take it is to write a token, wait, and read it back; where the store has
conditional writes they decide, but not all stores that accept them are atomic about them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ckpt_engine.errors import CkptError, LeaseHeldError, StorageExistsError, StorageMissingError
from ckpt_engine.store import names
from ckpt_engine.store.container import is_time, is_whole, parsed, require, seal
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Folder, Storage
from ckpt_engine.store.storage.disk import open_regular, translated, translating
from ckpt_engine.store.storage.object_requests import asking

RETRY_SECONDS = 0.1
_TEXT_BYTES = 1023
_COMMAND_CHARACTERS = 10_000


class Lease(AbstractContextManager["Lease"]):
    """The right to write and to collect, until `release` or the end of the process.

    `check` MUST be called before something is deleted: a lease that has to be renewed may be lost meanwhile.
    """

    @abstractmethod
    def check(self) -> None:
        """Raises `LeaseHeldError` if the lease is no longer ours."""

    @abstractmethod
    def release(self) -> None:
        """Give it back; twice is fine."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """Who holds a lease: shown to those who are refused. `started` is wall-clock seconds, for display."""

    pid: int
    host: str
    started: float
    command: str

    @classmethod
    def current(cls) -> Self:
        """This process, from now on."""
        command = " ".join([sys.executable, *sys.argv])[:_COMMAND_CHARACTERS]
        return cls(os.getpid(), socket.gethostname(), time.time(), command)

    def is_process_of(self, other: LeaseHolder) -> bool:
        """Whether both are the same process, at whatever time."""
        return (self.pid, self.host) == (other.pid, other.host)

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.started, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on {self.host} since {since} ({self.command})"


def acquire(
    storage: Storage,
    holder: LeaseHolder | None = None,
    wait_seconds: float = 0.0,
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Lease:
    """Take the lease of the run in `storage`, waiting at most `wait_seconds` for its holder to give it back.

    Raises:
        LeaseHeldError: naming the holder.
        ForeignError: the folder has other files; it is left untouched.
        StorageError: read-only, full, or not a folder.
        CorruptError: the lease file is a link or a pipe: it is neither followed nor written.
    """
    Repository(storage).record()
    holder, timing = holder or LeaseHolder.current(), Timing(clock=clock, pause=pause)
    try:
        folder = lockable(storage)
        if folder is not None:
            return _acquire_lock(folder, holder, wait_seconds, timing)
        return take(LeaseSlot(storage), asdict(holder), wait_seconds, timing)
    except LeaseHeldError as err:
        other = read_holder(storage)
        whose, hint = str(other or "another process"), "stop it, wait for it, or choose another folder"
        if other is not None and other.is_process_of(holder):
            whose = f"another writer of this process: {other}"
            hint = "close() its Checkpointer, or wait until it is done; two runs at the same time need two folders"
        hint = way_out_of_links(storage) or hint
        raise LeaseHeldError(f"the run at {storage.url} is being written by {whose}", hint=hint) from err


def _acquire_lock(storage: Folder, holder: LeaseHolder, wait_seconds: float, timing: Timing) -> LocalLease:
    deadline = timing.clock() + wait_seconds
    while (lease := LocalLease.try_acquire(storage, holder)) is None:
        left = deadline - timing.clock()
        if left <= 0:
            raise LeaseHeldError(f"{storage.url} is locked")
        timing.pause(min(RETRY_SECONDS, left))
    return lease


def read_holder(storage: Storage) -> LeaseHolder | None:
    """Who the lease file names, owner or not; None if it names none, or is unreadable."""
    try:
        return parse_holder(storage.get(names.LEASE), f"{storage.url}/{names.LEASE}")
    except CkptError:
        return None


def way_out_of_links(storage: Storage) -> str | None:
    """What to do where the lease file has further names, in copies that `cp -al` makes; None: it has one.

    A lock is on the file and not on its name: who holds it may write any of these folders.
    """
    folder = lockable(storage)
    try:
        links = 1 if folder is None else os.lstat(folder.path(names.LEASE)).st_nlink
    except OSError:  # it is gone meanwhile
        return None
    if folder is None or links < 2:
        return None
    return (
        f"{names.LEASE} has {links} hard links, so that process may write another folder that shares the file "
        f"(`cp -al` makes such copies): if it does, `rm {folder.path(names.LEASE)}` and start again"
    )


def parse_holder(text: bytes, where: str) -> LeaseHolder | None:
    """Who a lease file with this text names; None if it was given back.

    Raises:
        CorruptError: it is damaged.
    """
    if not text.strip(b"{} \n"):
        return None

    def made(row: dict[str, Any]) -> LeaseHolder:
        row.pop("lease", None)
        holder = LeaseHolder(**row)
        require(is_whole(holder.pid) and is_time(holder.started), "no process, or no time")
        require(type(holder.host) is str and type(holder.command) is str, "no host, or no command")
        return holder

    return parsed(text, where, made, "the next start writes it again")


class LocalLease(Lease):
    """A lock (`flock`) on the lease file. The kernel frees it when the process dies, however it dies."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        _held.add(self)

    @classmethod
    def try_acquire(cls, storage: Folder, holder: LeaseHolder) -> Self | None:
        """The lease, or None if another process, or another lease of this one, holds it."""
        path = storage.path(names.LEASE)
        with translating("make the folder", storage.root, "choose a folder on a disk where this user may make one"):
            storage.make_folder(storage.root)
        with translating("take the lease", path):
            fd = open_regular(path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _write_text(fd, seal(asdict(holder)))
            except BlockingIOError:
                os.close(fd)
                return None
            except BaseException:
                os.close(fd)
                raise
        return cls(fd, path)

    def check(self) -> None:
        if self._fd < 0:
            raise LeaseHeldError(f"the lease {self._path} was given back")
        there = None
        try:
            mine = os.fstat(self._fd)
            there = os.lstat(self._path)
        except OSError as err:
            if err.errno not in _REMOVED:
                raise translated(err, "check the lease", self._path) from err
        if there is None or (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino):
            raise LeaseHeldError(
                f"the lease {self._path} was removed or replaced: its folder is gone, or another writer works there",
                hint="stop this run, and any other one in that folder, and start it again",
            )

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                _write_text(fd, b"")
            except OSError as err:
                if err.errno not in _REMOVED:
                    raise translated(err, "give back the lease", self._path) from err
            finally:
                os.close(fd)
                _held.discard(self)


def _write_text(fd: int, text: bytes) -> None:
    """Replace what the lease file says. On a full disk the lock alone must do, or nothing could be pruned."""
    nbytes = os.fstat(fd).st_size
    if nbytes > names.SMALL_BYTES:  # no lease of ours, and more than is to be written or read
        os.ftruncate(fd, _TEXT_BYTES + 1)
        nbytes = _TEXT_BYTES + 1
    padded = text.ljust(max(_TEXT_BYTES, nbytes - 1)) + b"\n"
    try:
        os.pwrite(fd, padded, 0)  # in place and never shorter: needs no new block
        os.fsync(fd)  # on NFS no other machine sees it before
    except OSError as err:
        if err.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


_REMOVED = (errno.ENOENT, errno.ESTALE)
"""The second one is said of an open file that another NFS client has removed."""
_held: set[LocalLease] = set()


def _drop_in_child() -> None:
    """A forked child shares the locks: close its copies (without unlocking), or leases outlive their holder."""
    for lease in list(_held):
        fd, lease._fd = lease._fd, -1
        if fd >= 0:
            os.close(fd)


os.register_at_fork(after_in_child=_drop_in_child)


_MOUNTS = Path("/proc/self/mountinfo")
_UNSHARED = frozenset(
    {"9p", "cifs", "smb3", "virtiofs", "fuse.sshfs", "fuse.rclone", "fuse.s3fs", "fuse.gcsfuse", "fuse.goofys"}
)
"""Types on which a lock holds on this machine only, or may."""
_UNSHARED_OPTIONS = frozenset({"local_lock=all", "local_lock=flock", "nolock", "localflock", "nobrl"})


def locks_are_shared(path: str, mounts: str | None = None) -> bool:
    """Whether a lock (`flock`) keeps out other machines that mount the file system of `path`.

    True on local disks, NFS with its normal options and cluster file systems; also where the system does not tell.

    Args:
        mounts: the text of `/proc/self/mountinfo`.
    """
    if mounts is None:
        try:
            mounts = _MOUNTS.read_text()
        except OSError:
            return True
    best, shared = "", True
    resolved = str(Path(path).resolve())
    for line in mounts.splitlines():
        mounted, _, source = line.partition(" - ")
        fields, tail = mounted.split(), source.split()
        if len(fields) < 6 or len(tail) < 3:
            continue
        point = fields[4].replace("\\040", " ")
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            options = {*fields[5].split(","), *tail[2].split(",")}
            best, shared = point, tail[0] not in _UNSHARED and not options & _UNSHARED_OPTIONS
    return shared


def lockable(storage: Storage) -> Folder | None:
    """The folder of `storage`, if a lock there keeps out everybody."""
    folder = storage.capabilities.folder
    return folder if folder is not None and locks_are_shared(folder.root) else None


TTL_SECONDS = 30.0
BEATS = 4
"""Renewals within `ttl_seconds`."""
SETTLE_SECONDS = 1.0
"""How long another taker's write may be under way unseen, at least."""
LOOK_SECONDS = 1.0
JOIN_SECONDS = 5.0
_FREE = b"{}\n"


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process as only its own machine knows it: a new process of the same number is another one."""

    boot: str
    namespace: str
    pid: int
    ticks: int

    @classmethod
    def current(cls) -> Self | None:
        """This process; None where the system does not tell."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """The process that has this number here; None where the system does not tell, or there is none."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return cls(boot, str(Path("/proc/self/ns/pid").readlink()), pid, _started_ticks(pid))
        except OSError:
            return None

    def is_dead(self) -> bool:
        """Whether the process has ended; False where that cannot be known from here."""
        here = ProcessIdentity.current()
        if here is None or (here.boot, here.namespace) != (self.boot, self.namespace):
            return False
        try:
            return _started_ticks(self.pid) != self.ticks
        except FileNotFoundError:
            return True
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class Record:
    """What the lease object says. `holder` is for people; `token` and `beat` decide."""

    holder: dict[str, Any]
    token: str
    beat: int
    ttl_seconds: float
    place: ProcessIdentity | None

    def encode(self) -> bytes:
        lease = {"token": self.token, "beat": self.beat, "ttl_seconds": self.ttl_seconds}
        place = asdict(self.place) if self.place else None
        return seal({**self.holder, "lease": {**lease, "place": place}}) + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Self | None:
        """The record, or None if these bytes are none."""
        try:
            row = json.loads(data)
            lease = row.pop("lease")
            row.pop("digest", None)  # of no weight here: a flip in what is for people does not end a lease
            place = lease.get("place")
            known = {field.name for field in fields(ProcessIdentity)}
            there = ProcessIdentity(**place) if isinstance(place, dict) and set(place) == known else None
            return cls(row, str(lease["token"]), int(lease["beat"]), float(lease["ttl_seconds"]), there)
        except (ValueError, LookupError, TypeError, AttributeError):
            return None


class LeaseSlot:
    """Where a lease is written. Without conditional writes creation is exclusive, and replacing is not."""

    def __init__(self, storage: Storage) -> None:
        self.url = storage.url
        self._storage = storage
        self._versions = storage.capabilities.versions

    def read(self) -> tuple[bytes, str] | None:
        """What is there and its version, None if there is nothing."""
        if self._versions is not None:
            return self._versions.read_versioned(names.LEASE)
        try:
            data = self._storage.get(names.LEASE)
        except StorageMissingError:
            return None
        return data, hashlib.sha256(data).hexdigest()

    def write(self, data: bytes, version: str | None) -> None:
        """Replace that version (None: nothing). Raises `StorageExistsError` where it is known to be another by now."""
        if self._versions is not None:
            self._versions.replace(names.LEASE, data, version)
        else:
            self._storage.put(names.LEASE, [memoryview(data)], exclusive=version is None)


@dataclass(frozen=True, slots=True)
class Timing:
    """When things happen, in seconds of a monotonic clock; tests make it faster."""

    ttl_seconds: float = TTL_SECONDS
    settle_seconds: float = SETTLE_SECONDS
    look_seconds: float = LOOK_SECONDS
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep


def take(slot: LeaseSlot, holder: dict[str, Any], wait_seconds: float, timing: Timing) -> ObjectLease:
    """Take the lease, waiting at most `wait_seconds` for a holder that lives.

    It takes up to the holder's `ttl_seconds` to see whether it does.

    Raises:
        LeaseHeldError: the lease is renewed by its holder. `args[0]` has no name: the caller reads it.
        StorageError: from the store.
    """
    before: bytes | None = None
    since = timing.clock()
    deadline, changes = since + wait_seconds, 0
    while True:
        seen = slot.read()
        data = seen[0] if seen else None
        if data != before:
            changes += before is not None
            before, since = data, timing.clock()
        record = Record.decode(data) if data else None
        ended = record is not None and record.place is not None and record.place.is_dead()
        silent = timing.clock() - since >= (record.ttl_seconds if record else TTL_SECONDS)
        if data is None or not data.strip(b"{} \n") or ended or silent:
            lease = _try_to_take(slot, holder, seen, timing)
            if lease is not None:
                return lease
            changes += 1  # somebody else was faster, and so is alive
        if changes and timing.clock() >= deadline:
            raise LeaseHeldError(f"the lease of {slot.url} is renewed by its holder")
        timing.pause(timing.look_seconds)


def _try_to_take(
    slot: LeaseSlot, holder: dict[str, Any], seen: tuple[bytes, str] | None, timing: Timing
) -> ObjectLease | None:
    record = Record(holder, os.urandom(16).hex(), 0, timing.ttl_seconds, ProcessIdentity.current())
    began = timing.clock()
    try:
        slot.write(record.encode(), seen[1] if seen else None)
    except StorageExistsError:
        return None
    written = timing.clock()
    timing.pause(max(timing.settle_seconds, 3 * (written - began)))
    back = slot.read()
    found = Record.decode(back[0]) if back else None
    if found is None or found.token != record.token:
        return None
    return ObjectLease(slot, record, began, timing)


class ObjectLease(Lease):
    """A lease that a thread goes on renewing. `check` asks the store."""

    def __init__(self, slot: LeaseSlot, record: Record, written: float, timing: Timing) -> None:
        self._slot = slot
        self._record = record
        self._written = written
        self._timing = timing
        self._lost: str | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ckpt-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Ask the store whether the lease is still ours, and renew it if that is due.

        Raises:
            LeaseHeldError: it was given back, or somebody else took it.
            StorageError: the store does not say.
        """
        self.renew(due_seconds=self._timing.ttl_seconds / BEATS)

    def release(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)
        with self._lock:
            if self._lost is not None:
                return
            self._lost = "given back"
            there = self._read_own()
            if there is not None:
                self._slot.write(_FREE, there)

    def renew(self, *, due_seconds: float = 0.0) -> None:
        """Write the next beat, unless the last one is younger than that. Raises as `check` does."""
        with self._lock:
            if self._lost is not None:
                raise LeaseHeldError(f"the lease of {self._slot.url} was {self._lost}")
            version = self._read_own()
            if version is None:
                raise self._taken()
            now = self._timing.clock()
            if now - self._written < due_seconds:
                return
            following = replace(self._record, beat=self._record.beat + 1)
            try:
                self._slot.write(following.encode(), version)
            except StorageExistsError as err:
                raise self._taken() from err
            self._record, self._written = following, now

    def _taken(self) -> LeaseHeldError:
        self._lost = "taken by another process"
        return LeaseHeldError(
            f"the lease of {self._slot.url} was {self._lost}", hint="stop all writers of this run but one"
        )

    def _read_own(self) -> str | None:
        """The version of our record, None if it is not ours any more."""
        there = self._slot.read()
        record = Record.decode(there[0]) if there else None
        return there[1] if there and record and record.token == self._record.token else None

    def _beat(self) -> None:
        while not self._stop.wait(self._timing.ttl_seconds / BEATS):
            try:
                with asking():  # the next beat asks again
                    self.renew()
            except LeaseHeldError:
                return  # the next `check` raises it
            except CkptError:
                continue  # the store is away; whether somebody took the lease meanwhile shows at the next beat


def _started_ticks(pid: int) -> int:
    """When a process began, in clock ticks since boot."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
