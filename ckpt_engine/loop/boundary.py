"""One run for every trainer: a fetch boundary, how its snapshots are taken, and what becomes of an error in that.

An adapter calls `TrainingRun.boundary` at each boundary, and says as an `RunInstant` what a snapshot of it is.
`Stopping` is what others want of a run there: a stop, the end of a diverged one, a snapshot now, edited options.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ckpt_engine.config import Config
from ckpt_engine.config.live import change
from ckpt_engine.config.reporting import Status
from ckpt_engine.data.private_names import is_dead_worker
from ckpt_engine.engine import Engine
from ckpt_engine.errors import LeaseHeldError, RanksError, StateError, StorageError, WaitTimeoutError, WriterError
from ckpt_engine.frequency.cadence import Cadence
from ckpt_engine.frequency.policy import FrequencySettings
from ckpt_engine.frequency.triggers import INTERVAL, MEMORY
from ckpt_engine.loop.diverging import Diverging, Rollbacks
from ckpt_engine.loop.halt import EXCEPTION_WAIT_SECONDS, Halt
from ckpt_engine.loop.rank_decisions import SharedCadence, cadence_of, ended_by
from ckpt_engine.observe.clock import SystemClock
from ckpt_engine.observe.events import FanOutSink, clear_bars, is_failure
from ckpt_engine.observe.metrics import RunMetrics
from ckpt_engine.preempt.divergence import Divergence, LossGuard, On
from ckpt_engine.preempt.status_page import StatusPage
from ckpt_engine.preempt.stop_requests import Stop
from ckpt_engine.preempt.watch import open_watch
from ckpt_engine.probe.recorder import NOTE
from ckpt_engine.snapshot.save_request import SaveHandle
from ckpt_engine.state.peft_adapters import note_of_adapters

if TYPE_CHECKING:
    from ckpt_engine.loop.capture import Capture

END_WAIT_SECONDS = 600.0
"""How long the end of a run waits for what is in flight, where nothing stops it."""
_MOST_WAITING = 64
"""Losses on a device are fetched when a snapshot is due, or when there are so many."""


def uncaught() -> BaseException | None:
    """The exception that is being handled, or that has ended the script or the notebook's cell."""
    return sys.exception() or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


