"""Copy device tensors into the arena behind the streams of training, without making the host wait for them.

The copies are queued in a stream of their own that waits for the instant. What training queues after `save` waits
until the eager tensors have been read, what it queues after the fence until the lazy ones have: both on the device,
while the host goes on. A thread waits for the end and tells that the arena is complete.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt_engine.errors import WaitTimeoutError
from ckpt_engine.snapshot.cuda import CUDA, Runtime
from ckpt_engine.snapshot.cuda_layout import Item, Part, Transfer, transfers
from ckpt_engine.snapshot.cuda_pin import split

_ALIGN = 64
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
_PACKED_AS_THEY_ARE = frozenset(
    (*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""Dtypes that every version of torch can copy many tensors of in one launch; of others it gets the bytes."""


@dataclass(frozen=True, slots=True)
class Load:
    """The device tensors of one instant, in the order of the plan's entries.

    Args:
        views: where they go; all of one slot.
        tensors: what to copy.
        lazy: which of them may be read until the fence.
    """

    views: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]
    lazy: Sequence[bool]


_NOTHING = Load((), (), ())


class Flight:
    """Copies of one snapshot that are on their way.

    Args:
        runtime: of the devices.
        load: what to copy.
        on_complete: called once, on the watching thread. Must not raise.

    Attributes:
        complete: set when every byte is in the arena, or never will be.
        error: what stopped a copy, or None; final once `complete`.
        read: by device, when the lazy tensors have been read.
        ends: when everything queued has been done.
    """

    def __init__(self, runtime: Runtime, load: Load, on_complete: Callable[[], None]) -> None:
        self.complete = threading.Event()
        self.error: BaseException | None = None
        self.read: dict[torch.device, Any] = {}
        self.ends: list[Any] = []
        self._runtime = runtime
        self._on_complete = on_complete
        # Freed memory would be used again, under the copy: whoever lets go of a tensor meanwhile, these stay.
        self.load: Load = load

    def fence(self) -> None:
        """What the calling thread queues from now on waits, on the device, until the lazy tensors have been read."""
        for device, event in self.read.items():
            self._runtime.hold(self._runtime.current(device), event)

    def land(self) -> None:
        """Wait for the copies; the watching thread."""
        try:
            for event in self.ends:
                self._runtime.wait(event)
        except RuntimeError as err:
            self.error = self.error or err
        self.load = _NOTHING
        self.ends.clear()
        self.complete.set()
        self._on_complete()


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors that are packed in one call, by index, and where in the buffer each goes.

    Args:
        rows: of the only tensor; None for all of them.
        as_bytes: the targets are bytes.
    """

    indices: Sequence[int]
    targets: Sequence[torch.Tensor]
    rows: tuple[int, int] | None
    as_bytes: bool

    def sources(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = [tensors[index] for index in self.indices]
        if self.as_bytes:
            return [tensor.detach().view(-1).view(torch.uint8) for tensor in found]
        return found if self.rows is None else [tensor.narrow(0, *self.rows) for tensor in found]


@dataclass(frozen=True, slots=True)
class _Step:
    """A transfer, and how it is packed."""

    transfer: Transfer
    groups: Sequence[_Group]


@dataclass(slots=True)
class _Lane:
    """What is kept for one device: a stream, memory to pack in, and the way of the last plan."""

    stream: Any
    buffer: torch.Tensor
    steps: Sequence[_Step] = ()


class DeviceCopies:
    """The streams, buffers and the watching thread of one Checkpointer; nothing of it exists before it is needed.

    All methods belong to the training thread.
    """

    def __init__(self, runtime: Runtime = CUDA) -> None:
        self.runtime = runtime
        self._lanes: dict[torch.device, _Lane] = {}
        self._active: list[torch.device] = []
        self._key: object = None
        self._flights: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, plan: object, flight: Flight) -> None:
        """Queue the copies of one instant.

        Work that was queued in the current streams before is part of the instant. An error does not raise: the flight
        has it.

        Args:
            plan: of the snapshot; the same object as last time means the same entries, devices and strides.
            flight: holds what to copy.
        """
        load = flight.load
        try:
            if plan is not self._key:
                self._plan(load)
                self._key = plan
            for device in self._active:
                lane = self._lanes[device]
                self.runtime.hold(lane.stream, self.runtime.mark(self.runtime.current(device)))
                self._queue(device, lane, load, flight)
        except RuntimeError as err:
            flight.error = err
            self._key = None
        try:
            # After an error too: what was queued still writes into the slot.
            flight.ends = [self.runtime.mark(lane.stream) for lane in self._lanes.values()]
        except RuntimeError as err:
            flight.error = flight.error or err
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="ckpt-device", daemon=True)
            self._thread.start()
        self._flights.put(flight)

    def close(self, timeout: float) -> None:
        """Wait for all copies, and give the device memory back.

        Raises:
            WaitTimeoutError: copies are still under way.
        """
        if self._thread is not None:
            deadline = time.monotonic() + timeout
            self._flights.put(None)
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                raise WaitTimeoutError(f"copies from the GPU were still under way after {timeout:.0f} s")
            self._thread = None
        self._lanes.clear()
        self._active.clear()
        self._key = None

    def _watch(self) -> None:
        while (flight := self._flights.get()) is not None:
            flight.land()
            del flight  # the tensors of a snapshot are not kept alive by a thread that waits for the next one

    def _plan(self, load: Load) -> None:
        items: dict[torch.device, list[Item]] = {}
        for index, (view, tensor, lazy) in enumerate(zip(load.views, load.tensors, load.lazy, strict=True)):
            nbytes = view.numel() * view.element_size()
            if nbytes:
                rows = int(view.shape[0]) if view.dim() else 1
                start = int(view.storage_offset()) * view.element_size()
                item = Item(index, start, nbytes, rows, lazy, _in_order(tensor))
                items.setdefault(self.runtime.device(tensor), []).append(item)
        self._active = list(items)
        for device, found in items.items():
            way = transfers(found)
            room = max((t.nbytes for t in way if t.packed), default=0) + _ALIGN
            lane = self._lanes.get(device)
            if lane is None:
                stream = self.runtime.side(device)
                lane = self._lanes[device] = _Lane(stream, self.runtime.empty(stream, device, room))
            elif lane.buffer.numel() < room:
                lane.steps = ()  # its views go before the larger one is made
                lane.buffer = lane.buffer[:0]
                lane.buffer = self.runtime.empty(lane.stream, device, room)
            lane.steps = [_Step(t, _groups(t, lane.buffer, load) if t.packed else ()) for t in way]

    def _queue(self, device: torch.device, lane: _Lane, load: Load, flight: Flight) -> None:
        runtime = self.runtime
        slot = _bytes_of(load.views[0])
        eager = sum(1 for step in lane.steps if not step.transfer.lazy)
        for number, step in enumerate(lane.steps, 1):
            transfer = step.transfer
            start = transfer.start
            for group in step.groups:
                runtime.copy(lane.stream, group.targets, group.sources(load.tensors))
            if transfer.packed:
                source = lane.buffer[start % _ALIGN :]
                self._mark_read(number, eager, device, lane, flight)
            else:
                source = load.tensors[transfer.parts[0].index].detach().view(-1).view(torch.uint8)
            cuts = list(split(start, start + transfer.nbytes))
            runtime.copy(lane.stream, [slot[a:b] for a, b in cuts], [source[a - start : b - start] for a, b in cuts])
            if not transfer.packed:
                self._mark_read(number, eager, device, lane, flight)

    def _mark_read(self, number: int, eager: int, device: torch.device, lane: _Lane, flight: Flight) -> None:
        """The tensors of step `number` have been read at this point of the stream; the first `eager` ones are eager."""
        if number == eager:
            self.runtime.hold(self.runtime.current(device), self.runtime.mark(lane.stream))
        elif number == len(lane.steps):
            flight.read[device] = self.runtime.mark(lane.stream)


def _in_order(tensor: torch.Tensor) -> bool:
    """Whether its bytes can go as they are, now and whenever the plan fits: a conjugate may become one at any time."""
    return tensor.is_contiguous() and not tensor.is_complex() and not tensor.is_neg()


def _bytes_of(view: torch.Tensor) -> torch.Tensor:
    """All bytes of the slot that a view is of."""
    storage = view.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def _groups(transfer: Transfer, buffer: torch.Tensor, load: Load) -> list[_Group]:
    """How the parts of a transfer are packed; addresses in the buffer are as aligned as in the slot."""
    shift = transfer.start - transfer.start % _ALIGN
    # One launch takes tensors of one dtype that are in order; one that is not slows all others of the call down.
    groups: dict[tuple[torch.dtype, bool, bool], tuple[list[int], list[torch.Tensor]]] = {}
    for part in transfer.parts:
        source = load.tensors[part.index]
        in_order = source.is_contiguous()
        as_bytes = in_order and part.rows is None and source.dtype not in _PACKED_AS_THEY_ARE
        raw = buffer[part.start - shift :][: part.nbytes]
        indices, targets = groups.setdefault((source.dtype, in_order, as_bytes), ([], []))
        indices.append(part.index)
        targets.append(raw if as_bytes else _target(part, raw, load))
    rows = transfer.parts[0].rows
    return [_Group(indices, targets, rows, key[2]) for key, (indices, targets) in groups.items()]


def _target(part: Part, raw: torch.Tensor, load: Load) -> torch.Tensor:
    view = load.views[part.index]
    shape = view.shape if part.rows is None else (part.rows[1], *view.shape[1:])
    return raw.view(view.dtype).view(shape)
