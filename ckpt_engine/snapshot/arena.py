"""The arena: preallocated, pre-faulted, reused host memory whose slots are laid out exactly as the files on disk."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ckpt_engine.errors import StateError
from ckpt_engine.persist.mapping import HUGE_BYTES, collapse, map_shared
from ckpt_engine.snapshot import pages
from ckpt_engine.snapshot.cuda import CUDA, Runtime
from ckpt_engine.snapshot.cuda_pin import Pinned
from ckpt_engine.snapshot.plan import WITHOUT_COPY, Plan

_PREFAULT_BYTES = 8 << 20
_HUGE_FROM_BYTES = 128 << 20  # below this, rounding up to huge pages would waste more than 1 %


@dataclass(slots=True)
class _Bound:
    """Views of a slot for one plan."""

    layout: int
    views: list[torch.Tensor]


class Slot:
    """One shared buffer that holds one data file image.

    Args:
        index: number the writer knows it by.
        nbytes: capacity wanted; rounded up to whole pages.
        runtime: of the devices that copy into it.

    Raises:
        StateError: the system refuses the memory.
    """

    def __init__(self, index: int, nbytes: int, runtime: Runtime = CUDA) -> None:
        self.index = index
        self._huge = nbytes >= _HUGE_FROM_BYTES
        unit = HUGE_BYTES if self._huge else mmap.PAGESIZE
        self.nbytes = -(-nbytes // unit) * unit
        try:
            self.fd = os.memfd_create(f"ckpt-arena-{index}", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, self.nbytes)
            memory = map_shared(self.fd, self.nbytes, writable=True)
        except OSError as err:
            raise StateError(
                f"cannot reserve {self.nbytes / 1e9:.2f} GB of host memory for the arena: {err}",
                hint="lower `slots`, or give the job more memory",
            ) from err
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._bound: _Bound | None = None
        self._pinned = Pinned(self._bytes.data_ptr(), self.nbytes, runtime)

    def prefault(self, go_on: Callable[[], bool] = lambda: True) -> None:
        """Touch every page so that staging never pays for page faults. Any thread; releases the GIL.

        Args:
            go_on: asked between chunks; False ends it early.

        Raises:
            StateError: not enough memory.
        """
        base = self._bytes.data_ptr()
        for start in range(0, self.nbytes, _PREFAULT_BYTES):
            if not go_on():
                return
            size = min(_PREFAULT_BYTES, self.nbytes - start)
            if self._huge and collapse(base + start, size):
                continue
            self._huge = False
            pages.populate(base + start, size)

    def pin(self, device: torch.device, go_on: Callable[[], bool] = lambda: True) -> str | None:
        """Page-lock the touched memory for devices, once; what is wrong, or None. See `Pinned.pin`."""
        return self._pinned.pin(device, go_on)

    def views(self, plan: Plan) -> list[torch.Tensor]:
        """Destination tensors for `plan.sources`, in order; the container header is in the slot afterwards."""
        if self._bound is None or self._bound.layout != plan.layout.id:
            self._bytes[: len(plan.header)] = torch.frombuffer(bytearray(plan.header), dtype=torch.uint8)
            views = []
            for entry in plan.layout.entries:
                raw = self._bytes[entry.offset : entry.offset + entry.nbytes]
                dtype = getattr(torch, entry.dtype)
                views.append(raw.view(torch.uint8 if dtype in WITHOUT_COPY else dtype).view(entry.shape))
            self._bound = _Bound(plan.layout.id, views)
        return self._bound.views

    def close(self) -> None:
        """Give the memory back; the mapping goes when the last view does. No copy may be under way."""
        self._bound = None
        self._pinned.unpin()
        os.close(self.fd)


def slot_bytes(plan: Plan) -> int:
    """Capacity to reserve for a plan: 2 % above it, so that small growth keeps the slot."""
    return plan.layout.nbytes + plan.layout.nbytes // 50 + mmap.PAGESIZE
