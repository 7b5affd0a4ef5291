"""One run for every trainer: a fetch boundary, how its snapshots are taken, and what becomes of an error in that.

An adapter calls `TrainingRun.boundary` at each boundary, and says as an `RunInstant` what a snapshot of it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ckpt_engine.engine import Engine
from ckpt_engine.errors import LeaseHeldError, StorageError, UnstorableLeafError, WriterError
from ckpt_engine.frequency.triggers import MEMORY
from ckpt_engine.loop.diverging import Rollbacks
from ckpt_engine.loop.rank_decisions import cadence_of, cadence_settings, ended_by
from ckpt_engine.loop.stopping import END_WAIT_SECONDS, Losses, Stopping
from ckpt_engine.observe.events import SystemClock
from ckpt_engine.observe.log import FanOutSink
from ckpt_engine.observe.metrics import RunMetrics
from ckpt_engine.preempt.stop_requests import Stop
from ckpt_engine.snapshot.save_request import SaveHandle
from ckpt_engine.snapshot.stage import copies_lazily
from ckpt_engine.state.flatten import LazyPredicate


@dataclass(frozen=True, slots=True)
class RunInstant:
    """One instant of a run, as far as a snapshot of it needs it.

    Args:
        step: optimizer steps so far.
        epoch: epochs that are complete.
        state: makes the state tree; its time is part of the stall.
        metrics: numbers that retention may rank snapshots by.
        notes: for the manifest; called after `state`, also within the stall.
    """

    step: int
    epoch: int
    state: Callable[[], dict[str, Any]]
    metrics: Mapping[str, float]
    notes: Callable[[], dict[str, Any]]


class Here(Protocol):
    """One trainer at one boundary."""

    def end(self, stop: Stop) -> BaseException | None:
        """Stop the run; what ends it, or None where it cannot end."""

    def decided(self, *, due: bool) -> None:
        """The run goes on from here, and a durable snapshot is due or not."""

    def obstacle(self) -> str | None:
        """Why no snapshot can be taken, if so."""

    def take(self, reason: str, *, durable: bool) -> object:
        """Take it: call `TrainingRun.take`."""


class TrainingRun:
    """From the start of a training to its end, on the training thread.

    Args:
        engine: takes and restores the snapshots.
        trainer: the name of the adapter, for notes.
        device: where training computes.
        lazy: which leaves of the state change in optimizer steps only.
        log: of the adapter.
        ends_with: makes of an exit code the exception that ends the run.
        losses: judges the losses that the adapter gives; None: it gives none.
        rollbacks: where a run that has diverged goes back, if it may.

    Attributes:
        saved: the handle of the newest snapshot that was taken to be durable.
    """

    def __init__(
        self,
        engine: Engine,
        trainer: str,
        device: torch.device,
        lazy: LazyPredicate,
        log: logging.Logger,
        *,
        ends_with: Callable[[int], BaseException] = SystemExit,
        losses: Losses | None = None,
        rollbacks: Rollbacks | None = None,
    ) -> None:
        self.engine, self.config = engine, engine.config
        self._trainer, self._log = trainer, log
        engine.events = sinks = FanOutSink(engine.events)
        self.cadence = cadence_of(cadence_settings(self.config), SystemClock(), engine)
        self.metrics = RunMetrics(self.cadence, engine.times)
        sinks.add(self.cadence)
        sinks.add(self.metrics)
        self.stopping = Stopping(
            engine, self.cadence, sinks, log, self.metrics.numbers, ends_with, losses=losses, rollbacks=rollbacks
        )
        self._lazy = lazy if copies_lazily(self.config.lazy, device) else None
        self._touches = copies_lazily("auto", device)
        """Training leaves a core idle, in which the arena is made ready."""
        self.saved: SaveHandle | None = None
        self._judges, self._took = losses is not None, False

    def resume(self, learned: Mapping[str, Any]) -> None:
        """Go on with what the earlier process had learned about its snapshots."""
        self.cadence.restore(learned, failure=ended_by(self.engine))

    def prepare(self, state: dict[str, Any]) -> None:
        """Make the arena ready in the background, for states like this one."""
        self.engine.prepare(state, lazy=self._lazy, touch=self._touches)
        self.cadence.announce(self.engine.snapshot_bytes)

    def boundary(self, step: int, here: Here) -> None:
        """Step `step` is complete, and the next batch is about to be asked for.

        Raises:
            DivergedError: as `Stopping.boundary` and `Stopping.vetoed`.
            SystemExit, KeyboardInterrupt: a request to stop, or what the adapter ends its runs with.
            SnapshotFailedError: as `Engine.poll`.
        """
        self.engine.poll()
        if not self._touches:
            self.cadence.background(self.engine.prepare_seconds)
        stop = self.stopping.boundary(step)
        if stop is not None and (end := here.end(stop)) is not None:
            raise end
        self.config = self.stopping.edits.apply(self.config)
        self.engine.begin_step(step + 1)
        reason = self.cadence.boundary(step) or ("manual" if self.stopping.asked else None)
        vetoed = self._judges and self.stopping.vetoed(due=reason is not None)
        here.decided(due=reason is not None)
        if reason is not None:
            obstacle = "loss spike" if vetoed else self._obstacle(here, durable=True)
            if obstacle is None:
                here.take(reason, durable=True)
                return
            self.cadence.skipped(step, obstacle)
        if self.engine.memory and self.cadence.memory_due(step):
            if self._obstacle(here, durable=False) is None:
                here.take(MEMORY, durable=False)
            self.cadence.memory_over(step)

    def _obstacle(self, here: Here, *, durable: bool) -> str | None:
        return here.obstacle() or (None if self.engine.ready(durable=durable) else "busy")

    def take(self, instant: RunInstant, reason: str, *, durable: bool = True) -> SaveHandle | None:
        """A snapshot; None: there is none, and that was said.

        Args:
            instant: what to save.
            reason: why; stored.
            durable: False: into memory only.

        Raises:
            LeaseHeldError: another process writes this run.
            StorageError, WriterError: with `on_error: raise`, as `Checkpointer.save`.
            UnstorableLeafError: the same, and if it is the first one: then it is for the user to mend now.
        """
        step, began = instant.step, time.perf_counter()
        if self.stopping.vetoed(due=True):
            if durable:
                self._log.error("no snapshot of step %d: its loss is far above the usual ones", step)
                self.engine.miss(step, "loss spike")
                self.cadence.skipped(step, "loss spike")
            return None
        try:
            state, notes = instant.state(), {"trainer": self._trainer, **instant.notes()}
            self.engine.times.waited("stall", time.perf_counter() - began)
            handle = self.engine.save(
                state,
                step=step,
                metrics=instant.metrics,
                epoch=instant.epoch,
                reason=reason,
                lazy=self._lazy,
                notes=notes,
                durable=durable,
            )
        except (StorageError, WriterError, UnstorableLeafError) as err:
            wrong = isinstance(err, UnstorableLeafError) and not self._took
            if wrong or isinstance(err, LeaseHeldError) or self.config.on_error == "raise":
                raise
            self._log.error("no snapshot of step %d: %s", step, err)
            self.cadence.skipped(step, "error")
            return None
        stall = time.perf_counter() - began
        if handle.skipped is not None:
            if durable:
                self.cadence.skipped(step, "busy")
            return None
        self._took = True
        self.metrics.stalled(stall)
        if not durable:
            self.cadence.held(step, stall)
            return handle
        self.cadence.taken(step, stall)
        self.stopping.taken()
        self.stopping.halt.metrics = {*(self.stopping.halt.metrics or ()), *instant.metrics}
        self.saved = handle
        return handle

    def take_at_end(self, instant: RunInstant, reason: str) -> None:
        """The final snapshot, for which there is time; weights may change when this returns."""
        if not self.engine.ready() and not self.engine.wait(self.stopping.seconds_left(END_WAIT_SECONDS)):
            self._log.error("the final state was not saved: earlier snapshots are still being written")
            self.engine.miss(instant.step, "busy")
            return
        self.take(instant, reason)
        self.complete_copies()

    def evaluated(self, seconds: float) -> None:
        """An evaluation took so long, which was not training."""
        self.cadence.exclude(seconds)
        self.engine.times.waited("validation", seconds)
        self.cadence.validation_ended()

    def complete_copies(self) -> None:
        """The fence: wait until lazily copied tensors may change."""
        if seconds := self.engine.before_update():
            self.cadence.fence(seconds)
            self.metrics.stalled(self.metrics.stall_seconds + seconds)
