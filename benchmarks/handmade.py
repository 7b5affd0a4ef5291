"""The least that makes a snapshot durable in the background: the floor for the engine, not something to use.

One copy into one of two buffers, one thread that writes it around the page cache. No digest, no manifest, no retention,
no process that outlives the trainer.
"""

from __future__ import annotations

import queue
import threading
from pathlib import Path

from benchmarks.disk import SharedBuffer, direct_write
from benchmarks.workloads import State, state_bytes, tensors

_ALIGN = 64
_WAIT_SECONDS = 600.0


class HandMade:
    """See the module. A `Saver` of `PlainLoop`."""

    def __init__(self, folder: Path, state: State) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        room = state_bytes(state) + _ALIGN * sum(1 for _ in tensors(state))
        self._free: queue.Queue[SharedBuffer] = queue.Queue()
        self._full: queue.Queue[tuple[SharedBuffer, int] | None] = queue.Queue()
        for _ in range(2):
            self._free.put(SharedBuffer(room))
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def before_update(self) -> None:
        """The copy is complete when `save` returns."""

    def save(self, state: State, step: int) -> None:
        buffer = self._free.get(timeout=_WAIT_SECONDS)
        at = 0
        for tensor in tensors(state):
            nbytes = tensor.numel() * tensor.element_size()
            buffer.tensor[at : at + nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            at += -(-nbytes // _ALIGN) * _ALIGN
        self._full.put((buffer, step))

    def finish(self) -> None:
        both = [self._free.get(timeout=_WAIT_SECONDS) for _ in range(2)]
        for buffer in both:
            self._free.put(buffer)

    def close(self) -> None:
        self._full.put(None)
        self._thread.join(_WAIT_SECONDS)

    def _write(self) -> None:
        while (item := self._full.get()) is not None:
            buffer, step = item
            temp = self._folder / "writing"
            with memoryview(buffer.memory) as whole:
                direct_write(temp, whole)
            temp.replace(self._folder / str(step % 2))
            self._free.put(buffer)
