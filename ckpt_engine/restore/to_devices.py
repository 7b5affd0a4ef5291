"""Brings what is restored onto GPUs, at the rate of page-locked memory.

What is read from files lands in strips of page-locked memory, two for each thread that reads: one is filled while a
device copies from the other. What the writer of a dead trainer still has in its memory is page-locked where it is.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from ckpt_engine.copy import host_memory
from ckpt_engine.restore.memory import address_of
from ckpt_engine.restore.read import READ_BYTES, Move, private_memory
from ckpt_engine.snapshot.cuda import Runtime, home
from ckpt_engine.snapshot.page_locks import DRIVER_TIMEOUT_SECONDS, PIECE_BYTES, Pinned, split

_ALIGN = 64
_STRIP_UNIT = 2 << 20
"""Pieces of one request may take some more bytes than it has, to be aligned."""


class _Strip:
    """Page-locked host memory from where a device copies."""

    def __init__(self, nbytes: int, runtime: Runtime, device: torch.device) -> None:
        memory = private_memory(nbytes)
        host_memory.advise(memory)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.sent: Future[list[Any]] | None = None
        """Events after the copies from it."""
        self._runtime = runtime
        host_memory.populate(self.bytes.data_ptr(), nbytes)
        # Where it cannot be page-locked the copies are slower, and nothing else changes.
        self._pinned = Pinned(self.bytes.data_ptr(), nbytes, runtime)
        self._pinned.pin(device)

    def lock(self, device: torch.device, start: int) -> None:
        """See `_Lent`; all of it is."""

    def wait(self) -> None:
        """Return when everything sent has arrived."""
        if self.sent is not None:
            for event in self.sent.result(DRIVER_TIMEOUT_SECONDS):
                self._runtime.wait(event)

    def close(self) -> None:
        """Give the memory back. Nothing may be under way."""
        self._pinned.unpin()


class _Lent:
    """Memory of another process, from where a device copies without a second copy on the host."""

    def __init__(self, memory: Any, runtime: Runtime) -> None:
        self._memory = memory  # stays mapped
        # It is mapped for reading, of which torch would warn, and only read.
        own = (ctypes.c_char * ctypes.sizeof(memory)).from_address(ctypes.addressof(memory))
        self.bytes = torch.frombuffer(own, dtype=torch.uint8)
        self.sent: Future[list[Any]] | None = None
        self._runtime = runtime
        self._locked: dict[int, torch.device] = {}
        self._refused = False

    def lock(self, device: torch.device, start: int) -> None:
        """Page-lock the piece with this byte; where that is refused copies are slower, and nothing else changes."""
        first = start // PIECE_BYTES * PIECE_BYTES
        if first not in self._locked and not self._refused:
            nbytes = min(PIECE_BYTES, self.bytes.numel() - first)
            problem = self._runtime.register(device, self.bytes.data_ptr() + first, nbytes, read_only=True)
            self._refused = problem is not None
            if not self._refused:
                self._locked[first] = device

    def close(self) -> None:
        """Unlock it. Nothing may be under way."""
        for first, device in self._locked.items():
            self._runtime.unregister(device, self.bytes.data_ptr() + first)


class PageLocked:
    """A `Landing` for tensors of devices. `finish`, then `close`; `close` alone after an error.

    One thread queues all copies, behind what is queued in the streams that are current where this is made: threads that
    do it side by side wait for each other in the driver.

    Args:
        targets: contiguous tensors by entry name.
    """

    def __init__(self, targets: Mapping[str, torch.Tensor], runtime: Runtime) -> None:
        self._runtime = runtime
        self._targets = {name: target.detach().view(-1).view(torch.uint8) for name, target in targets.items()}
        self._homes = {name: home(runtime, target) for name, target in targets.items()}
        self._streams = {device: runtime.current(device) for device in self._homes.values()}
        self._own = threading.local()
        self._lock = threading.Lock()
        self._strips: list[_Strip] = []
        self._lent: dict[int, _Lent] = {}
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="ckpt-send")
        self._sends: list[Future[list[Any]]] = []

    def take(self, moves: Sequence[Move]) -> list[Move]:
        """See `Landing`."""
        starts = list(accumulate((-(-move.piece.raw_nbytes // _ALIGN) * _ALIGN for move in moves), initial=0))
        self._own.source = strip = self._next(starts[-1], self._homes[moves[0].entry])
        first = strip.bytes.data_ptr()
        return [replace(move, address=first + start) for move, start in zip(moves, starts, strict=False)]

    def lend(self, moves: Sequence[Move], data: memoryview, start: int) -> list[Move]:
        """See `Landing`."""
        memory = data.obj
        with self._lock:
            if id(memory) not in self._lent:
                self._lent[id(memory)] = _Lent(memory, self._runtime)
        self._own.source = self._lent[id(memory)]
        first = address_of(data) - start
        return [replace(move, address=first + move.piece.offset) for move in moves]

    def send(self, moves: Sequence[Move]) -> None:
        """See `Landing`."""
        source: _Strip | _Lent = self._own.source
        source.sent = self._sender.submit(self._send, source, moves)
        self._sends.append(source.sent)

    def _send(self, source: _Strip | _Lent, moves: Sequence[Move]) -> list[Any]:
        """Queue the copies; events after them. The sender's thread."""
        first, events = source.bytes.data_ptr(), []
        for device, stream in self._streams.items():
            pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
            for move in moves:
                if self._homes[move.entry] == device:
                    target, start = self._targets[move.entry], move.address - first
                    for a, b in split(start, start + move.piece.raw_nbytes):
                        source.lock(device, a)
                        pairs.append((target[a - start + move.start : b - start + move.start], source.bytes[a:b]))
            if pairs:
                with self._runtime.copies(stream) as copy:
                    copy(*zip(*pairs, strict=True))
                    events.append(self._runtime.mark(stream))
        return events

    def _next(self, nbytes: int, device: torch.device) -> _Strip:
        """The strip of this thread that was sent before its last one, or a new one; nothing is under way from it."""
        own: list[_Strip] = self._own.__dict__.setdefault("strips", [])
        strip = own.pop(0) if len(own) == 2 else None
        if strip is not None:
            strip.wait()
        if strip is None or strip.bytes.numel() < nbytes:
            if strip is not None:
                strip.close()
                self._strips.remove(strip)
            strip = _Strip(-(-max(nbytes, READ_BYTES) // _STRIP_UNIT) * _STRIP_UNIT, self._runtime, device)
            self._strips.append(strip)
        own.append(strip)
        return strip

    def finish(self) -> None:
        """Wait until all that was sent is queued; raises what stopped a copy."""
        for sent in self._sends:
            sent.result(DRIVER_TIMEOUT_SECONDS)

    def close(self) -> None:
        """Wait for what was sent, and give the memory back. No thread may use it any more."""
        self._sender.shutdown()
        for stream in self._streams.values():
            self._runtime.wait(self._runtime.mark(stream))
        for strip in self._strips:
            strip.close()
        for lent in self._lent.values():
            lent.close()
