"""The copies of host memory that make a snapshot, cut so that several threads can do them side by side.

Knows which tensors seem not to have changed since their bytes came into an arena slot, and how far that is believed.

`_version` alone proves nothing: writes through `.data` and some optimizers do not count there. So what seems unchanged
is compared with the slot instead of copied: before training goes on until that was right often enough, and behind
training from then on. Lazy tensors are copied behind training anyway.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ckpt_engine.copy.job import Layout
from ckpt_engine.errors import StateError, WaitTimeoutError
from ckpt_engine.state.flatten import show_path
from ckpt_engine.state.layout import AddressRun, CapturedState, StatePlan
from ckpt_engine.store.tree import TreePath

CHUNK_BYTES = 16 << 20
SMALL_BYTES = 32 << 10  # torch copies up to 32,768 elements without its thread team
_GROUP = 512
_GLANCE_BYTES = 4 << 10
FENCE_TIMEOUT_SECONDS = 600.0

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
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
    """

    fd: int
    address: int
    cold: bool
    runs: Mapping[AddressRun, list[torch.Tensor]]

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
        if self.slot.cold:
            self.slot.write(self.dst.data_ptr() + self.start, self.src.data_ptr() + self.start, self.nbytes)
            return
        # ctypes drops the GIL and starts no thread team, so a thread takes one core at most from training.
        ctypes.memmove(self.dst.data_ptr() + self.start, self.src.data_ptr() + self.start, self.nbytes)


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


@dataclass(frozen=True, slots=True)
class Compare:
    """Bytes that the slot is claimed to hold already; if it does not, and the claim is not hinted, they are copied."""

    move: _Move
    claim: Claim

    def run(self) -> None:
        move = self.move
        if _memcmp(move.dst.data_ptr() + move.start, move.src.data_ptr() + move.start, move.nbytes) == 0:
            return
        self.claim.differs = True
        if not self.claim.hinted:
            move.run()
        elif move.src._version == self.claim.version:
            # It is not known any more whether it has changed before or after the instant.
            raise StateError(
                f"{show_path(self.claim.path)} had not changed for several snapshots, and has now without torch "
                "noticing",
                hint="the next snapshot copies it as all that changes; call before_update() before changing it by hand",
            )
        # Else training went on and changed it since the instant, whose bytes the slot has: nothing had changed by then.

    def seems_right(self) -> bool:
        """Whether both ends are the same: most changes that torch does not count are of whole tensors."""
        move = self.move
        dst, src = move.dst.data_ptr() + move.start, move.src.data_ptr() + move.start
        end = max(0, move.nbytes - _GLANCE_BYTES)
        nbytes = min(_GLANCE_BYTES, move.nbytes)
        return all(_memcmp(dst + at, src + at, nbytes) == 0 for at in (0, end))


Task = _Move | _Copy | CopyByAddress | Compare


