"""Storages that say when they get on, so that one that hangs is told from one that is slow."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ckpt_engine.persist.stall import SLOWEST_BYTES_PER_SECOND, AbandonedError, Progress
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Capabilities, ObjectInfo, Storage, Versions
from ckpt_engine.store.storage.meter import Meter
from ckpt_engine.store.storage.wrappers import WrapperStorage, metered

_DELETE_SECONDS = 1.0


class WatchedStorage(WrapperStorage):
    """Tells `progress` of each byte that is sent and of each call; puts end once `progress` is abandoned."""

    def __init__(self, inner: Storage, progress: Progress) -> None:
        super().__init__(metered(inner, lambda meter: _WatchingMeter(meter, progress)))
        self._progress = progress

    @property
    def capabilities(self) -> Capabilities:
        own = super().capabilities
        return replace(own, versions=own.versions and _WatchedVersions(own.versions, self))

    def asking(self, rest_seconds: float = 0.0) -> _Request:
        """A request, which may take so long without a sign."""
        return _Request(self._progress, rest_seconds)

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        self._progress.check()
        with self.asking():
            self.inner.put(name, blocks, exclusive=exclusive)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        with self.asking():
            return self.inner.get(name, start, nbytes)

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        with self.asking(out.nbytes / SLOWEST_BYTES_PER_SECOND):
            self.inner.get_into(name, start, out)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        items: Iterator[ObjectInfo] | None = None
        while True:
            with self.asking():
                items = items or iter(self.inner.list(prefix))
                item = next(items, None)
            if item is None:
                return
            yield item

    def delete(self, *names: str) -> None:
        with self.asking(_DELETE_SECONDS * len(names)):
            self.inner.delete(*names)

    def sweep(self) -> int:
        with self.asking():
            return self.inner.sweep()

    def free_bytes(self) -> int | None:
        with self.asking():
            return self.inner.free_bytes()


class _Request:
    """Tells of a request, as a context manager. There is one for each row of a listing."""

    __slots__ = ("_progress", "_rest_seconds")

    def __init__(self, progress: Progress, rest_seconds: float) -> None:
        self._progress = progress
        self._rest_seconds = rest_seconds

    def __enter__(self) -> None:
        self._progress.asked(self._rest_seconds)

    def __exit__(self, *_: object) -> None:
        self._progress.answered()


class _WatchedVersions:
    """Conditional writes of a watched storage."""

    def __init__(self, inner: Versions, storage: WatchedStorage) -> None:
        self._inner = inner
        self._storage = storage

    def read_versioned(self, name: str) -> tuple[bytes, str] | None:
        with self._storage.asking():
            return self._inner.read_versioned(name)

    def replace(self, name: str, data: bytes, version: str | None) -> None:
        with self._storage.asking():
            self._inner.replace(name, data, version)


class _WatchingMeter(Meter):
    """Tells of each slice: it may wait for its turn, and then take as long as a slow network would."""

    def __init__(self, inner: Meter, progress: Progress) -> None:
        self._inner = inner
        self._progress = progress
        self.slice_bytes = inner.slice_bytes

    def wait(self, nbytes: int) -> float:
        self._progress.check()
        seconds = self._inner.wait(nbytes)
        if nbytes or seconds:
            self._progress.moved(seconds + nbytes / SLOWEST_BYTES_PER_SECOND)
        else:
            self._progress.tried()
        return seconds

    def pause(self, seconds: float) -> None:
        self._inner.pause(seconds)

    def moved(self) -> None:
        self._inner.moved()
        self._progress.moved()


class Source:
    """A nearer tier as one further tier reads it: whoever hangs in it can be left there, and does not go on afterwards.

    Args:
        progress: of the tier that is copied to.
    """

    def __init__(self, storage: Storage, progress: Progress) -> None:
        self._lock = threading.Lock()
        self._age = 0
        """Reads that began at an earlier age were left behind."""
        self._reads = self._left_reads = 0
        self.storage: Storage = _Reads(WatchedStorage(storage, progress), self)
        self.repository = Repository(self.storage)

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

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A read.

        Raises:
            AbandonedError: it was left behind meanwhile.
        """
        with self._lock:
            self._reads += 1
            age = self._age
        try:
            yield
        finally:
            with self._lock:
                left = age != self._age
                self._reads -= 1
                self._left_reads -= left
            if left:
                raise AbandonedError


class _Reads(WrapperStorage):
    """What is read of a source."""

    def __init__(self, inner: Storage, source: Source) -> None:
        super().__init__(inner)
        self._source = source

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        with self._source.reading():
            return self.inner.get(name, start, nbytes)

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        with self._source.reading():
            self.inner.get_into(name, start, out)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._source.reading():
            found = [*self.inner.list(prefix)]
        return iter(found)

    def free_bytes(self) -> int | None:
        with self._source.reading():
            return self.inner.free_bytes()
