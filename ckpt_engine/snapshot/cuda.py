"""Copies device tensors into the arena behind the streams of training, without making the host wait for them.

The copies are queued in a stream of their own that waits for the instant. What training queues after `save` waits
until the eager tensors have been read, what it queues after the fence until the lazy ones have: both on the device,
while the host goes on. A thread waits for the end and tells that the arena is complete.

A transfer costs the host several microseconds however small it is, so small neighbours are packed on the device, which
takes one launch for many of them and next to none of the device's bandwidth, and cross as one. But packing waits until
training's kernels leave room. A tensor that is not contiguous is packed too: its bytes have to be put in order on the
device anyway. Large tensors go as they are, so that they cost the device's processors nothing.

Memory that GPUs copy to is page-locked piece by piece. The driver holds locks meanwhile, and every process on the
machine that needs them waits: with one call for all of an arena that can take seconds.

Everything that talks to CUDA while a snapshot is copied goes through `Cuda`, so that tests can put streams in its
place whose work is done late and in any order that CUDA allows.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt_engine.errors import StateError, WaitTimeoutError
from ckpt_engine.snapshot.copying import join
from ckpt_engine.snapshot.proof import Sums, matrix_of, sums_of, vector_bytes
from ckpt_engine.snapshot.transfers import DeviceTensor, Transfer, transfers
from ckpt_engine.state.flatten import show_path
from ckpt_engine.store.tree import TreePath

FIRST_COPIES = 896
"""About so many copies `save` queues itself. About 1,000 of a stream can be waiting: the thread that queues one more
waits for the device, and training, which the same thread queues, runs dry."""
LATER_COPIES = 64
"""So many, some gigabytes, the watching thread queues at once."""
DIRECT_SUMS = 256
"""Of so many transfers one stream makes the sums, with two or three launches for each."""
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all GPUs, not only the current one
_SUCCESS = 0


Copy = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
"""Queues copies to the first from the second; either side of a pair may be host memory, which should be page-locked."""
PIECE_BYTES = 256 << 20
"""Larger pieces make other processes wait longer, smaller ones make more copies."""
DRIVER_TIMEOUT_SECONDS = 600.0
_ALIGN = 64
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
_PACKED_AS_THEY_ARE = frozenset(
    (*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""Dtypes that every version of torch can copy many tensors of in one launch; of others it gets the bytes."""


def home(runtime: Cuda, tensor: torch.Tensor) -> torch.device:
    """Which device has the bytes of a tensor that is on one of them."""
    device = runtime.device(tensor)
    assert device is not None
    return device


