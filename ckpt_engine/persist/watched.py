"""Storages that say when they get on, so that one that hangs is told from one that is slow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from ckpt_engine.persist.stall import SLOWEST_BYTES_PER_SECOND, AbandonedError, Progress
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import ObjectInfo, Storage
from ckpt_engine.store.storage.disk import Disk
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.store.throttle import PacedStorage

_SLICE_BYTES = 32 << 20
_SYNC_BYTES = 64 << 20
"""Bytes in the page cache before they are synced: a sync of everything at the end would look like a hang."""
_DELETE_SECONDS = 1.0


def watched(storage: Storage, progress: Progress) -> Storage:
    """`storage`, telling `progress` of each byte that was taken and each call; puts end once `progress` is abandoned.

    Args:
        storage: of no other use afterwards.
    """
    opaque = not isinstance(storage, PacedStorage | LocalStorage)
    if isinstance(storage, PacedStorage):
        storage.pace = _watched_pace(storage.pace, progress)
    if isinstance(storage, LocalStorage):
        storage._disk = WatchedDisk(storage._disk, progress)

    def rest(name: str, args: tuple[Any, ...]) -> float:
        if name == "put" and opaque:
            return float(sum(block.nbytes for block in args[1])) / SLOWEST_BYTES_PER_SECOND
        if name == "get_into":
            return float(args[2].nbytes) / SLOWEST_BYTES_PER_SECOND
        return _DELETE_SECONDS * len(args) if name == "delete" else 0.0

    for name in _CALLS:
        if hasattr(storage, name):
            setattr(storage, name, _telling(name, _method(storage, name), progress, rest))
    found = _method(storage, "list")

    def listed(prefix: str) -> Iterator[ObjectInfo]:
        items: Iterator[ObjectInfo] | None = None
        while True:
            progress.asked()
            try:
                items = items or iter(found(prefix))
                item = next(items, None)
            finally:
                progress.answered()
            if item is None:
                return
            yield item

    storage.list = listed  # type: ignore[method-assign]
    return storage


_CALLS = ("put", "get", "get_into", "delete", "sweep", "free_bytes", "read_versioned", "replace")


def _method(storage: Storage, name: str) -> Callable[..., Any]:
    """A method of `storage` as it is when it is called, not as it is now."""
    own = vars(storage).get(name)
    return own if own is not None else lambda *args, **options: getattr(type(storage), name)(storage, *args, **options)


def _telling(
    name: str,
    method: Callable[..., Any],
    progress: Progress,
    rest: Callable[[str, tuple[Any, ...]], float],
) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if name == "put":
            progress.check()
        progress.asked(rest(name, args))
        try:
            return method(*args, **options)
        finally:
            progress.answered()

    return call


def _watched_pace(pace: Callable[[int], float] | None, progress: Progress) -> Callable[[int], float]:
    def ask(nbytes: int) -> float:
        progress.check()
        wait = pace(nbytes) if pace is not None else 0.0
        if nbytes or wait:
            progress.moved(wait)
        else:
            progress.tried()
        return wait

    return ask


class WatchedDisk(Disk):
    """A disk that tells of each system call, none of which moves more than some MiB.

    Args:
        disk: does the work.
    """

    def __init__(self, disk: Disk, progress: Progress) -> None:
        self._disk = disk
        self._progress = progress
        self._cached: dict[int, int] = {}
        """Bytes in the page cache by descriptor; none for those that go around it."""

    def create(self, path: str) -> int:
        fd = int(self._watch(self._disk.create, path))
        self._cached[fd] = 0
        return fd

    def open(self, path: str) -> int:
        fd = int(self._watch(self._disk.open, path))
        self._cached[fd] = 0
        return fd

    def bypass_cache(self, fd: int, *, on: bool) -> None:
        self._disk.bypass_cache(fd, on=on)
        if on:
            self._cached.pop(fd, None)
        else:
            self._cached[fd] = 0

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self._progress.check()
        done = int(self._watch(self._disk.write, fd, data[:_SLICE_BYTES], offset))
        if fd in self._cached:
            self._cached[fd] += done
            if self._cached[fd] >= _SYNC_BYTES:
                self.sync(fd)
        return done

    def sync(self, fd: int) -> None:
        self._watch(self._disk.sync, fd)
        if fd in self._cached:
            self._cached[fd] = 0

    def link(self, path: str, new_path: str) -> None:
        self._watch(self._disk.link, path, new_path)

    def rename(self, path: str, new_path: str) -> None:
        self._watch(self._disk.rename, path, new_path)

    def remove(self, path: str) -> None:
        self._watch(self._disk.remove, path)

    def make_folder(self, path: str) -> None:
        self._watch(self._disk.make_folder, path)

    def sync_folder(self, path: str) -> None:
        self._watch(self._disk.sync_folder, path)

    def _watch(self, call: Callable[..., Any], *args: Any) -> Any:
        self._progress.moved()
        try:
            return call(*args)
        finally:
            self._progress.moved()


class Source:
    """A nearer tier as one further tier reads it: whoever hangs in it can be left there, and does not go on afterwards.

    Args:
        storage: of no other use afterwards.
        progress: of the tier that is copied to.
    """

    def __init__(self, storage: Storage, progress: Progress) -> None:
        self._lock = threading.Lock()
        self._age = 0
        """Reads that began at an earlier age were left behind."""
        self._reads = self._left_reads = 0
        self.storage = watched(storage, progress)
        for name in ("get", "get_into", "free_bytes"):
            setattr(storage, name, self._reading(getattr(storage, name)))
        found = storage.list
        storage.list = lambda prefix: iter(self._reading(lambda: list(found(prefix)))())  # type: ignore[method-assign]
        self.repository = Repository(storage)

    def leave(self) -> bool:
        """If reads are under way that were not left before: they end with `AbandonedError`; whether there are any."""
        with self._lock:
            if self._reads == self._left_reads:
                return False
            self._left_reads = self._reads
            self._age += 1
            return True

    def usable(self) -> bool:
        """Whether no read hangs that was left behind."""
        return self._left_reads == 0

    def _reading(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with self._lock:
                self._reads += 1
                age = self._age
            try:
                return method(*args, **options)
            finally:
                with self._lock:
                    left = age != self._age
                    self._reads -= 1
                    self._left_reads -= left
                if left:
                    raise AbandonedError

        return call
