"""Storages around another storage: they pass on what they do not change, or limit the bandwidth (a token bucket)."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Self

from ckpt_engine.store.storage.base import Capabilities, Folder, ObjectInfo, Storage
from ckpt_engine.store.storage.disk import Meter, PartialFile


class WrapperStorage:
    """Passes everything on to `inner`; a subclass changes what it is there for."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.url = inner.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    @cached_property
    def capabilities(self) -> Capabilities:
        own = self.inner.capabilities
        folder = _WrappedFolder(self, own.folder) if own.folder is not None else None
        return replace(own, folder=folder, metered=partial(self._around, own.metered) if own.metered else None)

    def _around(self, make: Callable[[Callable[[Meter], Meter]], Storage], wrap: Callable[[Meter], Meter]) -> Self:
        made = copy.copy(self)
        vars(made).pop("capabilities", None)  # they are bound to what was copied
        made.inner = make(wrap)
        return made

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        self.inner.put(name, blocks, exclusive=exclusive)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        return self.inner.get(name, start, nbytes)

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        self.inner.get_into(name, start, out)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self.inner.list(prefix)

    def delete(self, *names: str) -> None:
        self.inner.delete(*names)

    def sweep(self) -> int:
        return self.inner.sweep()


class _WrappedFolder(WrapperStorage):
    """A wrapper of a folder, which is asked for what only folders can do.

    Args:
        inner: the wrapper.
        folder: what it wraps.
    """

    def __init__(self, inner: Storage, folder: Folder) -> None:
        super().__init__(inner)
        self._folder = folder
        self.root = folder.root

    def path(self, name: str) -> str:
        return self._folder.path(name)

    def make_folder(self, folder: str) -> None:
        self._folder.make_folder(folder)

    def settle(self, prefix: str) -> None:
        self._folder.settle(prefix)

    def receive(self, name: str, nbytes: int, token: str, fill: Callable[[PartialFile], None]) -> None:
        self._folder.receive(name, nbytes, token, fill)


class MeteredStorage(WrapperStorage):
    """A storage that cannot be metered itself: the meter is asked before each object."""

    def __init__(self, inner: Storage, meter: Meter) -> None:
        super().__init__(inner)
        self._meter = meter

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, metered=lambda wrap: MeteredStorage(self.inner, wrap(self._meter)))

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        seconds = self._meter.wait(sum(block.nbytes for block in blocks))
        if seconds > 0:
            self._meter.pause(seconds)
        self.inner.put(name, blocks, exclusive=exclusive)


def metered(storage: Storage, wrap: Callable[[Meter], Meter]) -> Storage:
    """`storage` with a meter that is made of the one it has: asked before each slice, or else before each object."""
    own = storage.capabilities.metered
    return own(wrap) if own is not None else MeteredStorage(storage, wrap(Meter()))


BURST_SECONDS = 0.25
SLICE_BYTES = 4 << 20
"""What is sent at once, so that a limit below the rate of a disk is kept evenly."""


class Throttle:
    """A token bucket (GCRA, ITU-T I.371): in any `t` seconds at most `rate * (t + 0.25 s)` bytes start, and one slice.

    A slice of any size starts when the ones before it are paid, and is paid by those after it. Thread safe: first come,
    first served.

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
