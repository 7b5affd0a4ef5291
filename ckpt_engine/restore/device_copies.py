"""Fills tensors of a device through page-locked host memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import torch

from ckpt_engine.copy import fresh_pages
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.restore.read import READ_BYTES, Move, StagingBuffer, moves_of, private_memory, read_moves
from ckpt_engine.snapshot.cuda import CUDA, Cuda, Pinned, home, split
from ckpt_engine.store.manifest import Manifest

_STRIP_UNIT = 2 << 20
"""Pieces of one request may take some more bytes than it has, to be aligned."""


def fill(sources: Sources, manifest: Manifest, targets: Mapping[str, torch.Tensor], runtime: Cuda = CUDA) -> None:
    """Fill `targets` (contiguous tensors by entry name) with their entries; on return all of them are complete.

    Every piece is verified before its bytes reach a tensor. If an error is raised, other pieces may have been copied.

    Raises:
        CorruptError, NewerFormatError, StorageError: as `read_moves`.
    """
    if not targets:
        return
    away = {name: target for name, target in targets.items() if runtime.device(target) is not None and target.numel()}
    read_moves(sources, manifest, moves_of(manifest, {name: one for name, one in targets.items() if name not in away}))
    if away:
        with closing(_PageLocked(away, runtime)) as landing:
            read_moves(sources, manifest, moves_of(manifest, away), landing)


class _Strip:
    """Page-locked host memory from where a device copies."""

    def __init__(self, nbytes: int, runtime: Cuda, device: torch.device) -> None:
        self.bytes = torch.frombuffer(private_memory(nbytes), dtype=torch.uint8)
        self.sent: list[Any] = []
        """Happen when what was sent from it has arrived."""
        self._runtime = runtime
        fresh_pages.populate(self.bytes.data_ptr(), nbytes)
        # Where it cannot be page-locked the copies are slower, and nothing else changes.
        self._pinned = Pinned(self.bytes.data_ptr(), nbytes, runtime)
        self._pinned.pin(device)

    def wait(self) -> None:
        """Return when everything sent has arrived."""
        for event in self.sent:
            self._runtime.wait(event)
        self.sent = []

    def close(self) -> None:
        """Give the memory back, after what was sent has arrived."""
        self.wait()
        self._pinned.unpin()


class _PageLocked(StagingBuffer):
    """Two strips for each thread: one is filled while a device copies from the other.

    Copies are queued behind what is queued in the streams that are current where this is made.
    """

    def __init__(self, targets: Mapping[str, torch.Tensor], runtime: Cuda) -> None:
        self._runtime = runtime
        self._targets = {name: target.detach().view(-1).view(torch.uint8) for name, target in targets.items()}
        self._homes = {name: home(runtime, target) for name, target in targets.items()}
        self._streams = {device: runtime.current(device) for device in self._homes.values()}
        self._own = threading.local()
        self._strips: list[_Strip] = []

    def room(self, nbytes: int, entry: str) -> int:
        self._own.strip = strip = self._next(nbytes, self._homes[entry])
        return strip.bytes.data_ptr()

    def send(self, moves: Sequence[Move]) -> None:
        strip: _Strip = self._own.strip
        first = strip.bytes.data_ptr()
        for device, stream in self._streams.items():
            pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
            for move in moves:
                if self._homes[move.entry] == device:
                    target, start = self._targets[move.entry], move.address - first
                    pairs += [
                        (target[a - start + move.start : b - start + move.start], strip.bytes[a:b])
                        for a, b in split(start, start + move.piece.raw_nbytes)
                    ]
            if pairs:
                with self._runtime.copies(stream) as copy:
                    copy(*zip(*pairs, strict=True))
                    strip.sent.append(self._runtime.mark(stream))

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

    def close(self) -> None:
        """Wait for what was sent, and give the memory back. No thread may use it any more."""
        for strip in self._strips:
            strip.close()
