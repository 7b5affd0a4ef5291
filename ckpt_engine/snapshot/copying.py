"""The copies of host memory that make a snapshot, cut so that several threads can do them side by side."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ckpt_engine.copy import fresh_pages
from ckpt_engine.errors import StateError, WaitTimeoutError
from ckpt_engine.state.layout import AddressRun, CapturedState

CHUNK_BYTES = 16 << 20
COLD_CHUNK_BYTES = 4 << 20
"""Touched at once: meanwhile no thread of the process can map memory, and one may be starting the writer."""
SMALL_BYTES = 32 << 10  # torch copies up to 32,768 elements without its thread team
_GROUP = 512
FENCE_TIMEOUT_SECONDS = 600.0

_pwritev = ctypes.CDLL(None, use_errno=True).pwritev
_pwritev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_pwritev.restype = ctypes.c_ssize_t
_MOST_VECTORS = 1024  # in one call


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """The shared memory of a slot.

    Args:
        fd: its file.
        address: where it is mapped.
        cold: most of its pages are not there yet. Writing to its file makes the pages and fills them in one go: no page
            fault, no page that is cleared first.
        runs: views of the arrays of those runs that have their forms.
        writes: the kernel lets one thread write to a file at a time: others that fill a cold slot use its mapping.
    """

    fd: int
    address: int
    cold: bool
    runs: Mapping[AddressRun, list[torch.Tensor]]
    writes: threading.Lock = field(default_factory=threading.Lock)

    def write(self, target: int, source: int, nbytes: int) -> None:
        """Copy to an address in it through its file; without the GIL.

        Raises:
            OSError: not enough memory.
        """
        with memoryview((ctypes.c_char * nbytes).from_address(source)) as data:
            done = 0
            while done < nbytes:
                done += os.pwrite(self.fd, data[done:], target - self.address + done)


@dataclass(frozen=True, slots=True)
class _Move:
    """Bytes of one contiguous CPU tensor; the tensors are kept so that the addresses stay valid."""

    dst: torch.Tensor
    src: torch.Tensor
    start: int
    nbytes: int
    slot: SlotMemory

    def run(self) -> None:
        target, source = self.dst.data_ptr() + self.start, self.src.data_ptr() + self.start
        if self.slot.cold and self.slot.writes.acquire(blocking=False):
            try:
                self.slot.write(target, source, self.nbytes)
            finally:
                self.slot.writes.release()
        else:
            if self.slot.cold:
                fresh_pages.populate(target, self.nbytes)
            # ctypes drops the GIL and starts no thread team, so a thread takes one core at most from training.
            ctypes.memmove(target, source, self.nbytes)


@dataclass(frozen=True, slots=True)
class _Copy:
    """Several small or oddly laid out tensors in one call, so that the GIL is taken once for all of them."""

    dst: list[torch.Tensor]
    src: list[torch.Tensor]

    def run(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.dst, self.src)


@dataclass(frozen=True, slots=True, eq=False)
class CopyByAddress:
    """A run of arrays. The kernel gathers them: where they are small in a quarter of the time that torch takes.

    Args:
        slot: where they go.
        arrays: the run.
        addresses: of the arrays of the snapshot.
        kept: so that the addresses stay valid.
    """

    slot: SlotMemory
    arrays: AddressRun
    addresses: np.ndarray[Any, np.dtype[np.uint64]]
    kept: Sequence[torch.Tensor]

    def run(self) -> None:
        offset, sizes = self.arrays.offset, self.arrays.nbytes
        vectors = np.stack([self.addresses[self.arrays.arrays], sizes], axis=1)
        for at in range(0, len(vectors), _MOST_VECTORS):
            part = vectors[at : at + _MOST_VECTORS]
            nbytes = int(part[:, 1].sum())
            if _pwritev(self.slot.fd, part.ctypes.data, len(part), offset) != nbytes:
                raise StateError(f"small tensors could not be copied: {os.strerror(ctypes.get_errno())}")
            offset += nbytes


Task = _Move | _Copy | CopyByAddress


class CopyTasks:
    """Copy tasks that are complete together. Any thread may take some."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._work = deque(tasks)
        self._total = len(tasks)
        self._ended = itertools.count(1)
        self.complete = threading.Event()
        self.error: BaseException | None = None
        if not tasks:
            self.complete.set()

    def run_some(self) -> bool:
        """Run one task; False when none is left to take. Errors are kept in `error`. True once more after the last."""
        try:
            task = self._work.popleft()
        except IndexError:
            return False
        try:
            task.run()
        except Exception as err:  # noqa: BLE001 - raised by the fence on the training thread
            self.error = err
        except BaseException as err:
            self.error = err  # a Ctrl-C: it is not known what was copied
            raise
        finally:
            self._count()
        return True

    def stop(self, error: BaseException) -> None:
        """Run no more tasks, for this reason; complete when those that run now have."""
        self.error = self.error or error
        with suppress(IndexError):
            while True:
                self._work.popleft()
                self._count()

    def _count(self) -> None:
        """One more has run, or never will. One step of `itertools.count` is atomic."""
        if next(self._ended) == self._total:
            self.complete.set()

    def finish(self) -> None:
        """Help until all tasks have run.

        Raises:
            WaitTimeoutError: another thread did not finish its task.
        """
        while self.run_some():
            pass
        if not self.complete.wait(FENCE_TIMEOUT_SECONDS):
            raise WaitTimeoutError(f"staging did not finish within {FENCE_TIMEOUT_SECONDS:.0f} s")


def join(thread: threading.Thread, seconds: float, problem: str) -> None:
    """Wait until a thread has ended.

    Raises:
        WaitTimeoutError: it has not, after so many seconds.
    """
    thread.join(max(0.0, seconds))
    if thread.is_alive():
        raise WaitTimeoutError(problem)


def run_task(
    run: AddressRun, slot: SlotMemory, capture: CapturedState, addresses: np.ndarray[Any, np.dtype[np.uint64]]
) -> Task:
    """The copy of a run.

    Args:
        addresses: of the arrays of the snapshot.
    """
    views = slot.runs.get(run)
    if slot.cold or views is None:
        return CopyByAddress(slot, run, addresses, capture.arrays)
    return _Copy(views, [capture.arrays[index] for index in run.arrays.tolist()])


def tasks_of(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], slot: SlotMemory) -> list[Task]:
    """The copies of these pairs of destination in a slot and source: large ones in chunks, others in groups."""
    small: list[tuple[torch.Tensor, torch.Tensor]] = []
    tasks: list[Task] = []
    for view, tensor in pairs:
        nbytes = view.numel() * view.element_size()
        if nbytes >= SMALL_BYTES and is_movable(tensor):
            tasks += chunks_of(view, tensor, slot)
        else:
            small.append((view, tensor))
    for at in range(0, len(small), _GROUP):
        group = small[at : at + _GROUP]
        tasks.append(_Copy([view for view, _ in group], [tensor for _, tensor in group]))
    return tasks


def chunks_of(view: torch.Tensor, tensor: torch.Tensor, slot: SlotMemory) -> list[_Move]:
    """The copy of a tensor, chunk by chunk."""
    nbytes, most = view.numel() * view.element_size(), COLD_CHUNK_BYTES if slot.cold else CHUNK_BYTES
    return [_Move(view, tensor, at, min(most, nbytes - at), slot) for at in range(0, nbytes, most)]


def is_movable(tensor: torch.Tensor) -> bool:
    """Whether its bytes can be moved as they are."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
