"""Access to the files of a disk.

`Disk` is a class so that a test can stand in between: record the calls, drop them, let them fail. It opens regular
files only, and never what a link leads to. Direct I/O moves big blocks around the page cache; it needs addresses,
offsets and sizes that are multiples of a page. Where that does not hold the kernel says EINVAL, and the rest goes
through the page cache.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from stat import S_IFDIR, S_IFIFO, S_IFLNK, S_IFMT, S_IFSOCK, S_ISREG
from typing import Self

from ckpt_engine.errors import (
    CorruptError,
    NotAFolderError,
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageMissingError,
    StorageReadOnlyError,
)
from ckpt_engine.store.storage.page_cache import PAGE_BYTES, is_in_huge_page, is_resident

_SYNC_BYTES = 64 << 20
"""Bytes in the page cache before they are synced: a sync of everything at the end would look like a hang."""
_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Opening a pipe waits for its other end without `O_NONBLOCK`; regular files do not notice it."""
_NOT_REGULAR = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV)
SLICE_BYTES = 64 << 20
"""Bytes per system call: big enough to run at the device's rate, small enough to be interrupted."""
DIRECT_MIN_BYTES = 1 << 20
"""Below this the page cache is faster."""
BOUNCE_BYTES = 2 << 20
"""One huge page: a disk fills it twice as fast as small ones, of which a request has room for a few hundred."""
_rooms = threading.local()
_KINDS_OF_FILES = {S_IFLNK: "a link", S_IFIFO: "a named pipe", S_IFDIR: "a folder", S_IFSOCK: "a socket"}
_KINDS: dict[int, tuple[type[StorageError], str | None]] = {
    errno.ENOSPC: (StorageFullError, "free space or keep fewer snapshots"),
    errno.EDQUOT: (StorageFullError, "the quota is used up: free space or keep fewer snapshots"),
    errno.EROFS: (StorageReadOnlyError, "mount it read-write or choose another folder"),
    errno.EACCES: (StorageReadOnlyError, "check the permissions of this folder and its parents"),
    errno.EPERM: (StorageReadOnlyError, "check the permissions of this folder and its parents"),
    errno.ENOTDIR: (NotAFolderError, "give the path of a folder"),
    errno.ENOENT: (StorageMissingError, None),
    errno.EEXIST: (StorageExistsError, None),
}


class Disk:
    """Changes to a real file system. Methods raise `OSError` and hold no state."""

    def create(self, path: str) -> int:
        """A new file, opened for writing; it must not exist."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def open(self, path: str) -> int:
        """A file, opened for writing, with what it has; a new one if there is none."""
        return open_regular(path, os.O_WRONLY | os.O_CREAT)

    def bypass_cache(self, fd: int, *, on: bool) -> None:
        """Whether writes go around the page cache (`O_DIRECT`); `OSError` (EINVAL) where the file system cannot."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Write at `offset`; returns how much was taken."""
        return os.pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        """Make the file's bytes and size survive power loss (not its name)."""
        os.fsync(fd)

    def link(self, path: str, new_path: str) -> None:
        """Give the file a second name; `FileExistsError` if it is taken."""
        os.link(path, new_path)

    def rename(self, path: str, new_path: str) -> None:
        """Rename, replacing what has the new name, atomically."""
        os.rename(path, new_path)

    def remove(self, path: str) -> None:
        """Remove a name."""
        os.unlink(path)

    def make_folder(self, path: str) -> None:
        """A new folder in an existing one."""
        os.mkdir(path)

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder survive power loss."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class Meter:
    """Stands beside what a storage sends: limits, watches or counts it. This one lets everything pass. Any thread.

    Attributes:
        slice_bytes: a disk is written in slices of at most so many bytes.
    """

    slice_bytes = 32 << 20

    def wait(self, _nbytes: int) -> float:
        """Seconds to wait before so many bytes are sent, or, if 0, before a request is sent again. Raises to stop."""
        return 0.0

    def pause(self, seconds: float) -> None:
        """Wait that long, where the storage has no way of its own. Raises to stop."""
        time.sleep(seconds)

    def take_turn(self, nbytes: int) -> None:
        """Wait until so many bytes may be sent. Raises to stop."""
        seconds = self.wait(nbytes)
        if seconds > 0:
            self.pause(seconds)

    def moved(self) -> None:
        """A call to the operating system begins: the one before has ended."""

    def listener(self) -> Callable[[], object]:
        """What is called at each of these moments: `moved`, or what that comes to."""
        return self.moved


def _reported(change: Callable[..., None]) -> Callable[..., None]:
    """The method of `MeteredDisk` that tells the meter of this change before its inner disk makes it."""

    def method(self: MeteredDisk, *paths: str) -> None:
        self._moved()
        getattr(self._inner, change.__name__)(*paths)

    return method