class Stopping:
    """From `start` to `close`, on the training thread. At the end of the interpreter it closes itself.

    One process that has diverged ends at once. One of several ranks takes part in no snapshot from then on, informs the
    others, and ends with all of them: alone it would leave them in a collective.

    Args:
        engine: of the run.
        cadence: of the run.
        sinks: gets this run's events, and takes those of what watches it.
        log: of the adapter.
        numbers: for the status page; called on threads.
        ends_with: makes of an exit code the exception that ends the run.
        losses: judges the losses that the adapter gives; None: it gives none.
        rollbacks: where a run that has diverged goes back; None: it may not.

    Attributes:
        watch: knows of requests to stop, and of what is durable.
        halt: ends the run.

    Raises:
        StorageError: a tier that no storage serves.
    """

    def __init__(
        self,
        engine: Engine,
        cadence: Cadence,
        sinks: FanOutSink,
        log: logging.Logger,
        numbers: Callable[[], Mapping[str, float]],
        ends_with: Callable[[int], BaseException],
        *,
        losses: Losses | None,
        rollbacks: Rollbacks | None,
    ) -> None:
        log.addFilter(clear_bars)
        self._engine, self._log, self.losses, self.rollbacks = engine, log, losses, rollbacks
        self._ledger, self.watch = open_watch(engine.config, SystemClock(), engine.ranks, lambda: engine.divided)
        self._rank = None if engine.ranks is None else engine.ranks.rank
        if losses_of(engine.config) is not None and losses is None:
            log.warning("`guard` and `rollback` work with Lightning only; they are ignored here")
        self._page = StatusPage(Status() if self._rank else engine.config.status, self.watch.outlook, numbers)
        self._cadence = cadence
        self.halt = Halt(self.watch, engine, ends_with, log, cadence)
        self._shared = self.halt.shared
        self._diverging = Diverging(engine, self.halt, rollbacks, log)
        for sink in (self._ledger, self.watch):
            sinks.add(sink)

    def start(self, step: int) -> None:
        """The run continues from `step`: signal handlers and threads start. On the main thread, for signals."""
        if (loaded := self._engine.loaded) is not None:
            self._ledger.resumed(loaded.info.step, loaded.place)
        self.watch.boundary(step)
        for one in self._threads:
            one.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Put signal handlers back, end all threads. Idempotent."""
        atexit.unregister(self.close)
        for one in self._threads:
            one.close()

    @property
    def _threads(self) -> list[Any]:
        """What starts and closes with the run; the last one, where an options file is followed."""
        return [self.watch, self._page, *filter(None, [self._engine.live])]

    # ---- at a boundary

    def boundary(self, step: int) -> Stop | None:
        """Step `step` is complete, and nothing was decided yet of what comes after it; the stop, if there is one.

        Raises:
            DivergedError: all ranks end here. Where they are stopped as well they end for that: see `Halt.end_of`.
        """
        is_stop_wanted = self.watch.boundary(step)
        if self._shared is None:
            return self.watch.stop if is_stop_wanted else None
        try:
            stop = self._shared.stop(
                step, self.watch.stop, asked=self.watch.save_asked_by is not None, fits=self.halt.fits
            )
            if stop is None and self._shared.diverged is None:
                self._judge(self._shared, due=self._shared.due)
        except RanksError as err:
            if (own := self._divergence) is not None:
                raise self._diverging.cut_off(own, err) from err
            raise
        if self._shared.diverged is not None:
            raise self.halt.end_of(self._diverging.together(self._shared.diverged, self._divergence))
        return stop

    def edited(self, config: Config) -> Config:
        """The options from now on; `config`, those so far, unless their file was edited in a way that changes them."""
        live = self._engine.live
        if live is None or (found := live.take()) is None:
            return config
        if isinstance(found, str):
            self._log.warning("the edited options are not used: %s", found)
            return config
        if (made := change(config, found)) is None:
            return config
        self._log.warning("%s", made.text(live.name))
        self.watch.grace_seconds = made.config.preemption.grace
        if (settings := FrequencySettings.of(made.config)) != FrequencySettings.of(config):
            self._cadence.retune(settings)
        return made.config

    def no_batch(self, error: Exception, where: str | None) -> Stop | None:
        """A step has failed; the stop that takes effect here, as it has ended the loader's workers too.

        Args:
            where: the step had not begun, as no batch came: see `Together.all_stuck`. None: it may have.

        Raises:
            DivergedError: this rank has diverged, and waits for others that may be gone.
        """
        stop = self.watch.stop
        if self.halt.done:
            return None
        if stop is not None and where is not None and is_dead_worker(error):
            if self._shared is not None and not self._shared.stop_stuck(stop, where):
                return None
            self._log.warning("%s: no batch came: %s", stop.notice.who, error)
            return stop
        if self._shared is not None and (own := self._divergence) is not None:
            raise self._diverging.cut_off(own, error) from error
        return None

    # ---- losses

    def vetoed(self, *, due: bool) -> bool:
        """Whether the losses speak against a snapshot now; `due`: one would be taken.

        Raises:
            DivergedError: this process, which is alone, has diverged.
        """
        vetoed = self.losses is not None and self.losses.veto(due=due)
        if self._shared is None and (found := self._divergence) is not None:
            raise self._diverging.error(found)
        return vetoed

    def suspicious(self) -> bool:
        """Whether the losses speak against a snapshot now. Never raises for them: something else ends the run."""
        return self.losses is not None and self.losses.veto(due=True)

    def training_over(self, step: int) -> None:
        """Training is complete, before its final snapshot. Once, of all ranks at once.

        Raises:
            DivergedError: the last losses say so, of several ranks those of any of them. Where the run is to stop as
                well, what `Halt.end_of` makes of it.
        """
        if self.losses is None:
            return
        if self._shared is None:
            self.losses.veto(due=True)
        else:
            try:
                self._judge(self._shared, due=True)
            except RanksError as err:
                self._log.error("the other ranks do not learn that this one has diverged: %s", err)
        if (error := self._diverging.at_the_end(self._divergence, step)) is not None:
            raise self.halt.end_of(error)

    def _judge(self, shared: SharedCadence, *, due: bool) -> None:
        if self.losses is not None:
            self.losses.veto(due=due)
        if (found := self._divergence) is not None:
            shared.together.tell(found)

    @property
    def _divergence(self) -> Divergence | None:
        """Training has diverged; of several ranks, on this one."""
        found = None if self.losses is None else self.losses.divergence
        return found if found is None or self._rank is None else replace(found, rank=self._rank)

    # ---- the end

    def failed(self, error: BaseException | None, found: str) -> None:
        """An exception ends the run: wait for what is in flight, and say what is durable.

        Args:
            error: None: the process ends without `close`.
            found: what became of the last step.
        """
        self._engine.wait(self.halt.seconds_left(EXCEPTION_WAIT_SECONDS))
        what = "the process ends without close()" if error is None else type(error).__name__
        self._log.log(
            logging.WARNING if is_failure(error) else logging.INFO, "%s: %s; %s", what, self.watch.run.durable(), found
        )

    def over(self) -> None:
        """Training is over, and this is closed.

        Raises:
            SystemExit, KeyboardInterrupt: a stop came too late for a boundary, and no exception is on its way already;
                what is in flight was waited for within the grace.
        """
        stop = self.watch.stop
        self.halt.complete = sys.exc_info()[0] is None
        if stop is None or self.halt.done or not self.halt.complete:
            return
        self._log.warning("%s: the request came after training had ended", stop.notice.who)
        self._engine.wait(self.halt.seconds_left(END_WAIT_SECONDS))
        raise self.halt.exit_of(stop)


class Losses:
    """Collects what `training_step` returned and lets the guard judge it at boundaries.

    Args:
        on: what counts as divergence.
    """

    def __init__(self, on: On) -> None:
        self._guard = LossGuard(on)
        self.divergence: Divergence | None = None
        """Training has diverged. Nothing is judged any more, and no snapshot may be taken."""
        self._waiting: list[tuple[int, torch.Tensor]] = []

    def add(self, step: int, outputs: Any) -> None:
        """What step `step` returned: a loss, a mapping with one, or nothing to judge."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and self.divergence is None:
            self._waiting.append((step, loss.detach()))

    def veto(self, *, due: bool) -> bool:
        """Whether a snapshot now would be one of a state after a spike, or of a run that has diverged."""
        waits = self._waiting and self._waiting[-1][1].device.type != "cpu"
        if waits and not due and len(self._waiting) < _MOST_WAITING:
            return self.divergence is not None
        waiting, self._waiting = self._waiting, []
        losses = torch.stack([loss.reshape(()).float() for _, loss in waiting]).tolist() if waiting else []
        for (step, _), loss in zip(waiting, losses, strict=True):
            self.divergence = self.divergence or self._guard.judge(step, loss)
        return self.divergence is not None or self._guard.suspicious


