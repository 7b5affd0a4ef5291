"""What stands beside the bytes that a storage sends, to limit, watch or count them; and the disk that asks it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self

from ckpt_engine.store.storage.disk import Disk

_SYNC_BYTES = 64 << 20
"""Bytes in the page cache before they are synced: a sync of everything at the end would look like a hang."""


class Meter:
    """Stands beside what a storage sends: limits, watches or counts it. This one lets everything pass. Any thread.

    Attributes:
        slice_bytes: a disk is written in slices of at most so many bytes.
    """

    slice_bytes = 32 << 20

    def wait(self, nbytes: int) -> float:
        """Seconds to wait before `nbytes` bytes are sent, or, if 0, before a request is sent again. Raises to stop."""
        del nbytes
        return 0.0

    def pause(self, seconds: float) -> None:
        """Wait that long, where the storage has no way of its own. Raises to stop."""
        time.sleep(seconds)

    def moved(self) -> None:
        """A call to the operating system begins or ends."""


class MeteredDisk(Disk):
    """A disk that tells a meter of each system call, none of which moves more than some MiB.

    Args:
        inner: does the work.
    """

    def __init__(self, inner: Disk, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter
        self._cached: dict[int, int] = {}
        """Bytes in the page cache by descriptor; none for those that go around it."""

    @classmethod
    def over(cls, disk: Disk, wrap: Callable[[Meter], Meter]) -> Self:
        """`disk` with a meter that is made of the one it has."""
        if isinstance(disk, cls):
            return cls(disk._inner, wrap(disk._meter))
        return cls(disk, wrap(Meter()))

    def create(self, path: str) -> int:
        fd = int(self._tell(self._inner.create, path))
        self._cached[fd] = 0
        return fd

    def open(self, path: str) -> int:
        fd = int(self._tell(self._inner.open, path))
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
        seconds = self._meter.wait(part.nbytes)
        if seconds > 0:
            self._meter.pause(seconds)
        done = int(self._tell(self._inner.write, fd, part, offset))
        if fd in self._cached:
            self._cached[fd] += done
            if self._cached[fd] >= _SYNC_BYTES:
                self.sync(fd)
        return done

    def sync(self, fd: int) -> None:
        self._tell(self._inner.sync, fd)
        if fd in self._cached:
            self._cached[fd] = 0

    def link(self, path: str, new_path: str) -> None:
        self._tell(self._inner.link, path, new_path)

    def rename(self, path: str, new_path: str) -> None:
        self._tell(self._inner.rename, path, new_path)

    def remove(self, path: str) -> None:
        self._tell(self._inner.remove, path)

    def make_folder(self, path: str) -> None:
        self._tell(self._inner.make_folder, path)

    def sync_folder(self, path: str) -> None:
        self._tell(self._inner.sync_folder, path)

    def _tell(self, call: Callable[..., Any], *args: Any) -> Any:
        self._meter.moved()
        try:
            return call(*args)
        finally:
            self._meter.moved()
