"""What others want of a run at its boundaries: a stop, the end of a diverged one, a snapshot now, edited options."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from ckpt_engine.config import Config
from ckpt_engine.config.live import LiveFile, change
from ckpt_engine.config.sections import Status
from ckpt_engine.data.private_names import is_dead_worker
from ckpt_engine.engine import Engine
from ckpt_engine.errors import RanksError
from ckpt_engine.frequency.cadence import Cadence
from ckpt_engine.loop.diverging import Diverging, Rollbacks
from ckpt_engine.loop.halt import EXCEPTION_WAIT_SECONDS, Halt
from ckpt_engine.loop.rank_decisions import SharedCadence, Take, cadence_settings
from ckpt_engine.observe.events import SystemClock
from ckpt_engine.observe.log import FanOutSink
from ckpt_engine.preempt.divergence import Divergence, LossGuard, On, StaleWatch
from ckpt_engine.preempt.stop_plan import Board
from ckpt_engine.preempt.stop_requests import Stop
from ckpt_engine.preempt.watch import PreemptionWatch, open_watch
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.open import open_storage

END_WAIT_SECONDS = 600.0
"""How long the end of a run waits for what is in flight, where nothing stops it."""


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
        rollbacks: where a run that has diverged goes back, if it may.

    Attributes:
        watch: knows of requests to stop, and of what is durable.
        halt: ends the run.
        edits: of the options.
        asked: somebody has asked for a snapshot, and none was taken since; of several ranks rank 0 sees to that.

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
        self._engine, self._sinks, self._log, self._losses = engine, sinks, log, losses
        self._ledger, self.watch = open_watch(engine.config, SystemClock(), engine.ranks, lambda: engine.divided)
        self._rank = None if engine.ranks is None else engine.ranks.rank
        if losses_of(engine.config) is not None and losses is None:
            log.warning("`guard` and `rollback` work with Lightning only; they are ignored here")
        self._board = Board(Status() if self._rank else engine.config.status, self.watch.outlook, numbers)
        self.edits = Edits(engine.live, cadence, self.watch, log)
        self.halt = Halt(self.watch, engine, ends_with, log, cadence)
        self._shared = self.halt.shared
        self._diverging = Diverging(engine, self.watch, self.halt, rollbacks, log)
        self._stale: StaleWatch | None = None
        self.asked = self._asked_all = self._judged_the_end = False
        for sink in (self._ledger, self.watch):
            sinks.add(sink)

    def start(self, step: int, trained: Collection[str] = ()) -> None:
        """The run goes on from `step`: signal handlers and threads start. On the main thread, for signals.

        Args:
            trained: entries of what an optimizer changes: where they stay the same from snapshot to snapshot, that is
                said.
        """
        if (loaded := self._engine.loaded) is not None:
            self._ledger.resumed(loaded.info.step, loaded.place)
        if trained:
            nearest = self._engine.config.tiers[0]
            self._stale = StaleWatch(trained, Repository(open_storage(nearest.url, nearest.for_storage())).read)
            self._sinks.add(self._stale)
        self.watch.boundary(step)
        self.watch.start()
        self._board.start()
        self.edits.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Put signal handlers back, end all threads. Idempotent."""
        atexit.unregister(self.close)
        self.watch.close()
        self._board.close()
        self.edits.close()
        if self._stale is not None:
            self._stale.close()

    # ---- at a boundary

    def boundary(self, step: int) -> Stop | None:
        """Step `step` is complete, and nothing was decided yet of what comes after it; the stop, if there is one.

        Raises:
            DivergedError: all ranks end here. Where they are stopped as well they end for that: see `Halt.end_of`.
        """
        if self._stale is not None and self._stale.found and (stale := self._stale.take()) is not None:
            self._sinks.emit(stale)
        wanted = self.watch.boundary(step)
        if wanted and self.watch.take_save() is not None:
            self.asked, self._asked_all = self._shared is None, self._shared is not None
        if self._shared is None:
            return self.watch.stop if wanted else None
        try:
            stop = self._shared.stop(step, self.watch.stop, asked=self._asked_all, fits=self.halt.fits)
            if stop is None and self._shared.diverged is None:
                self._judge(self._shared, due=self._shared.due)
        except RanksError as err:
            if (own := self._divergence) is not None:
                raise self._diverging.cut_off(own, err) from err
            raise
        if self._shared.diverged is not None:
            raise self.halt.end_of(self._diverging.together(self._shared.diverged, self._divergence))
        return stop

    def taken(self) -> None:
        """A durable snapshot was taken."""
        self.asked = self._asked_all = False

    def end(self, stop: Stop, take: Take) -> BaseException:
        """Do what fits into the grace; what ends the run, or `KeyboardInterrupt` after a Ctrl-C.

        Raises:
            KeyboardInterrupt: another Ctrl-C.
        """
        return self.halt.now(stop, take) if self._shared is None else self.halt.together(stop, take)

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
        vetoed = self._losses is not None and self._losses.veto(due=due)
        if self._shared is None and (found := self._divergence) is not None:
            raise self._diverging.error(found)
        return vetoed

    def suspicious(self) -> bool:
        """Whether the losses speak against a snapshot now. Never raises for them: something else ends the run."""
        return self._losses is not None and self._losses.veto(due=True)

    def training_over(self, step: int) -> None:
        """Training has come to its end by itself, before its final snapshot. Of all ranks at once; idempotent.

        Raises:
            DivergedError: the last losses say so, of several ranks those of any of them. Where the run is to stop as
                well, what `Halt.end_of` makes of it.
        """
        if self._judged_the_end or self._losses is None:
            return
        self._judged_the_end = True
        if self._shared is None:
            self._losses.veto(due=True)
        else:
            try:
                self._judge(self._shared, due=True)
            except RanksError as err:
                self._log.error("the other ranks do not learn that this one has diverged: %s", err)
        error = self._diverging.at_the_end(self._divergence, step)
        if error is not None:
            raise self.halt.end_of(error)

    def _judge(self, shared: SharedCadence, *, due: bool) -> None:
        if self._losses is not None:
            self._losses.veto(due=due)
        if (found := self._divergence) is not None:
            shared.tell(found)

    @property
    def _divergence(self) -> Divergence | None:
        """Training has diverged; of several ranks, on this one."""
        found = None if self._losses is None else self._losses.divergence
        return found if found is None or self._rank is None else replace(found, rank=self._rank)

    # ---- the end

    def failed(self, error: BaseException | None, found: str) -> None:
        """An exception ends the run: wait for what is in flight, and say what is durable.

        Args:
            error: None: the process ends without `close`.
            found: what became of the last step.
        """
        self._engine.wait(self.seconds_left(EXCEPTION_WAIT_SECONDS))
        what = "the process ends without close()" if error is None else type(error).__name__
        self._log.warning("%s: %s; %s", what, self.watch.durable(), found)

    def seconds_left(self, at_most: float) -> float:
        """How long something may be waited for: `at_most`, and not beyond the deadline of a stop."""
        return self.halt.seconds_left(at_most)

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
        self._log.warning("%s: it came when training was over", stop.notice.who)
        self._engine.wait(self.seconds_left(END_WAIT_SECONDS))
        raise self.halt.exit_of(stop)


