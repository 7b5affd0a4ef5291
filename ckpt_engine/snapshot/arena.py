"""The arena: preallocated, touched, reused host memory whose slots are laid out exactly as the files on disk.

It knows which slot is free, being filled or being persisted, and makes slots ready in the background.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter, itemgetter

import torch

from ckpt_engine.copy import fresh_pages
from ckpt_engine.copy.host_memory import HUGE_BYTES, collapse, shared_memory
from ckpt_engine.errors import CkptError, StateError, WaitTimeoutError
from ckpt_engine.snapshot.copying import SlotMemory, join
from ckpt_engine.snapshot.cuda import CUDA, Cuda, Pinned
from ckpt_engine.state.entries import WITHOUT_COPY
from ckpt_engine.state.layout import AddressRun, StatePlan
from ckpt_engine.store.manifest_codec import uncollected
from ckpt_engine.undo import on_failure

_PREFAULT_BYTES = 8 << 20
_HUGE_FROM_BYTES = 128 << 20  # below this, rounding up to huge pages would waste more than 1 %


@dataclass(slots=True)
class _Bound:
    """Views of a slot for one plan."""

    plan: StatePlan
    views: list[torch.Tensor]
    runs: dict[AddressRun, list[torch.Tensor]]


class SharedSlot:
    """One shared buffer that holds one data file image.

    Args:
        index: number the writer knows it by.
        nbytes: capacity wanted; rounded up to whole pages.
        runtime: of the devices that copy into it.

    Raises:
        StateError: the system refuses the memory.
    """

    def __init__(self, index: int, nbytes: int, runtime: Cuda = CUDA) -> None:
        self.index = index
        self._huge = nbytes >= _HUGE_FROM_BYTES
        unit = HUGE_BYTES if self._huge else mmap.PAGESIZE
        self.nbytes = -(-nbytes // unit) * unit
        self.fd, memory = shared_memory(f"ckpt-arena-{index}", self.nbytes)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.is_cold = True
        """Not every page is there and mapped: see `SlotMemory`."""
        self.users = 0
        """Those who need what it holds; see `Slots`."""
        self.is_warming = False
        """Other threads make it ready; a snapshot that cannot wait for them may take it before."""
        self._bound: _Bound | None = None
        self.pinned = Pinned(self._bytes.data_ptr(), self.nbytes, runtime)

    @property
    def memory(self) -> SlotMemory:
        """How to fill it now."""
        runs = self._bound.runs if self._bound is not None else {}
        return SlotMemory(self.fd, self._bytes.data_ptr(), self.is_cold, runs)

    def prefault(self, go_on: Callable[[], bool] = lambda: True) -> bool:
        """Touch every page so that staging never pays for page faults. Any thread; releases the GIL.

        What the slot holds stays as it is.

        Args:
            go_on: asked between chunks; False ends it early.

        Returns:
            Whether it got to the end.

        Raises:
            StateError: not enough memory.
        """
        base = self._bytes.data_ptr()
        for start in range(0, self.nbytes, _PREFAULT_BYTES):
            if self.fd < 0 or not go_on():
                return False
            size = min(_PREFAULT_BYTES, self.nbytes - start)
            self._huge = self._huge and collapse(base + start, size)
            fresh_pages.populate(base + start, size)
        self.is_cold = False
        return True

    def map_filled(self) -> float:
        """Map the pages of a slot that was filled while it was cold; processor time it took. A thread of its own.

        They stay small: huge ones would have to be copied, which takes more time than they save in many writes.
        """
        _give_way()
        self._huge = False
        with suppress(StateError):  # the pages are there: without their mapping the next copy is slower, and right
            self.prefault()
        return time.thread_time()

    def views(self, plan: StatePlan) -> list[torch.Tensor]:
        """Destination tensors for `plan.sources`, in order; the container header is in the slot afterwards."""
        if self._bound is None or self._bound.plan is not plan:
            self._bytes[: len(plan.header)] = torch.frombuffer(bytearray(plan.header), dtype=torch.uint8)
            forms = [(getattr(torch, entry.dtype), entry.shape) for entry in plan.layout.entries]
            with uncollected():
                entries = self._cut(plan.layout.header_nbytes, forms)
                runs = {run: self._cut(run.offset, run.forms) for run in plan.runs if run.forms}
            self._bound = _Bound(plan, entries, runs)
        return self._bound.views

    def _cut(self, offset: int, forms: Iterable[tuple[torch.dtype, Sequence[int]]]) -> list[torch.Tensor]:
        """Views of arrays of these forms that follow one another from `offset` on; a call for each takes ten times."""
        views = list[torch.Tensor]()
        for dtype, group in groupby(forms, itemgetter(0)):
            shapes = [shape for _, shape in group]
            sizes = list(map(math.prod, shapes))
            nbytes = sum(sizes) * dtype.itemsize
            whole = self._bytes[offset : offset + nbytes].view(torch.uint8 if dtype in WITHOUT_COPY else dtype)
            parts = zip(torch.split_with_sizes(whole, sizes), shapes, strict=True)
            views += [part if len(shape) == 1 else part.view(shape) for part, shape in parts]
            offset += nbytes
        return views

    def close(self) -> None:
        """Give the memory back; the mapping goes when the last view does. No copy may be under way."""
        self._bound = None
        fd, self.fd = self.fd, -1  # no thread touches it any more
        self.pinned.unpin()
        os.close(fd)


def slot_bytes(plan: StatePlan) -> int:
    """Capacity to reserve for a plan: 2 % above it, so that small growth keeps the slot."""
    return plan.layout.nbytes + plan.layout.nbytes // 50 + mmap.PAGESIZE


PREFAULT_TIMEOUT_SECONDS = 600.0
_LOWEST_PRIORITY = 19


@dataclass(eq=False)
class Slots:
    """The arena's slots, `count` at most in use at once. Training thread only, except for the background warm-up.

    Slot numbers are never reused, so that the writer cannot mistake an old buffer for a new one. A slot is free again
    when all who retained it have released it.

    Args:
        count: slots in use at once.
        runtime: of the devices that copy into them; for a plan with device tensors, slots are page-locked.
    """

    count: int
    _runtime: Cuda = CUDA
    snapshot_bytes: int = field(default=0, init=False)
    """Host memory that one snapshot takes; 0 before the first state was seen."""
    pin_problem: str | None = field(default=None, init=False)
    """Why a slot could not be page-locked, once there is one: copies from devices make the host wait then."""
    _slots: OrderedDict[int, SharedSlot] = field(default_factory=OrderedDict, init=False)
    """All that exist, by their numbers; of those that are free the one that was in use last comes first."""
    _next: int = field(default=0, init=False)
    _warm_up: _WarmUp | None = field(default=None, init=False)
    _touched_seconds: float = field(default=0.0, init=False)
    _mapping: dict[int, threading.Thread] = field(default_factory=dict, init=False)
    """Threads that map the pages of slots that were filled while they were cold."""

    def take(self, plan: StatePlan) -> SharedSlot | None:
        """A slot that holds `plan`; None while all are in use. It is cold where it is the first use of that slot.

        For a plan with device tensors it is touched and page-locked now, if that was not done before.

        Raises:
            StateError: the memory is not to be had.
            WaitTimeoutError: the background warm-up does not stop.
        """
        self._settle_warm_up()
        self._retire_small(plan.layout.nbytes)
        free = self._free()
        if not free and len(self._slots) >= self.count:
            return None
        slot = min(free, key=attrgetter("is_warming")) if free else self._new(plan)
        slot.is_warming = False
        if plan.devices:
            if slot.is_cold:
                slot.prefault()
            self.pin_problem = slot.pinned.pin(plan.devices[0]) or self.pin_problem
        slot.users = 1
        return slot

    def ready(self, cold: bool = False) -> bool:
        """Whether `take` would give a slot, and a warm one if there is a warm-up, which is hurried on then.

        Args:
            cold: a slot that the warm-up has not come to will do, unless it is to be page-locked, which takes seconds.
        """
        self._settle_warm_up()
        free, warm = self._free(), self._warm_up
        if not all(slot.is_warming for slot in free):
            return True
        if warm is not None:
            warm.hurry()
        waits = warm is not None and (warm.devices or not cold)
        return not waits and len(self._slots) - len(free) < self.count

    def retain(self, index: int) -> None:
        """One more needs the content of a slot that was taken."""
        if (slot := self._in_use(index)) is not None:
            slot.users += 1

    def release(self, index: int) -> None:
        """One of those who need the slot's content needs it no longer."""
        if (slot := self._in_use(index)) is None:
            return
        slot.users -= 1
        if slot.users == 0:
            self._slots.move_to_end(index, last=False)
            if slot.is_cold and index not in self._mapping:
                self._mapping[index] = threading.Thread(target=self._map, args=(slot,), name="ckpt-map", daemon=True)
                self._mapping[index].start()

    def _map(self, slot: SharedSlot) -> None:
        self._touched_seconds += slot.map_filled()

    def discard(self, index: int) -> None:
        """The slot is not used again; what else has its memory keeps it."""
        if (slot := self._in_use(index)) is not None:
            self._close([slot])

    def discard_busy(self) -> None:
        """None of the slots in use is used again."""
        self._close([slot for slot in self.known() if slot.users])

    @property
    def touched_seconds(self) -> float:
        """Processor time that making slots ready has taken, apart from filling them."""
        return self._touched_seconds + (self._warm_up.cpu_seconds if self._warm_up is not None else 0.0)

    def warm_up(self, plan: StatePlan) -> None:
        """Make all slots ready for `plan` on a background thread; `ready` is False until the first one is.

        Raises:
            StateError: the system refuses the memory of one; none is made then.
        """
        self._settle_warm_up()
        self._retire_small(plan.layout.nbytes)
        if self._warm_up is not None:
            return
        made: list[SharedSlot] = []
        with on_failure(partial(self._close, made)):
            made.extend(self._new(plan) for _ in range(self.count - len(self._slots)))
        if made:
            self._warm_up = _WarmUp(made, plan.devices)

    def known(self) -> list[SharedSlot]:
        """All slots that exist, for a writer that is started again."""
        return list(self._slots.values())

    def nbytes(self) -> int:
        """Host memory of the arena."""
        return sum(slot.nbytes for slot in self.known())

    def close(self) -> None:
        """Give all memory back."""
        if self._warm_up is not None:
            self._warm_up.stop()
        self._close(self.known())
        for thread in self._mapping.values():  # one that lets go of a slot while the interpreter ends would abort it
            thread.join(PREFAULT_TIMEOUT_SECONDS)
        self._warm_up = None

    def limit(self, count: int) -> None:
        """Use at most so many from now on; those that are no longer wanted go when they are free."""
        self.count = count
        idle = [slot for slot in self._free() if not slot.is_warming]
        ready = sum(not slot.is_warming for slot in self._slots.values())
        self._close(idle[::-1][: max(0, ready - count)])

    def _free(self) -> list[SharedSlot]:
        return [slot for slot in self._slots.values() if not slot.users]

    def _in_use(self, index: int) -> SharedSlot | None:
        slot = self._slots.get(index)
        return slot if slot is not None and slot.users else None

    def _new(self, plan: StatePlan) -> SharedSlot:
        slot = self._slots[self._next] = SharedSlot(self._next, slot_bytes(plan), self._runtime)
        self._next += 1
        return slot

    def _close(self, slots: Iterable[SharedSlot]) -> None:
        for slot in slots:
            self._slots.pop(slot.index).close()

    def _retire_small(self, nbytes: int) -> None:
        """Free slots that are too small go, also those that are being made ready."""
        if self._warm_up is not None and any(slot.nbytes < nbytes for slot in self._warm_up.left()):
            self._warm_up.stop()
            self._settle_warm_up()
        self._close([slot for slot in self._slots.values() if not slot.users and slot.nbytes < nbytes])

    def _settle_warm_up(self) -> None:
        """Take note of a warm-up that has ended, or has nothing more to do; what it has not made ready goes."""
        warm = self._warm_up
        if warm is not None and warm.is_over:
            warm.stopped = True  # its own thread may starve for long
            self._touched_seconds += warm.cpu_seconds
            self._warm_up = None
            self._close(warm.left())
            if warm.error is not None:
                raise warm.error


