"""Read entries into live tensors where they are: host tensors directly, device tensors through page-locked memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ckpt_engine.restore.sources import Sources
from ckpt_engine.restore.stream import stream_into
from ckpt_engine.snapshot import pages
from ckpt_engine.snapshot.cuda import CUDA, Runtime
from ckpt_engine.snapshot.cuda_pin import Pinned, split
from ckpt_engine.store.manifest import Manifest

LANDING_BYTES = 256 << 20
"""Host memory per strip, of which there are two; more only for a tensor that is larger."""
_ALIGN = 64


def fill(sources: Sources, manifest: Manifest, targets: Mapping[str, torch.Tensor], runtime: Runtime = CUDA) -> None:
    """Fill `targets` (contiguous tensors by entry name) with their entries; on return all of them are complete.

    Every piece is verified before its bytes reach a tensor. If an error is raised, other pieces may have been copied.

    Raises:
        CorruptError, NewerFormatError, StorageError: as `stream_into`.
    """
    away = {name: target for name, target in targets.items() if runtime.owns(target) and target.numel()}
    stream_into(sources, manifest, {name: target for name, target in targets.items() if name not in away})
    if not away:
        return
    rooms = [_room(target) for target in away.values()]
    room = min(max(LANDING_BYTES, *rooms), sum(rooms))
    batches = list(_batches(away, room))
    strips: list[_Strip] = []
    try:
        for number, names in enumerate(batches):
            if number < 2:
                strips.append(_Strip(room, runtime, runtime.device(away[names[0]])))
            strip = strips[number % 2]
            strip.wait()
            landed = strip.views({name: away[name] for name in names})
            stream_into(sources, manifest, landed)
            strip.send(landed, away)
    finally:
        for strip in strips:
            strip.close()


def _room(target: torch.Tensor) -> int:
    return -(-target.numel() * target.element_size() // _ALIGN) * _ALIGN


def _batches(targets: Mapping[str, torch.Tensor], room: int) -> Iterator[Sequence[str]]:
    """Names of tensors that have room in a strip together."""
    batch: list[str] = []
    used = 0
    for name, target in targets.items():
        if batch and used + _room(target) > room:
            yield batch
            batch, used = [], 0
        batch.append(name)
        used += _room(target)
    yield batch


class _Strip:
    """Host memory that verified bytes land in, and from where they go on to a device."""

    def __init__(self, nbytes: int, runtime: Runtime, device: torch.device) -> None:
        self._bytes = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        self._runtime = runtime
        self._sent: dict[torch.device, Any] = {}
        pages.populate(self._bytes.data_ptr(), nbytes)
        # Where it cannot be page-locked the copies are slower, and nothing else changes.
        self._pinned = Pinned(self._bytes.data_ptr(), nbytes, runtime)
        self._pinned.pin(device)

    def views(self, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Host tensors of the shapes and dtypes of `targets`, one behind the other."""
        found, at = {}, 0
        for name, target in targets.items():
            nbytes = target.numel() * target.element_size()
            found[name] = self._bytes[at : at + nbytes].view(target.dtype).view(target.shape)
            at += _room(target)
        return found

    def send(self, landed: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
        """Queue the copies behind what is queued in the current streams."""
        runtime = self._runtime
        devices: dict[torch.device, None] = {}
        for name, source in landed.items():
            target = targets[name].detach().view(-1).view(torch.uint8)
            first = int(source.storage_offset()) * source.element_size()
            cuts = list(split(first, first + target.numel()))
            device = runtime.device(targets[name])
            devices[device] = None
            targets_of_cuts = [target[a - first : b - first] for a, b in cuts]
            runtime.copy(runtime.current(device), targets_of_cuts, [self._bytes[a:b] for a, b in cuts])
        self._sent = {device: runtime.mark(runtime.current(device)) for device in devices}

    def wait(self) -> None:
        """Return when everything sent has arrived."""
        for event in self._sent.values():
            self._runtime.wait(event)
        self._sent = {}

    def close(self) -> None:
        """Give the memory back, after what was sent has arrived."""
        self.wait()
        self._pinned.unpin()
