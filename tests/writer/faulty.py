"""A local folder that plays a remote storage: it fails, hangs or is slow when a test says so."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_engine.errors import StorageError
from ckpt_engine.store.storage.base import Capabilities, ObjectInfo, WrapperStorage
from ckpt_engine.store.storage.disk import Meter
from ckpt_engine.store.storage.local import LocalStorage
from tests.writer.passing import it_hangs

WAIT_SECONDS = 60.0


class Weather:
    """What happens to all storages that share it.

    Args:
        failing: what fails: any of "put", "get", "list", "delete".
        puts: the names that were put, in order.
    """

    def __init__(self) -> None:
        self.failing: frozenset[str] = frozenset()
        self.puts: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()
        self.after_put: Callable[[str], None] = lambda name: None
        self.after_delete: Callable[[], None] = lambda: None
        self.free_bytes: int | None = None
        self.hung = threading.Event()
        """Set once something hangs."""
        self._hanging = ("", "", threading.Event())

    def down(self, *what: str) -> None:
        """Let these operations fail; all if none is named."""
        self.failing = frozenset(what or ("put", "get", "list", "delete"))

    def up(self) -> None:
        """Let nothing fail."""
        self.failing = frozenset()

    def hang(self, what: str, start: str = "") -> threading.Event:
        """Let this operation, on names that start like this, hang until the event is set."""
        self.hung.clear()
        self._hanging = (what, start, threading.Event())
        return self._hanging[2]

    def strike(self, what: str, name: str) -> None:
        operation, start, end = self._hanging
        if what == operation and name.startswith(start) and not end.is_set():
            self.hung.set()
            it_hangs()
            assert end.wait(WAIT_SECONDS)
        if what in self.failing:
            raise StorageError(f"{what} {name}: the network is down")


class Faulty(WrapperStorage):
    """`LocalStorage` under a weather; data files wait for `weather.gate` in the middle."""

    def __init__(self, root: Path, weather: Weather) -> None:
        super().__init__(LocalStorage(root))
        self.weather = weather
        self.meter = Meter()

    @property
    def capabilities(self) -> Capabilities:
        own = super().capabilities
        free_bytes = own.free_bytes if self.weather.free_bytes is None else lambda: self.weather.free_bytes
        return replace(own, metered=self._metered, free_bytes=free_bytes)

    def _metered(self, wrap: Callable[[Meter], Meter]) -> Faulty:
        made = copy.copy(self)
        made.meter = wrap(self.meter)
        return made

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        self.weather.strike("put", name)
        self.meter.wait(sum(block.nbytes for block in blocks))
        if name.startswith("data/"):
            self.weather.reached.set()
            while not self.weather.gate.wait(0.01):
                self.meter.wait(0)
            self.weather.strike("put", name)
        self.inner.put(name, blocks, exclusive=exclusive)
        self.weather.puts.append(name)
        self.weather.after_put(name)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        self.weather.strike("get", name)
        return self.inner.get(name, start, nbytes)

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        self.weather.strike("get", name)
        self.inner.get_into(name, start, out)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.weather.strike("list", prefix)
        return self.inner.list(prefix)

    def delete(self, *names: str) -> None:
        self.weather.strike("delete", names[0] if names else "")
        self.inner.delete(*names)
        self.weather.after_delete()
