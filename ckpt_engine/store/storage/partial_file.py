"""A file that is written in parts, in any order."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ckpt_engine.store.storage.disk import SLICE_BYTES, Disk, read_into, translating


@dataclass(eq=False)
class PartialFile:
    """The file so far. Bytes that have not arrived are undefined. Thread safe.

    Args:
        disk: what writes.
        fd: of the file, open for writing.
        path: of the file.
        has_begun: an earlier attempt has left something: look with `read` before bytes are fetched again.
    """

    _disk: Disk
    _fd: int
    _path: str
    has_begun: bool

    def read(self, start: int, out: memoryview) -> bool:
        """Fill `out` with what is there; whether there was enough."""
        with translating("read", self._path):
            return read_into(self._path, start, out) == len(out)

    def write(self, start: int, data: memoryview) -> None:
        """Put bytes into their place.

        Raises:
            StorageError
        """
        done = 0
        with translating("write", self._path):
            while done < len(data):
                done += self._disk.write(self._fd, data[done : done + SLICE_BYTES], start + done)


def reserve(fd: int, nbytes: int) -> None:
    """Make the file `nbytes` long and take the room for them, so that a disk that is too small says so at once.

    Raises:
        OSError: there is no room.
    """
    stat = os.fstat(fd)
    if stat.st_size > nbytes:
        os.ftruncate(fd, nbytes)
    if nbytes and (stat.st_size < nbytes or stat.st_blocks * 512 < nbytes):
        os.posix_fallocate(fd, 0, nbytes)
