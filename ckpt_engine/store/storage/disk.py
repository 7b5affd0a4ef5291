"""The system calls with which `LocalStorage` changes a disk, one method each.

They are a class so that a test can stand in between: record them, drop them, let them fail.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ckpt_engine.store.storage.regular import open_regular


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
        Path(path).rename(new_path)

    def remove(self, path: str) -> None:
        """Remove a name."""
        Path(path).unlink()

    def make_folder(self, path: str) -> None:
        """A new folder in an existing one."""
        Path(path).mkdir()

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder survive power loss."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