_MOST_WAITING = 64
"""Losses on a device are fetched when a snapshot is due, or when there are so many."""


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


class Edits:
    """From `start` to `close`, on the training thread.

    Args:
        live: the file that the options came from; None: they came from elsewhere, and nothing ever changes.
        cadence, watch: learn what concerns them.
        log: of the adapter.
    """

    def __init__(self, live: LiveFile | None, cadence: Cadence, watch: PreemptionWatch, log: logging.Logger) -> None:
        self._live = live
        self._cadence = cadence
        self._watch = watch
        self._log = log

    def start(self) -> None:
        """Begin to look at the file."""
        if self._live is not None:
            self._live.start()

    def close(self) -> None:
        """Stop looking. Idempotent."""
        if self._live is not None:
            self._live.close()

    def apply(self, config: Config) -> Config:
        """The options from now on; `config`, those so far, unless the file was edited in a way that changes them."""
        found = None if self._live is None else self._live.take()
        if found is None or self._live is None:
            return config
        if isinstance(found, str):
            self._log.warning("the edited options are not used: %s", found)
            return config
        made = change(config, found)
        if made is None:
            return config
        self._log.warning("%s", made.text(self._live.name))
        self._watch.grace_seconds = made.config.preemption.grace
        if (settings := cadence_settings(made.config)) != cadence_settings(config):
            self._cadence.retune(settings)
        return made.config
