"""A snapshot on its way to the writer: plan, stage into a slot, hand the slot over, learn the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from ckpt_engine.copy import memory_limits
from ckpt_engine.copy.job import JobDone, Mirrored, SlotFreed
from ckpt_engine.errors import SnapshotFailedError, WaitTimeoutError
from ckpt_engine.observe.events import (
    Event,
    SnapshotSkipped,
    SnapshotStaged,
    WriterLost,
    said_if_slow,
)
from ckpt_engine.observe.reporter import Reporter
from ckpt_engine.probe.recorder import FlightRecorder
from ckpt_engine.probe.trained_groups import TrainedGroups
from ckpt_engine.ranks.session import Session
from ckpt_engine.snapshot.arena import SharedSlot, Slots, slot_bytes
from ckpt_engine.snapshot.copying import FENCE_TIMEOUT_SECONDS
from ckpt_engine.snapshot.cuda import TornCopyError
from ckpt_engine.snapshot.ownership import CLOSE_SECONDS, Lineage, leavers
from ckpt_engine.snapshot.save_request import OwnSnapshots, Request, SaveHandle, SharedSnapshots
from ckpt_engine.snapshot.stage import Stager, Staging
from ckpt_engine.snapshot.writer_link import (
    Coming,
    Handover,
    InFlight,
    InFlightJob,
    Newest,
    OpenWriter,
    outlives_the_trainer,
)
from ckpt_engine.state.flatten import Flattener, LazyPredicate
from ckpt_engine.state.layout import CapturedState, Planner
from ckpt_engine.undo import on_failure
from ckpt_engine.writer.client import WriterClient, never
from ckpt_engine.writer.pulse import HeartbeatPage

BEHIND_SECONDS = 0.5
_FLUSH_SECONDS = 0.01
_CHUNK_SECONDS = 1.0
"""For threads to end after the chunk they copy, which takes milliseconds, however short the time to close is."""


class Pipeline:
    """The trainer's side of all snapshots of one run.

    Args:
        open_writer: starts a writer; called again after a writer died.
        slots: snapshots in host memory at once.
        emit: takes events, on the training thread.
        memory: with a memory tier: the writer keeps the newest snapshot, and makes it durable if this process dies.
        pickle_paths: see `Flattener`.
        session: where several ranks take each snapshot together.
        tier: how the nearest place is called in events.
        process: the writer is one, where there is room.
        eager: everything is copied before training continues.

    `behind` is to be set where the writer of an earlier trainer may still have the lease for a while.
    All methods belong to the training thread. Nothing but `wait_for`, `drain` and `close` ever waits for storage.
    """

    def __init__(
        self,
        open_writer: OpenWriter,
        slots: int,
        emit: Callable[[Event], object],
        *,
        memory: bool = False,
        pickle_paths: tuple[str, ...] = (),
        session: Session | None = None,
        tier: str = "",
        process: bool = False,
        eager: bool = False,
    ) -> None:
        self._open_writer, self.process = open_writer, process
        self._report = Reporter(emit)
        self._group = OwnSnapshots() if session is None else SharedSnapshots(session, self._cancel)
        self.stager = Stager(Planner(Flattener(pickle_paths), session), eager)
        self.slots = Slots(slots)
        self.memory = memory
        self.groups = TrainedGroups()
        self.recorder: FlightRecorder | None = None
        """Its rows are shared with the writer."""
        self._writer: Handover | None = None
        newest = Newest(self.slots.release, of_ranks=session is not None)
        self.in_flight = InFlight(self.slots, newest, emit, tier, self.start if session is None else None)
        self.lineage = Lineage(session, tier)
        self.pace: Callable[[], Mapping[str, Any]] = dict
        """See `Cadence.pace`; the writer hears of it with each snapshot."""
        self.behind = False

    def start(self, *, waits: bool = True) -> Handover:
        """Start the writer and take the run's lease, unless that is done; the writer.

        `behind` another writer it is only waited for shortly: snapshots are skipped as busy until it has started, and
        what goes wrong is raised by the first call after that. After a writer was lost the next one is not waited for.

        Args:
            waits: False: the caller waits, by `Handover.refusal`.

        Raises:
            LeaseHeldError, StorageError, WriterError, StateError
        """
        if self._writer is not None:
            return self._writer
        self._group.reopens()
        if not self.slots.snapshot_bytes:
            self._fit(0)
        arrived = partial(self._arrived, self.pulse)  # where there is no shared memory, no writer has the lease
        if waits and not (self.in_flight.newest.writer or self.behind):
            self._writer = Handover(self._open_writer(self.memory, self._report.emit), arrived)
            return self._writer
        writer = self._writer = Handover(Coming(self._open_writer, self.memory), arrived)
        if self.behind:
            writer.wait(BEHIND_SECONDS)
            self.poll()
        return writer

    @cached_property
    def pulse(self) -> HeartbeatPage:
        """How far this process is, for the writer; made where it is first used, and gone after `close`."""
        return HeartbeatPage()

    def _arrived(self, pulse: HeartbeatPage, client: WriterClient) -> None:
        self.behind = False
        if self.memory:
            self.memory = outlives_the_trainer(client, self._report.emit)
        with on_failure(partial(client.close, CLOSE_SECONDS)):  # else it would keep the lease
            client.attach_pulse(pulse.fd)
            self._share_rows(client)

    def record(self, recorder: FlightRecorder) -> None:
        """Share the rows of this recorder with the writer from now on."""
        self.recorder = recorder
        leavers.add(recorder)
        if self._writer is not None and self._writer.client is not None:
            self._share_rows(self._writer.client)

    def _share_rows(self, client: WriterClient) -> None:
        if self.recorder is not None:
            client.attach_rows(self.recorder.name, self.recorder.about, self.recorder.fd)

    @property
    def started(self) -> bool:
        """Whether there is a writer, or one is being started."""
        return self._writer is not None

    @property
    def _waits_behind(self) -> bool:
        """Whether the writer that is being started waits for another one to end."""
        return self.behind and self.started

    def prepare(self, state: Any, lazy: LazyPredicate | None = None, *, touch: bool = True) -> None:
        """See `Engine.prepare`."""
        plan = self.stager.capture(state, lazy).plan
        self._fit(slot_bytes(plan))
        self.start()
        if touch:
            self.slots.warm_up(plan)

    def ready(self, durable: bool = True, cold: bool = False) -> bool:
        """See `Engine.ready`."""
        self.poll()
        staging = self.stager.staging
        if self._waits_behind or (staging is not None and not staging.over):
            return False
        return (self._writer_has_time() if durable else self._group.keeps_up) and self.slots.ready(cold)

    def _writer_has_time(self) -> bool:
        """Whether one more durable snapshot leaves slots for those that only stay in memory: one kept, one filled."""
        return not self.memory or len(self.in_flight) < max(1, self.slots.count - 1 - self.in_flight.newest.keep)

    def save(self, state: Any, wanted: Request) -> SaveHandle:
        """Take a snapshot of this instant; see `Checkpointer.save`."""
        return self._group.take(wanted, self.lineage.parent, self.start, partial(self._save, state, wanted))

    def miss(self, step: int, why: str, *, durable: bool = True) -> None:
        """See `OwnSnapshots.miss`."""
        self._group.miss(step, self.lineage.parent, why, durable=durable)

    def _cancel(self, snapshot: str, why: str) -> None:
        if self._writer is not None:
            self._writer.give(lambda client: client.cancel(snapshot, why), lambda _: None)

    def _save(self, state: Any, wanted: Request, took: Callable[[], Mapping[str, Any]]) -> SaveHandle:
        step, durable = wanted.step, wanted.durable
        began, when = time.perf_counter(), (time.time(), time.monotonic())
        self.stager.fence()
        if not self.stager.finish(FENCE_TIMEOUT_SECONDS):
            raise WaitTimeoutError("the copy of the previous snapshot makes no progress")
        self.poll()
        capture = self.stager.capture(state, wanted.lazy)
        self._fit(slot_bytes(capture.plan))
        # The first writer of a run starts while the first snapshot is copied.
        copies_first = not (
            self.started or self.in_flight.newest.writer or self.memory or capture.plan.devices or self.lineage.parent
        )
        writer = self.start(waits=not copies_first)
        if self._waits_behind:
            self._report.emit(SnapshotSkipped(step, "busy"))
            return SaveHandle(self, step, durable=durable, skipped="busy: the writer waits for the one before it")
        self.pulse.beat(step + 1)
        if not durable and not self.memory:
            return SaveHandle(self, step, durable=False, skipped="there is no memory tier")
        slot = self.slots.take(capture.plan) if not durable or self._writer_has_time() else None
        if self.slots.pin_problem is not None:
            self._report.failed(
                "pinning",
                f"host memory for snapshots cannot be page-locked ({self.slots.pin_problem}): `save` waits for the "
                "copies from the GPU. Give the job more memory that can be locked (ulimit -l), or set fewer `slots`",
            )
        if slot is None:
            self._report.emit(SnapshotSkipped(step, "busy"))
            return SaveHandle(self, step, durable=durable, skipped="busy: earlier snapshots are still being written")
        handle = SaveHandle(self, step, durable=durable)
        self.in_flight.jobs += 1
        staging: Staging | None = None
        try:
            staging = self._ready_to_stage(writer, wanted, capture, slot, handle, took, when)
            staging.begin(self.stager.copier)
        except BaseException:
            # Else a device still writes into the slot, and the error is reported then.
            if staging is None or staging.complete:
                self.in_flight.drop()
                self.slots.discard(slot.index)
            raise
        if copies_first and self._writer is not None:
            if (refused := self._writer.refusal(self._report.emit)) is not None:
                self._writer = None
                self.in_flight.drop()
                self.slots.discard(slot.index)
                raise refused
            self.poll()
        if not staging.complete:
            self.stager.staging = staging
        handle.stall_seconds = time.perf_counter() - began
        self._report.emit(SnapshotStaged("", step, handle.stall_seconds, capture.plan.nbytes, durable))
        return handle

    def _ready_to_stage(
        self,
        writer: Handover,
        wanted: Request,
        capture: CapturedState,
        slot: SharedSlot,
        handle: SaveHandle,
        took: Callable[[], Mapping[str, Any]],
        when: tuple[float, float],
    ) -> Staging:
        """What copies the state into its slot and then hands over the job, of which the writer knows the rest.

        Args:
            took: what the job says of ranks.
            when: wall-clock and monotonic seconds of the instant.
        """
        self.pulse.fill(slot.index, self.in_flight.jobs)
        layout, marks = self.groups.look(capture)
        job = wanted.job(
            job=self.in_flight.jobs,
            slot=slot.index,
            values=capture.values,
            created=when[0],
            instant_monotonic=when[1],
            parent=self.lineage.parent,
            line=self.lineage.line(),
            damaged=tuple(self.lineage.damaged),
            pace=self.pace(),
            marks=marks,
            **took(),
        )
        known = [one.index for one in self.slots.known()]
        about = ((slot.index, slot.fd, slot.nbytes), known, layout, capture.plan.trees)
        one = InFlightJob(job, handle, about, self.memory)
        self.in_flight.add(one)

        def submit(error: BaseException | None) -> None:
            """Any thread; never raises, so that the fence always opens."""
            if error is None:
                self.in_flight.give(one, writer)
            elif isinstance(error, TornCopyError):
                self.stager.is_eager = True
                self.in_flight.refuse(one, error)
            else:
                self.in_flight.refuse(one, SnapshotFailedError(f"staging failed: {error}"))

        return Staging(capture, slot.views(capture.plan), submit, slot=slot.memory)

    def poll(self) -> None:
        """Take in what the writer has to say. Never blocks."""
        writer = self._writer
        if self.behind and writer is not None and writer.wait(0.0) and (refused := writer.refusal(self._report.emit)):
            self._writer, self.behind = None, False
            raise refused
        client = writer.client if writer is not None else None
        waits = self.in_flight.unsent or self.in_flight.newest.unsettled
        if not (waits or (writer is not None and (client is None or client.news))):
            return
        self.in_flight.newest.settle(lambda: client is not None and client.alive and client.flushed)
        lost = []
        for message in writer.poll() if writer is not None else ():
            if isinstance(message, JobDone) and message.lost:
                lost.append(message)
            elif isinstance(message, JobDone):
                self.in_flight.settle(message)
            elif isinstance(message, SlotFreed):
                self.in_flight.freed(message.slot)
            elif not isinstance(message, Mirrored):
                self._report.emit(message)
                if isinstance(message, WriterLost):
                    self._lose_writer(lost)
            self._group.heard(message)
        self.in_flight.go_on(self._writer)

    def _lose_writer(self, lost: Sequence[JobDone] = ()) -> None:
        self._writer = None
        self.in_flight.lose(lost)

    def _fit(self, nbytes: int) -> None:
        """Where the host has too little memory: fewer slots of `nbytes`, no memory tier, no writer process."""
        if 0 < nbytes <= self.slots.snapshot_bytes:
            return
        self.slots.snapshot_bytes = nbytes
        fit = memory_limits.plan_arena(
            nbytes,
            self.slots.count,
            memory=self.memory,
            room=memory_limits.look(),
            held_bytes=self.slots.nbytes(),
            kept=self.in_flight.newest.keep,
            process=self.process,
            started=self._writer is not None,
        )
        if fit.warning is None:
            return
        self._report.warn(fit.warning)
        if nbytes:
            self.slots.limit(fit.slots)
        self.process &= fit.process
        if self._writer is not None and not self._waits_behind and (self.memory != fit.memory or not fit.process):
            # It would go on keeping a slot for a rescue: another one takes its place.
            if not self._writer.close(CLOSE_SECONDS):
                self.stager.fence()
                self.stager.finish(FENCE_TIMEOUT_SECONDS)  # no device may still copy into them
                self.slots.discard_busy()  # it goes on by itself, and may still read them
            self.poll()
            self._lose_writer()
        self.memory = fit.memory

    def wait_for(self, handle: SaveHandle, timeout: float) -> bool:
        """Wait until the outcome of `handle` is known; False if the time was not enough. An error counts as shown."""
        self.stager.fence()
        if not (self.stager.finish(timeout) and self._wait(lambda: handle.settled, timeout)):
            return False
        if handle.error is not None and handle.error in self.in_flight.failures:
            self.in_flight.failures.remove(handle.error)
        return True

    def drain(self, timeout: float, hurries: Callable[[bool], bool] = never) -> bool:
        """Wait until no snapshot is in flight; False if the time was not enough. `hurries`: as of `close`."""
        with said_if_slow(partial(self._waited_for, timeout)):
            return self._drain(timeout, hurries)

    def _waited_for(self, timeout: float) -> str | None:
        return self._writer.unwritten(timeout) if self._writer is not None else None

    def _drain(self, timeout: float, hurries: Callable[[bool], bool]) -> bool:
        self.stager.fence()
        if not self.stager.finish(timeout):
            return False
        return self._wait(lambda: not (self.in_flight or self._waits_behind), timeout, hurries)

    def close(self, timeout: float, *, hurries: Callable[[bool], bool] = never, **how: Any) -> None:
        """Finish what is in flight, stop the writer (see `WriterClient.close`), free the arena.

        Raises:
            WaitTimeoutError: snapshots are still in flight; the writer goes on with them by itself.
        """
        began = time.monotonic()
        self.groups.close()
        with said_if_slow(partial(self._waited_for, timeout)):
            waits = self.in_flight or self.stager.staging or self._waits_behind
            drained = self._drain(timeout, hurries) if waits else True
            self.stager.copier.close(max(timeout, _CHUNK_SECONDS))
            self.in_flight.ends = True
            if self._writer is not None:
                left = max(0.0, began + timeout - time.monotonic())
                self._writer.close(left, hurries=hurries, **how)
                self.poll()  # what further tiers had to say until the end
                self._writer = None
            if (lacking := self._group.lacking()) is not None:
                self._report.warn(lacking)
        if self.recorder is not None:
            self.recorder.close()
        self.slots.close()
        vars(self).pop("pulse", None)
        if not drained:
            raise WaitTimeoutError(f"snapshots were still being written after {time.monotonic() - began:.0f} s")

    def _wait(self, done: Callable[[], bool], timeout: float, hurries: Callable[[bool], bool] = never) -> bool:
        deadline = time.monotonic() + timeout
        self.poll()
        while not done():
            left = deadline - time.monotonic()
            if left <= 0 or hurries(False):
                return False
            if self._writer is not None:
                # There is no event when what was sent is with the kernel: look again soon.
                self._writer.wait(min(left, 1.0 if self._writer.flushed else _FLUSH_SECONDS))
            self.poll()
        return True
