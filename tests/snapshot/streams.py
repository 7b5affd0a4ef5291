"""A device made of host memory whose streams do their work late, and in any order that CUDA allows."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from ckpt_engine.snapshot.cuda import Copy
from ckpt_engine.state import entries

DEVICES = (torch.device("cuda", 0), torch.device("cuda", 1))
WAIT_SECONDS = 30.0


class Event:
    """Happens when the stream that it was recorded in gets there."""

    def __init__(self) -> None:
        self.happened = False


@dataclass(eq=False)
class Stream:
    """Work that is done in order: closures, and events to wait for."""

    name: str
    work: deque[Callable[[], None] | Event] = field(default_factory=deque)

    def stuck(self) -> bool:
        return not self.work or (isinstance(self.work[0], Event) and not self.work[0].happened)


class FakeDevices:
    """A `Runtime`. Tensors are "on" a device once they were given to `put`. Nothing happens but in `pump`.

    Args:
        seed: of the order in which streams get on.
        drops: kinds of waits that are forgotten: `instant`, `eager`, `fence`; what a broken engine would do.
        lockable: pieces of host memory that can be page-locked.

    Attributes:
        most_copies: that have been waiting in one stream.
    """

    def __init__(self, seed: int = 0, drops: Sequence[str] = (), lockable: int = 1 << 30) -> None:
        self.random = random.Random(seed)
        self.drops = drops
        self.main = {device: Stream(f"main {device}") for device in DEVICES}
        self.streams = [*self.main.values()]
        self.registered: dict[int, int] = {}
        self.unregistered = 0
        self.allocated: dict[torch.device, int] = dict.fromkeys(DEVICES, 0)
        self.fail_next_copy = False
        self.idle_until_waited_for = False
        self.most_copies = 0
        self._lockable = lockable
        self._current = dict(self.main)
        self._homes: dict[int, torch.device] = {}
        self._sides: set[int] = set()
        self._copying: dict[int, Stream] = {}
        self._eager = False
        self._lock = threading.RLock()
        self._moved = threading.Condition(self._lock)

    # ---- what a training does

    def put(self, tensor: torch.Tensor, device: torch.device = DEVICES[0]) -> torch.Tensor:
        self._homes[tensor.untyped_storage().data_ptr()] = device
        return tensor

    def home(self, tensor: torch.Tensor) -> torch.device | None:
        return self._homes.get(tensor.untyped_storage().data_ptr())

    def launch(self, work: Callable[[], None], device: torch.device = DEVICES[0]) -> None:
        """Queue a kernel in the current stream."""
        with self._lock:
            self._current[device].work.append(work)

    @contextmanager
    def stream(self, stream: Stream, device: torch.device = DEVICES[0]) -> Iterator[None]:
        before = self._current[device]
        self._current[device] = stream
        try:
            yield
        finally:
            self._current[device] = before

    def pump(self, count: int | None = None) -> None:
        """Do so many pieces of work of streams chosen at random; None: until nothing is left."""
        while count is None or count > 0:
            with self._lock:
                ready = [stream for stream in self.streams if not stream.stuck()]
                if not ready:
                    return
                done = self.random.choice(ready).work.popleft()
                if callable(done):
                    done()
                self._moved.notify_all()
            count = None if count is None else count - 1

    # ---- Runtime

    def device(self, tensor: torch.Tensor) -> torch.device | None:
        return self.home(tensor)

    def current(self, device: torch.device) -> Stream:
        return self._current[device]

    def side(self, device: torch.device) -> Stream:
        stream = Stream(f"side of {device}")
        with self._lock:
            self.streams.append(stream)
            self._sides.add(id(stream))
        return stream

    def mark(self, stream: Stream) -> Event:
        event = Event()
        with self._lock:
            stream.work.append(lambda: setattr(event, "happened", True))
        return event

    def hold(self, stream: Stream, event: Event) -> None:
        kind = "instant" if id(stream) in self._sides else "eager" if self._eager else "fence"
        if kind not in self.drops:
            with self._lock:
                stream.work.append(event)

    def wait(self, event: Event) -> None:
        while self.idle_until_waited_for and not event.happened:
            self.pump(1)
        with self._lock:
            if not self._moved.wait_for(lambda: event.happened, WAIT_SECONDS):
                raise AssertionError("no thread pumps")

    @contextmanager
    def copies(self, stream: Stream) -> Iterator[Copy]:
        self._copying[threading.get_ident()] = stream
        yield partial(self._copy, stream)

    def _copy(self, stream: Stream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        if self.fail_next_copy:
            self.fail_next_copy = False
            raise RuntimeError("CUDA error: a copy was refused")
        pairs = list(zip(targets, sources, strict=True))
        for host in (tensor for tensor in (*targets, *sources) if self.home(tensor) is None):
            self._require_one_piece(host)

        with self._lock:
            stream.work.append(partial(self._run, pairs))
            waiting = sum(len(work.args[0]) for work in stream.work if isinstance(work, partial))
            self.most_copies = max(self.most_copies, waiting)

    def _run(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source)

    def add_up(self, words: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
        def run() -> None:
            rows.copy_(words.sum(1))
            columns.copy_(words.sum(0))

        with self._lock:
            self._copying[threading.get_ident()].work.append(run)

    def empty(self, stream: Stream, device: torch.device, nbytes: int) -> torch.Tensor:
        self.allocated[device] += nbytes
        return self.put(torch.full((nbytes,), 0xA5, dtype=torch.uint8), device)

    def host(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def register(self, device: torch.device, address: int, nbytes: int) -> str | None:
        if len(self.registered) >= self._lockable:
            return "out of memory"
        self.registered[address] = nbytes
        return None

    def unregister(self, device: torch.device, address: int) -> str | None:
        del self.registered[address]
        self.unregistered += 1
        return None

    def _require_one_piece(self, host: torch.Tensor) -> None:
        """CUDA refuses copies that cross from one page-locked range to another."""
        start, stop = host.data_ptr(), host.data_ptr() + host.numel() * host.element_size()
        for at, nbytes in self.registered.items():
            assert stop <= at or at + nbytes <= start or (at <= start and stop <= at + nbytes)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Waits of main streams within are those for eager tensors."""
        self._eager = True
        try:
            yield
        finally:
            self._eager = False


@contextmanager
def pumped(devices: FakeDevices) -> Iterator[None]:
    """Let the devices work on a thread of their own."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.0005):
            devices.pump(50)
        devices.pump()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(WAIT_SECONDS)


def on_devices(devices: FakeDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans see the devices on which `devices` says that tensors are."""
    monkeypatch.setattr(entries, "device_of", lambda tensor: devices.home(tensor) or tensor.device)
