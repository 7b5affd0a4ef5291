"""A bandwidth limit: a token bucket that storages ask before they send, and the storages that ask it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.disk import Disk
from ckpt_engine.store.storage.local import LocalStorage

Pace = Callable[[int], float]
"""Told the bytes about to be sent, says how many seconds to wait before. Any thread. May raise: to stop."""

BURST_SECONDS = 0.25
_SLICE_BYTES = 4 << 20


class Throttle:
    """A token bucket (GCRA, ITU-T I.371): in any `t` seconds at most `rate * (t + 0.25 s)` bytes start, and one slice.

    A slice of any size starts when the ones before it are paid, and is paid by those after it. Thread safe; whoever
    asks first starts first.

    Args:
        bytes_per_second: the limit.
        clock: monotonic seconds.
    """

    def __init__(self, bytes_per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        if not bytes_per_second > 0:
            raise ValueError(f"a rate must be above 0, not {bytes_per_second}")
        self._rate = bytes_per_second
        self._clock = clock
        self._free_at = clock()
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> float:
        """Seconds to wait before `nbytes` bytes may be sent; they count as sent from then on."""
        with self._lock:
            now = self._clock()
            starts = max(self._free_at, now - BURST_SECONDS)
            self._free_at = starts + nbytes / self._rate
        return max(0.0, starts - now)


@runtime_checkable
class PacedStorage(Protocol):
    """A storage that asks `pace` before each part of an object that it sends."""

    pace: Pace | None


def paced(storage: Storage, pace: Pace, pause: Callable[[float], object] = time.sleep) -> Storage:
    """`storage`, asking `pace` before each slice, or before each object where it cannot be asked in between.

    Args:
        storage: of no other use afterwards.
        pause: waits that many seconds; may raise: to stop.
    """
    if isinstance(storage, PacedStorage):
        storage.pace = pace
        return storage
    if isinstance(storage, LocalStorage):
        return LocalStorage(storage.root, disk=_PacedDisk(pace, pause))
    return _PacedObjects(storage, pace, pause)


class _PacedDisk(Disk):
    """A disk that asks before it writes, in slices, so that a limit below the disk's rate is kept evenly."""

    def __init__(self, pace: Pace, pause: Callable[[float], object]) -> None:
        self._pace = pace
        self._pause = pause

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        part = data[:_SLICE_BYTES]
        self._pause(self._pace(len(part)))
        return super().write(fd, part, offset)


class _PacedObjects:
    """A storage that asks before each object."""

    def __init__(self, storage: Storage, pace: Pace, pause: Callable[[float], object]) -> None:
        self._pace = pace
        self._pause = pause
        self._put = storage.put
        self.url = storage.url
        self.get = storage.get
        self.get_into = storage.get_into
        self.list = storage.list
        self.delete = storage.delete
        self.sweep = storage.sweep
        self.free_bytes = storage.free_bytes

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        self._pause(self._pace(sum(block.nbytes for block in blocks)))
        self._put(name, blocks, exclusive=exclusive)