class Cuda:
    """Devices whose work is queued in streams: torch's CUDA devices. A stream or event is whatever this has returned.

    A thread that has not chosen a device would make a context on the first one, which takes hundreds of megabytes of a
    GPU that training may not use: so whatever other threads call chooses one.
    """

    def device(self, tensor: torch.Tensor) -> torch.device | None:
        """Which of these devices has the tensor's bytes; None: none of them."""
        return tensor.device if tensor.is_cuda else None

    def current(self, device: torch.device) -> Any:
        """The stream that the calling thread queues work in."""
        return torch.cuda.current_stream(device)

    def side(self, device: torch.device) -> Any:
        """A new stream."""
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self, stream: Any) -> Any:
        """An event that happens when all work queued in `stream` so far is done."""
        # Blocking: a host thread that waits for it sleeps, instead of taking a core from training.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def hold(self, stream: Any, event: Any) -> None:
        """Work queued in `stream` from now on waits for `event`; the caller does not."""
        stream.wait_event(event)

    def wait(self, event: Any) -> None:
        """Return when `event` has happened. Lets go of the GIL and of the core."""
        with torch.cuda.device(event.device):
            event.synchronize()

    @contextmanager
    def copies(self, stream: Any) -> Iterator[Copy]:
        """Inside the `with` block `stream` is the current one of its device, and what it gives queues copies there."""
        with torch.no_grad(), torch.cuda.stream(stream):
            yield self._copy

    def _copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        if targets[0].is_cuda and sources[0].is_cuda:
            torch._foreach_copy_(list(targets), list(sources))
            return
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)

    def add_up(self, words: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
        """Inside a block of `copies`: queue the sums of each row and of each column of a matrix of integers."""
        torch.sum(words, 1, out=rows)
        torch.sum(words, 0, out=columns)

    def empty(self, stream: Any, device: torch.device, nbytes: int) -> torch.Tensor:
        """Bytes on a device, to be used in `stream` only."""
        # It is used again by later snapshots, of which some may be taken in inference mode and some not.
        with torch.inference_mode(False), torch.cuda.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    @torch.inference_mode(False)
    def host(self, nbytes: int) -> torch.Tensor:
        """Bytes in host memory, page-locked where that is possible: else a copy to them makes the host wait."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            return torch.empty(nbytes, dtype=torch.uint8)

    def register(self, device: torch.device, address: int, nbytes: int) -> str | None:
        """Page-lock host memory, by the driver of a device; what is wrong, or None. Lets go of the GIL."""
        with torch.cuda.device(device):
            return self._problem(_cudart().cudaHostRegister(address, nbytes, _PORTABLE))

    def unregister(self, device: torch.device, address: int) -> str | None:
        """Give page-locked memory back to the system's paging; what is wrong, or None."""
        with torch.cuda.device(device):
            return self._problem(_cudart().cudaHostUnregister(address))

    def _problem(self, code: Any) -> str | None:
        return None if int(code) == _SUCCESS else str(_cudart().cudaGetErrorString(code))


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


CUDA = Cuda()


@dataclass(eq=False)
class Pinned:
    """A range of host memory, page-locked or not.

    Args:
        address: of its first byte, at the start of a page.
        nbytes: its length; all of it must be present (touched).
        locks: the runtime of the devices.
    """

    _address: int
    _nbytes: int
    _locks: Cuda
    _pieces: list[tuple[Any, int]] = field(default_factory=list, init=False)
    _problem: str | None = field(default=None, init=False)
    _done: bool = field(default=False, init=False)

    def pin(self, device: Any, go_on: Callable[[], bool] = lambda: True) -> str | None:
        """Page-lock all of it, unless that was tried before; what is wrong, or None. Any thread; releases the GIL.

        Args:
            device: one of those that will copy.
            go_on: asked between pieces; False ends it early, and the next call goes on there.

        Raises:
            WaitTimeoutError: the driver does not return.
        """
        if not self._done:
            # CUDA keeps the error of a refused call for the next launch of the thread that made it: let it be no
            # thread that launches anything.
            thread = threading.Thread(target=self._run, args=(device, go_on), name="ckpt-pin", daemon=True)
            thread.start()
            join(thread, DRIVER_TIMEOUT_SECONDS, "page-locking the arena makes no progress")
        return self._problem

    def unpin(self) -> None:
        """Give the memory back to the system's paging. No copy may be under way."""
        pieces, self._pieces, self._done = self._pieces, [], False
        for device, address in pieces:
            # Refused only where the process's CUDA context is gone, and everything with it.
            self._locks.unregister(device, address)

    def _run(self, device: Any, go_on: Callable[[], bool]) -> None:
        for start, stop in split(len(self._pieces) * PIECE_BYTES, self._nbytes):
            if not go_on():
                return
            try:
                self._problem = self._locks.register(device, self._address + start, stop - start)
            except RuntimeError as err:
                self._problem = str(err)
            if self._problem is not None:
                self.unpin()
                break
            self._pieces.append((device, self._address + start))
        self._done = True


def split(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The bytes from `start` to `stop`, counted from the start of the range, cut where one piece ends."""
    while start < stop:
        end = min(stop, (start // PIECE_BYTES + 1) * PIECE_BYTES)
        yield start, end
        start = end


@dataclass(frozen=True, slots=True)
class Load:
    """The device tensors of one instant, in the order of the plan's entries.

    Args:
        views: where the bytes of an entry go; all of one slot.
        tensors: what to copy; those of an entry one behind another.
        counts: how many of the tensors are in each entry.
        lazy: which entries may be read until the fence.
        paths: of the entries.
    """

    views: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]
    counts: Sequence[int]
    lazy: Sequence[bool]
    paths: Sequence[TreePath]

    def places(self) -> Iterator[tuple[int, bool]]:
        """Of every tensor where its bytes go, counted from the start of the slot, and whether it is lazy."""
        tensors = iter(self.tensors)
        for view, count, lazy in zip(self.views, self.counts, self.lazy, strict=True):
            start = int(view.storage_offset()) * view.element_size()
            for tensor in itertools.islice(tensors, count):
                yield start, lazy
                start += tensor.numel() * tensor.element_size()

    def path_at(self, byte: int) -> TreePath:
        """Of the entry that has this byte of the slot."""
        starts = [int(view.storage_offset()) * view.element_size() for view in self.views]
        return max((start, path) for start, path in zip(starts, self.paths, strict=True) if start <= byte)[1]


class TornCopyError(StateError):
    """What is copied behind training was changed before it was copied."""


@dataclass(eq=False)
class Flight:
    """Copies of one snapshot that are on their way.

    Args:
        runtime: of the devices.
        load: what to copy.
        on_complete: called once, on the watching thread. Must not raise.

    Attributes:
        complete: set when every byte is in the arena, or never will be.
        error: what stopped a copy, or None; final once `complete`.
        torn: names what changed before it was copied, or None; final once `complete`.
        queued: set when all copies are queued, or never will be; `read` and `ends` are final then.
        read: by device, when all tensors have been read.
        ends: when everything queued has been done.
    """

    _runtime: Cuda
    # Freed memory would be used again, under the copy: these stay, also where a tensor is freed meanwhile.
    load: Load
    _on_complete: Callable[[], None]
    complete: threading.Event = field(default_factory=threading.Event, init=False)
    error: BaseException | None = field(default=None, init=False)
    torn: TornCopyError | None = field(default=None, init=False)
    queued: threading.Event = field(default_factory=threading.Event, init=False)
    read: dict[torch.device, Any] = field(default_factory=dict, init=False)
    ends: list[Any] = field(default_factory=list, init=False)
    summed: Sequence[_Lane] = field(default=(), init=False)
    """What was lazy; its sums are those of the instant."""

    def fence(self) -> None:
        """What the calling thread queues from now on waits, on the device, until the lazy tensors have been read.

        Where the copies are too many to be queued at once, the caller waits until the device has come to the last ones.

        Raises:
            WaitTimeoutError: it does not.
        """
        if not self.queued.wait(DRIVER_TIMEOUT_SECONDS):
            raise WaitTimeoutError("the device makes no progress with the copies of the snapshot")
        for device, event in self.read.items():
            self._runtime.hold(self._runtime.current(device), event)

    def land(self) -> None:
        """Wait for the copies; the watching thread."""
        try:
            for event in self.ends:
                self._runtime.wait(event)
            if self.error is None:
                self.torn = self._find_torn()
        except RuntimeError as err:
            self.error = self.error or err
        self.load, self.summed = Load((), (), (), (), ()), ()
        self.ends.clear()
        self.complete.set()
        self._on_complete()

    def _find_torn(self) -> TornCopyError | None:
        for lane in self.summed:
            slot, expected = _bytes_of(self.load.views[0]).numpy(), lane.expected.numpy()
            for sums in lane.sums.values():
                at = sums.first_difference(slot, expected)
                if at is not None:
                    return TornCopyError(
                        f"{show_path(self.load.path_at(at))} changed while it was copied",
                        hint="from now on snapshots are copied before training continues, as with `lazy: off`",
                    )
        return None


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
    """What is kept for one device: a stream, memory to pack in, and the way of the last plan.

    Args:
        eager: what is to be read before training goes on.
        lazy: the rest, in parts that are queued at once.
        sums: of the lazy transfers, by where they start.
        vector: the sums of the instant, on the device.
        expected: the same in host memory, once a snapshot has landed.
        adders: the streams that make them, and of which steps.
    """

    stream: Any
    buffer: torch.Tensor
    vector: torch.Tensor
    expected: torch.Tensor
    eager: Sequence[_Step] = ()
    lazy: Sequence[Sequence[_Step]] = ()
    sums: Mapping[int, Sums] = field(default_factory=dict)
    adders: Sequence[tuple[Any, Sequence[_Step]]] = ()


@dataclass(eq=False)
class DeviceCopies:
    """The streams, buffers and the watching thread of one Checkpointer; nothing of it exists before it is needed.

    All methods belong to the training thread.
    """

    runtime: Cuda = CUDA
    _lanes: dict[torch.device, _Lane] = field(default_factory=dict, init=False)
    _active: list[torch.device] = field(default_factory=list, init=False)
    _key: object = field(default=None, init=False)
    _flights: queue.SimpleQueue[Flight | None] = field(default_factory=queue.SimpleQueue, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

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
                training = self.runtime.current(device)
                instant = self.runtime.mark(training)
                for stream in (lane.stream, *[stream for stream, _ in lane.adders]):
                    self.runtime.hold(stream, instant)
                for summed in [self._add_up(lane, stream, steps, load) for stream, steps in lane.adders]:
                    self.runtime.hold(training, summed)
                    self.runtime.hold(lane.stream, summed)  # which takes the sums to the host
                if lane.eager:
                    flight.read[device] = self._queue(lane, lane.eager, load)
                    self.runtime.hold(training, flight.read[device])
                if lane.lazy:
                    flight.read[device] = self._queue(lane, lane.lazy[0], load)
        except RuntimeError as err:
            self._fail(flight, err)
        if flight.error is not None or all(len(self._lanes[device].lazy) <= 1 for device in self._active):
            self._end(flight)
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
            self._flights.put(None)
            join(self._thread, timeout, f"copies from the GPU were still under way after {timeout:.0f} s")
            self._thread = None
        self._lanes.clear()
        self._active.clear()
        self._key = None

    def _watch(self) -> None:
        while (flight := self._flights.get()) is not None:
            if not flight.queued.is_set():
                self._go_on(flight)
            flight.land()
            del flight  # the tensors of a snapshot are not kept alive by a thread that waits for the next one

    def _go_on(self, flight: Flight) -> None:
        """Queue what `start` has left, each part when the device has done the one before the last."""
        before = dict[torch.device, Any]()
        try:
            for number in range(1, max(len(self._lanes[device].lazy) for device in self._active)):
                for device in self._active:
                    lane = self._lanes[device]
                    if number < len(lane.lazy):
                        if device in before:
                            self.runtime.wait(before[device])
                        before[device] = flight.read[device]
                        flight.read[device] = self._queue(lane, lane.lazy[number], flight.load)
        except RuntimeError as err:
            self._fail(flight, err)
        self._end(flight)

    def _fail(self, flight: Flight, error: RuntimeError) -> None:
        flight.error = flight.error or error
        self._key = None

    def _end(self, flight: Flight) -> None:
        """No more is queued. After an error, too, what was queued still writes into the slot."""
        try:
            flight.summed = [self._lanes[device] for device in self._active if self._lanes[device].lazy]
            for lane in flight.summed:
                with self.runtime.copies(lane.stream) as copy:
                    copy([lane.expected], [lane.vector])
            flight.ends = [self.runtime.mark(lane.stream) for lane in self._lanes.values()]
        except RuntimeError as err:
            self._fail(flight, err)
        flight.queued.set()

    def _plan(self, load: Load) -> None:
        items: dict[torch.device, list[DeviceTensor]] = {}
        for index, (tensor, (start, lazy)) in enumerate(zip(load.tensors, load.places(), strict=True)):
            nbytes = tensor.numel() * tensor.element_size()
            if nbytes:
                rows = int(tensor.shape[0]) if tensor.dim() else 1
                item = DeviceTensor(index, start, nbytes, rows, lazy, _in_order(tensor, words=lazy))
                items.setdefault(home(self.runtime, tensor), []).append(item)
        self._active = list(items)
        for device, found in items.items():
            way = transfers(found)
            room = max((t.nbytes for t in way if t.packed), default=0) + _ALIGN
            lane = self._lanes.get(device)
            if lane is None:
                stream = self.runtime.side(device)
                buffer = self.runtime.empty(stream, device, room)
                lane = self._lanes[device] = _Lane(stream, buffer, buffer[:0], torch.empty(0, dtype=torch.uint8))
            elif lane.buffer.numel() < room:
                lane.eager = lane.lazy = ()  # its views go before the larger one is made
                lane.buffer = lane.buffer[:0]
                lane.buffer = self.runtime.empty(lane.stream, device, room)
            steps = [_Step(t, _groups(t, lane.buffer, load) if t.packed else ()) for t in way]
            lane.eager = [step for step in steps if not step.transfer.lazy]
            lane.lazy = list(_in_parts([step for step in steps if step.transfer.lazy]))
            self._plan_sums(lane, device)

    def _plan_sums(self, lane: _Lane, device: torch.device) -> None:
        steps = list(itertools.chain.from_iterable(lane.lazy))
        places = [(t.start, t.nbytes, -t.start % 8 if t.packed else 0) for t in (step.transfer for step in steps)]
        sums = sums_of(places)
        lane.sums = {one.start: one for one in sums}
        if sums:
            lane.vector = self.runtime.empty(lane.stream, device, vector_bytes(sums))
            lane.expected = self.runtime.host(vector_bytes(sums))
        packed = [step for step in steps if step.transfer.packed]  # they share the buffer
        direct = [step for step in steps if not step.transfer.packed]
        more = [direct[at : at + DIRECT_SUMS] for at in range(0, len(direct), DIRECT_SUMS)]
        lane.adders = [(lane.stream, packed), *[(self.runtime.side(device), part) for part in more]]

    def _add_up(self, lane: _Lane, stream: Any, steps: Sequence[_Step], load: Load) -> Any:
        """Queue the sums of these steps; the event after the last one."""
        words = lane.vector.view(torch.int64)
        with self.runtime.copies(stream) as copy:
            for step in steps:
                sums, source = lane.sums[step.transfer.start], self._pack(lane, step, load, copy)
                for target, first in sums.edges(lane.vector):
                    copy([target], [source[first : first + len(target)]])
                if sums.rows:
                    rows, columns = words[sums.at :].split_with_sizes([sums.rows, len(words) - sums.at - sums.rows])
                    self.runtime.add_up(matrix_of(sums, source), rows, columns[: sums.columns])
            return self.runtime.mark(stream)

    def _pack(self, lane: _Lane, step: _Step, load: Load, copy: Copy) -> torch.Tensor:
        """The bytes of a transfer on the device; what is packed is queued."""
        for group in step.groups:
            copy(group.targets, group.sources(load.tensors))
        if step.transfer.packed:
            return lane.buffer[step.transfer.start % _ALIGN :]
        return load.tensors[step.transfer.parts[0].index].detach().view(-1).view(torch.uint8)

    def _queue(self, lane: _Lane, steps: Sequence[_Step], load: Load) -> Any:
        """Queue the copies of these steps; the event after the last read."""
        slot = _bytes_of(load.views[0])
        read: Any = None
        # Once for all copies: choosing a stream takes the host longer than queueing a copy in it.
        with self.runtime.copies(lane.stream) as copy:
            for step in steps:
                transfer = step.transfer
                start = transfer.start
                source = self._pack(lane, step, load, copy)
                read = self.runtime.mark(lane.stream) if transfer.packed and step is steps[-1] else None
                cuts = list(split(start, start + transfer.nbytes))
                copy([slot[a:b] for a, b in cuts], [source[a - start : b - start] for a, b in cuts])
            return self.runtime.mark(lane.stream) if read is None else read


def _in_parts(steps: Sequence[_Step]) -> Iterator[Sequence[_Step]]:
    """In their order, so that the first part and a later one are what a stream takes without making the host wait."""
    first, count = 0, 0
    for number, step in enumerate(steps):
        count += len(step.groups) + len(list(split(step.transfer.start, step.transfer.start + step.transfer.nbytes)))
        if count >= (LATER_COPIES if first else FIRST_COPIES) or number == len(steps) - 1:
            yield steps[first : number + 1]
            first, count = number + 1, 0


def _in_order(tensor: torch.Tensor, *, words: bool) -> bool:
    """Whether its bytes can go as they are, now and whenever the plan fits: a conjugate may become one at any time.

    Args:
        words: they are to begin with a whole word.
    """
    return (
        tensor.is_contiguous()
        and not tensor.is_complex()
        and not tensor.is_neg()
        and not (words and int(tensor.storage_offset()) * tensor.element_size() % 8)
    )


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
        as_bytes = in_order and part.part is None and source.dtype not in _PACKED_AS_THEY_ARE
        raw = buffer[part.start - shift :][: part.nbytes]
        indices, targets = groups.setdefault((source.dtype, in_order, as_bytes), ([], []))
        indices.append(part.index)
        targets.append(raw if as_bytes else _target(part, raw, load))
    rows = transfer.parts[0].part
    return [_Group(indices, targets, rows, key[2]) for key, (indices, targets) in groups.items()]


def _target(item: DeviceTensor, raw: torch.Tensor, load: Load) -> torch.Tensor:
    tensor = load.tensors[item.index]
    shape = tensor.shape if item.part is None else (item.part[1], *tensor.shape[1:])
    return raw.view(tensor.dtype).view(shape)