class _WarmUp:
    """Pre-faults new slots one after the other, in idle processor time, and page-locks them."""

    def __init__(self, slots: Sequence[SharedSlot], devices: Sequence[torch.device]) -> None:
        self._slots = slots
        self.devices = devices
        self.cpu_seconds = 0.0
        self.stopped = False
        """Its threads end as soon as they see it."""
        self._hurried: SharedSlot | None = None
        self.error: CkptError | None = None
        for slot in slots:
            slot.is_warming = True
        self._thread = threading.Thread(target=self._run, name="ckpt-prefault", daemon=True)
        self._thread.start()

    def left(self) -> list[SharedSlot]:
        """Those that are not ready, and that no snapshot has taken."""
        return [slot for slot in self._slots if slot.is_warming]

    @property
    def is_over(self) -> bool:
        return not (self._thread.is_alive() and self.left())

    def hurry(self) -> None:
        """A snapshot waits for the next slot: touch it at usual priority."""
        left = self.left()
        if self.devices or not left or self._hurried is left[0]:
            return
        self._hurried = left[0]
        # Beside the thread that nearly starves: a priority once lowered cannot be raised without privileges.
        threading.Thread(target=self._touch, args=(left[0],), name="ckpt-prefault-now", daemon=True).start()

    def _touch(self, slot: SharedSlot) -> None:
        with suppress(StateError):  # the other thread meets it, too, and tells it
            self._make_ready(slot)

    def stop(self) -> None:
        self.stopped = True
        join(self._thread, PREFAULT_TIMEOUT_SECONDS, "the arena's background thread did not stop")

    def _run(self) -> None:
        _give_way()
        try:
            for slot in self._slots:
                self._make_ready(slot)
        except (StateError, WaitTimeoutError) as err:
            self.error = err

    def _make_ready(self, slot: SharedSlot) -> None:
        """As far as no other thread has done it; a slot that a snapshot has taken is left alone."""
        go_on = partial(self._go_on, slot)
        if slot.prefault(go_on):
            if self.devices:  # what is wrong is said when the slot is taken
                slot.pinned.pin(self.devices[0], go_on)
            slot.is_warming = False

    def _go_on(self, slot: SharedSlot) -> bool:
        """False when this slot is no longer to be made ready."""
        if threading.current_thread() is self._thread:
            self.cpu_seconds = time.thread_time()
        return slot.is_warming and not self.stopped


def _give_way() -> None:
    """Give this thread the lowest priority.

    First touch can cost seconds of processor time per GB, and a training that uses all cores would pay for it. If the
    thread is preempted while it has a kernel lock, a thread that waits for the lock leaves it a core.
    """
    with suppress(OSError):  # some sandboxes forbid it; it only makes this less polite
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
