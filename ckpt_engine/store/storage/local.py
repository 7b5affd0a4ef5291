"""Objects as files of a local or mounted disk.

An object is written under a temporary name in its own folder, synced, linked to its name, and the folder is synced: the
order that survives power loss on every POSIX file system (Pillai et al., OSDI 2014).
"""

from __future__ import annotations

import copy
import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from stat import S_ISDIR
from typing import Self
from urllib.parse import quote

from ckpt_engine.errors import CorruptError, StorageError
from ckpt_engine.store import names
from ckpt_engine.store.storage.base import Capabilities, Duplicate, Folder, ObjectInfo, Storage
from ckpt_engine.store.storage.disk import (
    DIRECT_MIN_BYTES,
    SLICE_BYTES,
    Disk,
    Meter,
    MeteredDisk,
    closing_fd,
    open_regular,
    read_into,
    require_size,
    translated,
    translating,
    write_blocks,
)
from ckpt_engine.store.storage.partial_file import PartialFile, reserve
from ckpt_engine.store.storage.upload_parts import MemoryBlocks
from ckpt_engine.undo import on_failure

TEMP = ".tmp-"
"""Begins the name of every file that is not yet an object."""

_NO_NAME = re.compile(r"(?:^|/)(?:\.{0,2}(?:/|\Z)|\.tmp-)|\0")
"""A name that could leave the root, or be that of a temporary file."""
_TEMP_FILE = re.compile(r"\.tmp-[0-9a-f]{16}-.+")

_LOST_AND_FOUND = "lost+found"
_CREATE_ATTEMPTS = 20
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