class MeteredDisk(Disk):
    """A disk that tells a meter of each system call, none of which moves more than some MiB.

    Args:
        inner: does the work.
    """

    def __init__(self, inner: Disk, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter
        self._moved = meter.listener()
        self._cached: dict[int, int] = {}
        """Bytes in the page cache by descriptor; none for those that go around it."""

    @classmethod
    def over(cls, disk: Disk, wrap: Callable[[Meter], Meter]) -> Self:
        """`disk` with a meter that is made of the one it has."""
        if isinstance(disk, cls):
            return cls(disk._inner, wrap(disk._meter))
        return cls(disk, wrap(Meter()))

    def create(self, path: str) -> int:
        self._moved()
        fd = self._inner.create(path)
        self._cached[fd] = 0
        return fd

    def open(self, path: str) -> int:
        self._moved()
        fd = self._inner.open(path)
        self._cached[fd] = 0
        return fd

    def bypass_cache(self, fd: int, *, on: bool) -> None:
        self._inner.bypass_cache(fd, on=on)
        if on:
            self._cached.pop(fd, None)
        else:
            self._cached[fd] = 0

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        part = data[: self._meter.slice_bytes]
        self._meter.take_turn(part.nbytes)
        self._moved()
        done = self._inner.write(fd, part, offset)
        if fd in self._cached:
            self._cached[fd] += done
            if self._cached[fd] >= _SYNC_BYTES:
                self.sync(fd)
        return done

    def sync(self, fd: int) -> None:
        self._moved()
        self._inner.sync(fd)
        if fd in self._cached:
            self._cached[fd] = 0

    link = _reported(Disk.link)
    rename = _reported(Disk.rename)
    remove = _reported(Disk.remove)
    make_folder = _reported(Disk.make_folder)
    sync_folder = _reported(Disk.sync_folder)


def open_regular(path: str, flags: int) -> int:
    """A descriptor of the regular file at `path`. Links on the way to its folder are followed.

    Raises:
        CorruptError: something else has this name.
        OSError: from the file system.
    """
    try:
        fd = os.open(path, flags | _SAFE, 0o666)
    except BlockingIOError:
        # Another process has a kernel lease on the file (file servers do) and is being asked to give it up.
        _require_regular(path, Path(path).lstat().st_mode)
        fd = os.open(path, (flags | _SAFE) & ~os.O_NONBLOCK, 0o666)
    except OSError as err:
        if err.errno in _NOT_REGULAR:
            _require_regular(path, Path(path).lstat().st_mode)
        raise
    try:
        _require_regular(path, os.fstat(fd).st_mode)
    except BaseException as err:
        os.close(fd)
        if isinstance(err, OSError) and err.errno == errno.ESTALE:
            # An NFS client opens by what it remembers; meanwhile another one has removed the file.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from err
        raise
    return fd


@contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """A descriptor for the block, closed after it."""
    try:
        yield fd
    finally:
        os.close(fd)


def require_size(where: str, nbytes: int, most_bytes: int) -> None:
    """Refuse an object that is larger than the format allows.

    Raises:
        CorruptError
    """
    if nbytes > most_bytes:
        raise CorruptError(f"{where} has {nbytes:,} bytes; the format allows {most_bytes:,}")


def _require_regular(path: str, mode: int) -> None:
    if not S_ISREG(mode):
        kind = _KINDS_OF_FILES.get(S_IFMT(mode), "a device")
        raise CorruptError(
            f"{path} is {kind}, not a file",
            hint="ckpt-engine neither makes nor follows these: put the file itself there, or remove it",
        )


def write_blocks(disk: Disk, fd: int, blocks: Sequence[memoryview]) -> int:
    """Write `blocks` back to back from the start of an empty file; returns its size. Not synced.

    Raises:
        OSError: from the file system; the file is then of no use.
    """
    end = 0
    for block in blocks:
        data = block.cast("B")
        done = _write_direct(disk, fd, data, end) if len(data) >= DIRECT_MIN_BYTES and end % PAGE_BYTES == 0 else 0
        while done < len(data):
            done += disk.write(fd, data[done : done + SLICE_BYTES], end + done)
        end += len(data)
    return end


def _write_direct(disk: Disk, fd: int, data: memoryview, start: int) -> int:
    """Write the whole pages of `data`; returns how many bytes were taken, 0 where direct writes are impossible."""
    whole = len(data) - len(data) % PAGE_BYTES
    done = 0
    try:
        disk.bypass_cache(fd, on=True)
    except OSError as err:
        if err.errno != errno.EINVAL:
            raise
        return 0
    try:
        while done < whole:
            done += disk.write(fd, data[done : min(done + SLICE_BYTES, whole)], start + done)
    except OSError as err:
        if err.errno != errno.EINVAL:
            raise
    finally:
        disk.bypass_cache(fd, on=False)
    return done


def read_into(path: str, start: int, out: memoryview) -> int:
    """Fill `out` from `start` on; returns how many bytes there were, fewer only at the end of the file.

    What the page cache has is copied from there; the rest of a large read goes around it, which is faster, takes a
    fifth of the processor time and evicts nothing. Several threads may read one file.

    Raises:
        CorruptError: it is no regular file.
        OSError: from the file system.
    """
    with closing(_Reader(path, is_large=len(out) >= DIRECT_MIN_BYTES)) as reader:
        done = 0
        while done < len(out):
            got = reader.read(out[done : done + SLICE_BYTES], start + done)
            if got == 0:
                break
            done += got
        return done


def private_memory(nbytes: int) -> mmap.mmap:
    """New memory that begins at a page, of huge pages where the kernel has them."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that was built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _bounce() -> mmap.mmap:
    """Memory of this thread for what cannot be read to where it belongs."""
    room: mmap.mmap | None = getattr(_rooms, "kept", None)
    if room is None:
        room = _rooms.kept = private_memory(BOUNCE_BYTES)
    return room


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


class _Reader:
    """Three ways to read one file; of the first two None, or 0, says that it is not possible here.

    Args:
        is_large: else the page cache is faster.
    """

    def __init__(self, path: str, *, is_large: bool) -> None:
        self._path = path
        self._fd = open_regular(path, os.O_RDONLY)
        self._direct_fd: int | None = None
        self._direct_works = self._may_be_cached = is_large

    def close(self) -> None:
        os.close(self._fd)
        if self._direct_fd is not None:
            os.close(self._direct_fd)

    def read(self, part: memoryview, at: int) -> int:
        """Fill `part` with what is at `at`; how many bytes came."""
        if self._may_be_cached and (got := self._cached(part, at)) is not None:
            return got
        if self._direct_works and (got := self._direct(part, at)):
            return got
        return os.preadv(self._fd, [part], at)

    def _cached(self, part: memoryview, at: int) -> int | None:
        """The bytes that the page cache has at `at`; None if it has none or cannot say, and from then on."""
        try:
            if is_resident(self._fd, at):
                return os.preadv(self._fd, [part], at, os.RWF_NOWAIT)
        except OSError as err:
            if err.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                raise
        self._may_be_cached = False
        return None

    def _direct(self, part: memoryview, at: int) -> int:
        """Read whole pages around the page cache, by way of other memory unless these are pages of `part`, and huge."""
        address, skew, room = _address(part), at % PAGE_BYTES, memoryview(_bounce())
        head, whole, tail = min(len(part), BOUNCE_BYTES - skew), 0, 0
        if (address - at) % PAGE_BYTES == 0 and is_in_huge_page(address + len(part) // 2):
            head = min(len(part), -skew % PAGE_BYTES)
            tail = (len(part) - head) % PAGE_BYTES
            whole = len(part) - head - tail
        # Behind other requests one of a page takes as long as a large one: its ends come with the rest.
        first = -(-(skew + head) // PAGE_BYTES) * PAGE_BYTES if head else 0
        blocks = [room[:first], part[head : head + whole], room[BOUNCE_BYTES - PAGE_BYTES :] if tail else room[:0]]
        try:
            if self._direct_fd is None:
                self._direct_fd = open_regular(self._path, os.O_RDONLY | os.O_DIRECT)
            got = os.preadv(self._direct_fd, [block for block in blocks if block.nbytes], at - skew) - skew
        except OSError as err:
            if err.errno != errno.EINVAL:
                raise
            self._direct_works = False
            return 0
        got = max(0, min(got, head + whole + tail))
        ctypes.memmove(address, _address(room) + skew, min(got, head))
        if got > head + whole:
            ctypes.memmove(address + head + whole, _address(blocks[2]), got - head - whole)
        return got


def translated(error: OSError, what: str, path: str, else_hint: str | None = None) -> StorageError:
    """Our error for `error`, which happened when doing `what` at `path`; raise it `from` the original.

    Args:
        else_hint: where the kind of error has none.
    """
    kind, hint = _KINDS.get(error.errno or 0, (StorageError, None))
    reason = error.strerror or str(error) or type(error).__name__
    return kind(f"cannot {what} {path}: {reason}", hint=hint or else_hint)


@contextmanager
def translating(what: str, path: str, else_hint: str | None = None) -> Iterator[None]:
    """Turns an `OSError` of the block into our error; see `translated`."""
    try:
        yield
    except OSError as err:
        raise translated(err, what, path, else_hint) from err