class CopyTasks:
    """Copy tasks that are complete together. Any thread may take some."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._work = deque(tasks)
        self._left = len(tasks)
        self._lock = threading.Lock()
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
            self._count(1)
        return True

    def stop(self, error: BaseException) -> None:
        """Run no more tasks, for this reason; complete when those that run now have."""
        self.error = self.error or error
        dropped = 0
        with suppress(IndexError):
            while True:
                self._work.popleft()
                dropped += 1
        self._count(dropped)

    def _count(self, tasks: int) -> None:
        with self._lock:
            self._left -= tasks
            last = self._left == 0
        if last:
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
    tensors = [capture.arrays[index] for index in run.arrays.tolist()]
    # Behind training a tensor may get other memory, and what it had has to stay.
    return _Copy(views, [tensor.detach() for tensor in tensors] if run.lazy else tensors)


def tasks_of(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], slot: SlotMemory) -> list[Task]:
    """The copies of these pairs of destination in a slot and source: large ones in chunks, others in groups."""
    small: list[tuple[torch.Tensor, torch.Tensor]] = []
    tasks: list[Task] = []
    for view, tensor in pairs:
        nbytes = view.numel() * view.element_size()
        if nbytes >= SMALL_BYTES and _movable(tensor):
            tasks += chunks_of(view, tensor, slot)
        else:
            small.append((view, tensor))
    for at in range(0, len(small), _GROUP):
        group = small[at : at + _GROUP]
        tasks.append(_Copy([view for view, _ in group], [tensor for _, tensor in group]))
    return tasks


def chunks_of(view: torch.Tensor, tensor: torch.Tensor, slot: SlotMemory) -> list[_Move]:
    """The copy of a tensor, chunk by chunk."""
    nbytes = view.numel() * view.element_size()
    return [_Move(view, tensor, at, min(CHUNK_BYTES, nbytes - at), slot) for at in range(0, nbytes, CHUNK_BYTES)]


def _movable(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


LEAST_BYTES = 1 << 20
"""Smaller tensors are copied: it takes no time."""
PROVEN = 2
"""So often a tensor must have been found unchanged before that is checked behind training."""


@dataclass(frozen=True, slots=True, eq=False)
class _Tag:
    """What is the same as long as nothing counted has changed a tensor. The weak reference keeps its number unique."""

    storage: StorageWeakRef
    form: tuple[Any, ...]
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tag:
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return cls(storage, _form(tensor), tensor._version)

    def is_same(self, tensor: torch.Tensor) -> bool:
        """Whether it is of the same memory, in the same form, however often changed."""
        return _form(tensor) == self.form


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


@dataclass(slots=True)
class Claim:
    """That the slot already holds the bytes of one entry.

    Args:
        name, path: of the entry.
        version: what torch had counted for the tensor at the instant.
        hinted: checked behind training.
        differs: set where it is found to be wrong; final once the snapshot is staged.
    """

    name: str
    path: TreePath
    version: int
    hinted: bool
    differs: bool = False


@dataclass(frozen=True, slots=True)
class Claims:
    """Of one snapshot, by index of the source. What is not claimed is copied."""

    slot: int = -1
    by_source: dict[int, Claim] = field(default_factory=dict)
    tags: dict[int, _Tag] = field(default_factory=dict)

    @property
    def any_hinted(self) -> bool:
        """Whether something is checked behind training."""
        return any(claim.hinted for claim in self.by_source.values())


class Unchanged:
    """The tags of all slots of one run. `claim`, then `settle` once that snapshot is staged, in turn."""

    def __init__(self) -> None:
        self._held: dict[int, Mapping[int, _Tag]] = {}
        """By slot the tags of what it holds in the current layout, by index of the source."""
        self._last: dict[str, _Tag] = {}
        self._found_right: Counter[str] = Counter()
        self._changing: set[str] = set()
        self._layout: Layout | None = None
        self._large: Sequence[int] = ()

    def claim(self, slot: int, known: Sequence[int], capture: CapturedState) -> Claims:
        """What `slot` seems to hold already of an instant. Until `settle` it counts as holding nothing.

        Args:
            known: all slots that exist.
        """
        plan = capture.plan
        if plan.layout is not self._layout:
            self._layout, self._large = plan.layout, _large(plan)
            self._held.clear()
        there = self._held.pop(slot, {})
        self._held = {index: one for index, one in self._held.items() if index in known}
        claims = Claims(slot)
        for index in self._large:
            name, source = plan.layout.entries[index].name, plan.sources[index]
            tensor = capture.arrays[source.array]
            if source.lazy or name in self._changing or not _is_candidate(tensor):
                continue
            last = self._last.get(name)
            if last is not None and (not last.is_same(tensor) or last.version != tensor._version):
                self._give_up(name)
                continue
            tag = self._last[name] = last or _Tag.of(tensor)
            claims.tags[index] = tag
            if there.get(index) is tag:
                hinted = self._found_right[name] >= PROVEN
                claims.by_source[index] = Claim(name, source.path, tag.version, hinted)
        return claims

    def settle(self, claims: Claims, *, staged: bool) -> None:
        """The snapshot is staged, or that has failed: learn which claims were wrong. Any thread."""
        for claim in claims.by_source.values():
            if claim.differs:
                self._give_up(claim.name)
            elif staged:
                self._found_right[claim.name] += 1
        if staged:
            self._held[claims.slot] = claims.tags

    def _give_up(self, name: str) -> None:
        """It changes: it is copied from now on."""
        self._changing.add(name)
        self._last.pop(name, None)
        self._found_right.pop(name, None)


def _large(plan: StatePlan) -> list[int]:
    entries = zip(plan.layout.entries, plan.sources, strict=True)
    return [
        index
        for index, (entry, source) in enumerate(entries)
        if entry.nbytes >= LEAST_BYTES and source.storage_bytes is None and source.members is None
    ]


def _is_candidate(tensor: torch.Tensor) -> bool:
    return _movable(tensor) and not (tensor.requires_grad or tensor.is_inference())