def losses_of(config: Config) -> Losses | None:
    """What judges the losses of a run; None: nothing does."""
    on = config.guard if config.rollback is None else config.rollback.on
    return Losses(On(on)) if on != "off" else None


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
        capture: makes the state of the components, whose optimizers' steps are recorded.
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
        capture: Capture,
        log: logging.Logger,
        *,
        ends_with: Callable[[int], BaseException] = SystemExit,
        losses: Losses | None = None,
        rollbacks: Rollbacks | None = None,
    ) -> None:
        self.engine, self.config = engine, engine.config
        self._trainer, self.log = trainer, log
        engine.events = sinks = FanOutSink(engine.events)
        self.cadence = cadence_of(FrequencySettings.of(self.config), SystemClock(), engine)
        self.metrics = RunMetrics(self.cadence, engine.times)
        sinks.add(self.cadence)
        sinks.add(self.metrics)
        self.stopping = Stopping(
            engine, self.cadence, sinks, log, self.metrics.numbers, ends_with, losses=losses, rollbacks=rollbacks
        )
        self.metrics.outlook = self.stopping.watch.outlook
        self.capture = capture
        self._touches = device.type != "cpu" or torch.get_num_threads() < len(os.sched_getaffinity(0))
        """Training leaves a core idle, in which the arena is made ready."""
        self.saved: SaveHandle | None = None
        self._recorder = recorder = engine.record(lambda: capture.parts.optimizers, lambda: capture.parts.modules)
        self.took: Callable[[Any], None] = recorder.took if recorder is not None else lambda _: None
        """Takes each batch that the loop gets of its training loader."""

    def begins(self, ahead: int) -> None:
        """The resumed loop asks for its first batch: see `FlightRecorder.begin`."""
        if self._recorder is not None:
            self._recorder.begin(ahead)

    def resume(self, learned: Mapping[str, Any]) -> None:
        """Go on with what the earlier process had learned about its snapshots."""
        self.cadence.restore(learned, failure=ended_by(self.engine))

    def prepare(self, state: dict[str, Any]) -> None:
        """Make the arena ready in the background, for states like this one."""
        self.engine.prepare(state, lazy=self.capture.is_lazy, touch=self._touches)
        self.cadence.announce(self.engine.slots.snapshot_bytes)

    def boundary(self, step: int, here: Here) -> None:
        """Step `step` is complete, and the next batch is about to be asked for.

        Raises:
            DivergedError: as `Stopping.boundary` and `Stopping.vetoed`.
            SystemExit, KeyboardInterrupt: a request to stop, or what the adapter ends its runs with.
            SnapshotFailedError: as `Engine.poll`.
        """
        self.engine.poll()
        if self._recorder is not None:
            self._recorder.boundary(step)
        if not self._touches:
            self.cadence.background(self.engine.slots.touched_seconds)
        stop = self.stopping.boundary(step)
        if stop is not None and (end := here.end(stop)) is not None:
            raise end
        if self.engine.live is not None:
            self.config = self.stopping.edited(self.config)
        self.engine.begin_step(step + 1)
        reason = self.cadence.boundary(step) or (
            "manual" if self.stopping.watch.save_asked_by and self.stopping.halt.shared is None else None
        )
        vetoed = self.stopping.losses is not None and self.stopping.vetoed(due=reason is not None)
        here.decided(due=reason is not None)
        if reason is not None:
            obstacle = "loss spike" if vetoed else self._obstacle(here, durable=True, cold=reason != INTERVAL)
            if obstacle is None:
                here.take(reason, durable=True)
                return
            self.cadence.skipped(step, obstacle)
        if self.engine.memory and self.cadence.memory_due(step):
            if self._obstacle(here, durable=False) is None:
                here.take(MEMORY, durable=False)
            self.cadence.memory_over(step)

    def _obstacle(self, here: Here, *, durable: bool, cold: bool = False) -> str | None:
        return here.obstacle() or self._unproved or (None if self.engine.ready(durable=durable, cold=cold) else "busy")

    @property
    def _unproved(self) -> str | None:
        """Why nothing may be saved before the repeated steps were compared."""
        return "replay: stop" if self._recorder is not None and self._recorder.proof.holds_back else None

    def take(self, instant: RunInstant, reason: str, *, durable: bool = True) -> SaveHandle | None:
        """A snapshot; None: there is none, and that was said.

        Args:
            instant: what to save.
            reason: why; stored.
            durable: False: into memory only.

        Raises:
            LeaseHeldError: another process writes this run.
            StorageError, WriterError: with `on_error: raise`, as `Checkpointer.save`.
            StateError: the same, and if it is the first one: then it is for the user to mend now.
        """
        step, began = instant.step, time.perf_counter()
        if (unproved := self._unproved) is not None:
            self.log.warning("no snapshot of step %d: %s, and not all repeated steps are compared", step, unproved)
            self.engine.miss(step, unproved)
            self.cadence.skipped(step, unproved)
            return None
        if self.stopping.vetoed(due=True):
            if durable:
                self.log.error("no snapshot of step %d: its loss is far above the median of the steps before", step)
                self.engine.miss(step, "loss spike")
                self.cadence.skipped(step, "loss spike")
            return None
        try:
            state, notes = instant.state(), {"trainer": self._trainer, **instant.notes()}
            parts = self.capture.parts
            notes |= note_of_adapters(parts.modules, state) if parts.flat is None else {}
            if self._recorder is not None:
                notes[NOTE] = self._recorder.note
            self.engine.times.waited("stall", time.perf_counter() - began)
            handle = self.engine.save(
                state,
                step=step,
                metrics=instant.metrics,
                epoch=instant.epoch,
                reason=reason,
                lazy=self.capture.is_lazy,
                notes=notes,
                durable=durable,
            )
        except (StorageError, WriterError, StateError) as err:
            wrong = isinstance(err, StateError) and self.stopping.halt.metrics is None
            if wrong or isinstance(err, LeaseHeldError) or self.config.on_error == "raise":
                raise
            self.log.error("no snapshot of step %d: %s", step, err)
            self.engine.newest.note_wanted(step, None, err)
            self.cadence.skipped(step, "error")
            return None
        stall = time.perf_counter() - began
        if handle.skipped is not None:
            if durable:
                self.cadence.skipped(step, "busy")
            return None
        self.stopping.halt.metrics = {*(self.stopping.halt.metrics or ()), *instant.metrics}
        self.metrics.stall_seconds = stall
        if durable:
            self.cadence.taken(step, stall)
            self.stopping.watch.save_asked_by, self.saved = None, handle
        else:
            self.cadence.held(step, stall)
        return handle

    def take_at_end(self, instant: RunInstant, reason: str) -> None:
        """The final snapshot, for which there is time; weights may change when this returns."""
        if self._recorder is not None:
            self._recorder.boundary(instant.step)
        if not self.engine.ready() and not self.engine.wait(self.stopping.halt.seconds_left(END_WAIT_SECONDS)):
            late = WaitTimeoutError("the final state was not saved: earlier snapshots are still being written")
            self.log.error("%s", late.message)
            self.engine.newest.note_wanted(instant.step, None, late)
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
            self.metrics.stall_seconds += seconds