class LocalStorage:
    """`Storage` on a folder, which is made when something is first put there.

    Args:
        root: the folder; a relative path is resolved now.
        disk: the system calls that change it.
    """

    def __init__(self, root: str | os.PathLike[str], *, disk: Disk | None = None) -> None:
        self.root = str(Path(root).expanduser().absolute())
        self.url = "file://" + quote(self.root)
        self._disk = disk or Disk()
        self._durable_folders: set[str] = set()

    def __repr__(self) -> str:
        return f"LocalStorage({self.root!r})"

    @cached_property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            folder=self,
            locks=self,
            metered=self._metered,
            cheap_reads=True,
            slow_answers=False,
            free_bytes=self.free_bytes,
            duplicate=self._duplicate,
        )

    def _metered(self, wrap: Callable[[Meter], Meter]) -> Self:
        made = copy.copy(self)
        vars(made).pop("capabilities", None)  # they are bound to what was copied
        made._disk = MeteredDisk.over(self._disk, wrap)
        return made

    def _duplicate(self, source: Storage) -> Duplicate | None:
        folder = source.capabilities.folder
        same_disk = folder is not None and device_of(folder.root) == device_of(self.root)
        return partial(self._link_of, folder) if folder is not None and same_disk else None

    def _link_of(self, source: Folder, name: str) -> bool:
        """Give a file of another folder a name here: it stays when that folder is removed."""
        path = self.path(name)
        folder = path.rpartition("/")[0]
        with translating("link", path):
            self.make_folder(folder)
            self._remove(path)
            has_link = self._link(source.path(name), path)
            self._disk.sync_folder(folder)
        return has_link

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        path = self.path(name)
        folder, _, file = path.rpartition("/")
        made: MutableSequence[str] = []
        try:
            self.make_folder(folder)
            if exclusive and os.path.exists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            nbytes = blocks.nbytes if isinstance(blocks, MemoryBlocks) else sum([block.nbytes for block in blocks])
            if nbytes >= DIRECT_MIN_BYTES:
                # Fail before a big write rather than after it has filled the disk for everybody.
                stat = os.statvfs(folder)
                if nbytes > stat.f_bavail * stat.f_frsize:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fd, temp = self._create(folder, file)
            made.append(temp)
            try:
                write_blocks(self._disk, fd, blocks)
                self._disk.sync(fd)
                if exclusive and self._link(temp, path):
                    made.append(path)
                else:
                    self._disk.rename(temp, path)
                    made[:] = [path] if exclusive else []
            finally:
                os.close(fd)
            if temp in made:
                with suppress(PermissionError):  # an append-only folder keeps the second name, which takes no room
                    self._remove(temp)
            self._disk.sync_folder(folder)
        except BaseException as err:
            self._undo(made, err)
            if isinstance(err, OSError):
                raise translated(err, "write", path) from err
            raise

    def receive(self, name: str, nbytes: int, token: str, fill: Callable[[PartialFile], None]) -> None:
        path = self.path(name)
        folder, _, file = path.rpartition("/")
        temp = f"{folder}/{TEMP}{token}-{file}"
        with translating("write", path):
            self.make_folder(folder)
            if Path(path).exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            has_begun = Path(temp).exists()
            with closing_fd(self._disk.open(temp)) as fd:
                if not _lock(fd):
                    raise BlockingIOError(errno.EAGAIN, "another process is receiving or clearing it")
                with on_failure(partial(self._disk.remove, temp)):
                    reserve(fd, nbytes)
                fill(PartialFile(self._disk, fd, temp, has_begun=has_begun))
                self._disk.sync(fd)
                has_link = self._link(temp, path)
                if not has_link:
                    self._disk.rename(temp, path)
            if has_link:
                with suppress(PermissionError):
                    self._remove(temp)
            self._disk.sync_folder(folder)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        path = self.path(name)
        try:
            try:
                fd = open_regular(path, os.O_RDONLY)
            except FileNotFoundError:
                self._look_afresh(path.rpartition("/")[0])
                fd = open_regular(path, os.O_RDONLY)
            try:
                if nbytes is None:
                    size = os.fstat(fd).st_size
                    require_size(path, size, names.most_bytes(name))
                    nbytes = max(0, size - start)
                parts = []
                while nbytes > 0 and (part := os.pread(fd, min(nbytes, SLICE_BYTES), start)):
                    parts.append(part)
                    start += len(part)
                    nbytes -= len(part)
                return b"".join(parts)
            finally:
                os.close(fd)
        except OSError as err:
            raise translated(err, "read", path) from err

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        path = self.path(name)
        try:
            done = read_into(path, start, out.cast("B"))
        except OSError as err:
            raise translated(err, "read", path) from err
        if done < out.nbytes:
            raise CorruptError(f"{path} ends at byte {start + done}, needed up to {start + out.nbytes}")

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        try:
            if not self._look_afresh(self.root):
                try:
                    mode = os.stat(self.root).st_mode
                except FileNotFoundError:
                    return iter(())
                if not S_ISDIR(mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            return iter(self._walk(folder, prefix, []))
        except OSError as err:
            raise translated(err, "list", self.root) from err

    def delete(self, *names: str) -> None:
        folders = set()
        for name in names:
            path = self.path(name)
            try:
                self._disk.remove(path)
            except FileNotFoundError:
                pass
            except OSError as err:
                raise translated(err, "delete", path) from err
            folders.add(path.rpartition("/")[0])
        # Also where nothing was left to remove: another process may have removed it and died before its sync.
        for folder in sorted(folders):
            try:
                self._disk.sync_folder(folder)
            except FileNotFoundError:
                pass
            except OSError as err:
                raise translated(err, "delete in", folder) from err

    def settle(self, prefix: str) -> None:
        folder = f"{self.root}/{prefix.rstrip('/')}"
        with translating("sync", folder), suppress(FileNotFoundError):
            self._disk.sync_folder(folder)

    def sweep(self) -> int:
        with translating("clear", self.root):
            paths = ((folder, file) for folder, _, files in os.walk(self.root) for file in files)
            return sum(self._sweep_one(f"{folder}/{file}") for folder, file in paths if _TEMP_FILE.fullmatch(file))

    def free_bytes(self) -> int:
        """Bytes that the file system still has for us."""
        with translating("measure", self.root):
            stat = os.statvfs(_existing(self.root))
        return stat.f_bavail * stat.f_frsize

    def path(self, name: str) -> str:
        if _NO_NAME.search(name):
            raise StorageError(f"not an object name: {name!r}")
        return f"{self.root}/{name}"

    def make_folder(self, folder: str) -> None:
        if folder in self._durable_folders and os.path.isdir(folder):
            return
        # Others may make the same folders meanwhile: look again before calling something a file.
        missing = [path for path in (Path(folder), *Path(folder).parents) if not path.is_dir()]
        if file := next((path for path in missing if path.exists() and not path.is_dir()), None):
            raise NotADirectoryError(errno.ENOTDIR, f"{file} is not a folder")
        for path in reversed(missing):
            with suppress(FileExistsError):
                self._disk.make_folder(str(path))
        # A folder that was there may have been made by a process that died before its sync: sync once in any case.
        ours = [path for path in (Path(folder), *Path(folder).parents) if path.is_relative_to(self.root)]
        for path in dict.fromkeys([*missing, *ours]):
            self._sync_parent(path, must=path in missing or path != Path(self.root))
        self._durable_folders.add(folder)

    def _look_afresh(self, folder: str) -> bool:
        """Ask for what is in these folders; whether the last one can be opened.

        An NFS client remembers for up to a minute that a file or folder is missing. Opening the folder that it is
        missing in makes it ask the server.
        """
        path = self.root.rpartition("/")[0]
        opened = False
        for name in ("", *folder[len(path) + 1 :].split("/")):
            path = f"{path}/{name}" if name else path
            try:
                os.close(os.open(path or "/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
                opened = True
            except OSError:
                opened = False
        return opened

    def _sync_parent(self, path: Path, *, must: bool) -> None:
        try:
            self._disk.sync_folder(str(path.parent))
        except PermissionError:
            # The root was there before us and its parent may not be ours to read: its entry is not our business.
            if must:
                raise

    def _create(self, folder: str, file: str) -> tuple[int, str]:
        """A new temporary file for `file`, opened and locked, and its path."""
        for _ in range(_CREATE_ATTEMPTS):
            temp = f"{folder}/{TEMP}{os.urandom(8).hex()}-{file}"
            fd = self._disk.create(temp)
            try:
                if _lock(fd):
                    return fd, temp
            except BaseException as err:
                os.close(fd)
                self._undo([temp], err)
                raise
            os.close(fd)  # a sweep came between the two calls and takes it
        raise BlockingIOError(errno.EAGAIN, "another process clears each file before it can be locked")

    def _remove(self, path: str) -> None:
        """Remove a name that may be gone: a sweep or another process may have been faster."""
        with suppress(FileNotFoundError):
            self._disk.remove(path)

    def _link(self, temp: str, path: str) -> bool:
        """Give the object its name; False where the file system has no links (FAT, some network and FUSE ones).

        There a rename has to do. It could replace an object made since we looked, but names are unique and one process
        writes a run.
        """
        try:
            self._disk.link(temp, path)
        except OSError as err:
            if err.errno not in _NO_LINKS:
                raise
            return False
        return True

    def _undo(self, made: Sequence[str], cause: BaseException) -> None:
        for path in made:
            try:
                self._remove(path)
            except OSError as err:
                cause.add_note(f"{path} is left behind: {err}")

    def _sweep_one(self, path: str) -> int:
        try:
            fd = open_regular(path, os.O_RDWR)  # NFS locks only what is open for writing
        except (FileNotFoundError, CorruptError):
            return 0
        with closing_fd(fd), suppress(FileNotFoundError):
            # It may have been named or removed since it was opened, and closed, which frees the lock.
            if _lock(fd) and os.path.samestat(os.fstat(fd), os.lstat(path)):
                nbytes = os.fstat(fd).st_size
                self._disk.remove(path)
                return nbytes
        return 0

    def _walk(self, folder: str, prefix: str, found: MutableSequence[ObjectInfo]) -> Sequence[ObjectInfo]:
        try:
            entries = os.scandir(f"{self.root}/{folder}")
        except FileNotFoundError:
            return found
        with entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != _LOST_AND_FOUND and (name + "/").startswith(prefix[: len(name) + 1]):
                        self._walk(name, prefix, found)
                elif name.startswith(prefix) and not entry.name.startswith(TEMP):
                    with suppress(FileNotFoundError):
                        stat = entry.stat(follow_symlinks=False)
                        found.append(ObjectInfo(name, stat.st_size, f"{stat.st_mtime_ns:x}"))
        return found


def device_of(path: str) -> int:
    """The file system that has the folder `path`, or would get it.

    Raises:
        StorageError
    """
    with translating("look at", path):
        return os.stat(_existing(path)).st_dev


def _existing(path: str) -> str:
    """The nearest folder on the way up that exists."""
    while not os.path.exists(path) and path != "/":
        path = os.path.dirname(path)
    return path


def _lock(fd: int) -> bool:
    """Take the lock that tells any process's `sweep` that a put is alive; it ends with the descriptor, or the process.

    Returns:
        False where another has it, or where the file has no name any more.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(fd).st_nlink > 0
