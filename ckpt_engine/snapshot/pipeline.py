"""Take snapshots: capture, stage into a slot, hand the slot to the writer, and learn the outcome."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ckpt_engine.errors import CkptError, SnapshotFailedError, SnapshotSkippedError, WaitTimeoutError
from ckpt_engine.observe.events import Event, SnapshotSkipped, SnapshotStaged, WriterLost
from ckpt_engine.persist.client import WriterClient
from ckpt_engine.persist.job import JobDone, PersistJob, SlotFreed
from ckpt_engine.snapshot.arena import Slot
from ckpt_engine.snapshot.flatten import Flattener, LazyPredicate
from ckpt_engine.snapshot.handle import SaveHandle
from ckpt_engine.snapshot.plan import Plan, Planner
from ckpt_engine.snapshot.slots import Slots
from ckpt_engine.snapshot.stage import Copier, Staging

WAIT_SECONDS = 3600.0


class Pipeline:
    """The trainer's side of all snapshots of one run.

    Args:
        open_writer: starts a writer and returns its client; called again after a writer died.
        slots: snapshots in host memory at once.
        emit: takes events, on the training thread.
        pickle_paths: see `Flattener`.
        check_lazy: debug mode, see `Staging`.

    All methods belong to the training thread. Nothing but `wait_for`, `drain` and `close` ever waits for storage.
    """

    def __init__(
        self,
        open_writer: Callable[[], WriterClient],
        slots: int,
        emit: Callable[[Event], None],
        *,
        pickle_paths: tuple[str, ...] = (),
        check_lazy: bool = False,
    ) -> None:
        self._open_writer = open_writer
        self._emit = emit
        self._check_lazy = check_lazy
        self._planner = Planner(Flattener(pickle_paths))
        self._slots = Slots(slots)
        self._copier = Copier()
        self._writer: _Writer | None = None
        self._staging: Staging | None = None
        self._jobs = 0
        self._pending: dict[int, tuple[SaveHandle, int]] = {}
        self._held: set[int] = set()
        self._unsent: dict[int, CkptError] = {}
        self._failures: list[CkptError] = []
        self.parent: str | None = None

    def start(self) -> None:
        """Start the writer and take the run's lease, unless that is done.

        Raises:
            LeaseHeldError, StorageError, WriterError
        """
        if self._writer is None:
            self._writer = _Writer(self._open_writer())

    def prepare(self, state: Any, lazy: LazyPredicate | None = None, share: float | None = None) -> None:
        """Plan for `state` and make the arena ready in the background, so that the first snapshot is as fast as any."""
        self.start()
        self._slots.warm_up(self._planner.capture(state, lazy).plan, share)

    @property
    def prepare_seconds(self) -> float:
        """Processor time that making the arena ready has taken."""
        return self._slots.touched_seconds

    def ready(self) -> bool:
        """Whether `save` would take a snapshot now."""
        self.poll()
        return self._staging is None and self._slots.ready()

    def save(
        self,
        state: Any,
        *,
        step: int,
        metrics: Mapping[str, float],
        epoch: int | None,
        reason: str,
        lazy: LazyPredicate | None,
        notes: Mapping[str, Any],
    ) -> SaveHandle:
        """Take a snapshot of this instant; see `Checkpointer.save`."""
        began = time.perf_counter()
        created, instant = time.time(), time.monotonic()
        self.before_update()
        self.start()
        self.poll()
        capture = self._planner.capture(state, lazy)
        slot = self._slots.take(capture.plan)
        if slot is None:
            self._emit(SnapshotSkipped(step, "busy"))
            return SaveHandle(self, step, skipped="busy: earlier snapshots are still being written")
        assert self._writer is not None
        self._writer.announce(slot, self._slots.known(), capture.plan)
        self._jobs += 1
        job = PersistJob(
            job=self._jobs,
            slot=slot.index,
            layout=capture.plan.layout.id,
            tree=tuple((ref.key, ref.id) for ref in capture.plan.skeletons),
            values=capture.values,
            step=step,
            epoch=epoch,
            reason=reason,
            metrics=dict(metrics),
            created=created,
            instant_monotonic=instant,
            parent=self.parent,
            notes=notes,
            software=software(),
        )
        handle = SaveHandle(self, step)
        self._pending[job.job] = (handle, slot.index)
        submit = self._submitter(job, self._writer)
        staging = Staging(capture, slot.views(capture.plan), submit, check=self._check_lazy)
        with self._slots.undisturbed():
            staging.begin(self._copier)
        if not staging.complete:
            self._staging = staging
        handle.stall_seconds = time.perf_counter() - began
        self._emit(SnapshotStaged("", step, handle.stall_seconds, capture.plan.nbytes))
        return handle

    def before_update(self) -> float:
        """The fence; seconds waited."""
        staging = self._staging
        if staging is None:
            return 0.0
        self._staging = None
        return staging.fence()

    def poll(self) -> None:
        """Take in what the writer has to say. Never blocks."""
        for job, error in list(self._unsent.items()):
            del self._unsent[job]
            self._settle(JobDone(job, None), error)
        if self._writer is None:
            return
        for message in self._writer.client.poll():
            if isinstance(message, JobDone):
                self._settle(message, message.error.exception() if message.error else None)
            elif isinstance(message, SlotFreed):
                self._slots.release(message.slot)
                self._held.discard(message.slot)
            else:
                self._emit(message)
                if isinstance(message, WriterLost):
                    self._lose_writer()

    def _lose_writer(self) -> None:
        """Nobody will say any more when the slots are free that its hanging calls held: others take their place."""
        self._writer = None
        for slot in self._held:
            self._slots.discard(slot)
        self._held.clear()

    def take_failure(self) -> CkptError | None:
        """The oldest background error that has not been shown yet."""
        return self._failures.pop(0) if self._failures else None

    def wait_for(self, handle: SaveHandle, timeout: float | None) -> str:
        """See `SaveHandle.wait`."""
        if handle.skipped is not None:
            raise SnapshotSkippedError(f"the snapshot of step {handle.step} was skipped ({handle.skipped})")
        self.before_update()
        if not self._wait(lambda: handle.done(), timeout):
            raise WaitTimeoutError(f"the snapshot of step {handle.step} is not durable yet")
        if handle.error is not None:
            if handle.error in self._failures:
                self._failures.remove(handle.error)
            raise SnapshotFailedError(
                f"the snapshot of step {handle.step} did not become durable: {handle.error.message}",
                hint=handle.error.hint,
            ) from handle.error
        assert handle.snapshot is not None
        return handle.snapshot

    def drain(self, timeout: float | None) -> bool:
        """Wait until no snapshot is in flight; False if the time was not enough."""
        self.before_update()
        return self._wait(lambda: not self._pending, timeout)

    def arena_bytes(self) -> int:
        """Host memory held by the arena."""
        return self._slots.nbytes()

    def close(self, timeout: float) -> None:
        """Finish what is in flight, stop the writer, free the arena.

        Raises:
            WaitTimeoutError: snapshots are still in flight; the writer goes on with them by itself.
        """
        drained = self.drain(timeout) if self._pending or self._staging else True
        self._copier.close(timeout)
        if self._writer is not None:
            self._writer.client.close(timeout)
            self.poll()  # what further tiers had to say until the end
            self._writer = None
        self._slots.close()
        if not drained:
            raise WaitTimeoutError(f"snapshots were still being written after {timeout:.0f} s")

    def _wait(self, done: Callable[[], bool], timeout: float | None) -> bool:
        deadline = time.monotonic() + (WAIT_SECONDS if timeout is None else timeout)
        self.poll()
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if self._writer is not None:
                self._writer.client.wait(min(left, 1.0))
            self.poll()
        return True

    def _submitter(self, job: PersistJob, writer: _Writer) -> Callable[[BaseException | None], None]:
        def submit(error: BaseException | None) -> None:
            """Any thread; never raises, so that the fence always opens."""
            if error is None:
                try:
                    writer.submit(job)
                except CkptError as err:
                    self._unsent[job.job] = err
            else:
                self._unsent[job.job] = SnapshotFailedError(f"staging failed: {error}")

        return submit

    def _settle(self, done: JobDone, error: CkptError | None) -> None:
        found = self._pending.pop(done.job, None)
        if found is None:
            return
        handle, slot = found
        if done.slot_held:
            self._held.add(slot)  # a call that hangs may still read it: `SlotFreed` gives it back
        else:
            self._slots.release(slot)
        handle.snapshot, handle.error = done.snapshot_id, error
        if error is not None:
            self._failures.append(error)


class _Writer:
    """A running writer and what it has been told."""

    def __init__(self, client: WriterClient) -> None:
        self.client = client
        self._slots: set[int] = set()
        self._layout: int | None = None
        self._skeletons: dict[str, int] = {}
        self._lock = threading.Lock()

    def announce(self, slot: Slot, known: Iterable[Slot], plan: Plan) -> None:
        """Send what the next job refers to, unless the writer has it, and let it free what is no longer used.

        Every earlier job has been submitted by then: the fence comes before the next snapshot.
        """
        with self._lock:
            gone = self._slots - {s.index for s in known}
            self._slots -= gone
            if slot.index not in self._slots:
                self.client.attach_slot(slot.index, slot.fd, slot.nbytes)
                self._slots.add(slot.index)
            layouts = []
            if plan.layout.id != self._layout:
                self.client.define_layout(plan.layout)
                layouts = [self._layout] if self._layout is not None else []
                self._layout = plan.layout.id
            new = {ref.key: ref.id for ref in plan.skeletons}
            for ref in plan.skeletons:
                if self._skeletons.get(ref.key) != ref.id:
                    self.client.define_skeleton(ref.id, ref.tree)
            skeletons = [number for key, number in self._skeletons.items() if new.get(key) != number]
            self._skeletons = new
            if gone or layouts or skeletons:
                self.client.forget(slots=sorted(gone), layouts=layouts, skeletons=skeletons)

    def submit(self, job: PersistJob) -> None:
        with self._lock:
            self.client.submit(job)


@cache
def software() -> Mapping[str, str]:
    """Versions that bear on whether a resumed run can be bitwise the same."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("ckpt-engine", "numpy", "lightning", "accelerate"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
