"""Everything that watches a run beside its snapshots: requests to stop, losses, weights, and what is logged.

Why a `fit` ends before its time, looked for at every boundary: somebody stops it, or its losses diverge.

The losses of a Lightning run on their way to the guard, without making a device wait at every step.

What snapshots cost, as numbers for the trainer's loggers and its progress bar.

The end of a run: who stopped it, and what callbacks did to the weights when it was over.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback, EarlyStopping, StochasticWeightAveraging

from ckpt_engine.config import Config
from ckpt_engine.config.live import LiveFile
from ckpt_engine.data.torch_private import is_dead_worker
from ckpt_engine.errors import RanksError
from ckpt_engine.frequency.cadence import Cadence
from ckpt_engine.loop.diverging import Diverging
from ckpt_engine.loop.rank_decisions import SharedCadence, Take
from ckpt_engine.loop.stopping import Edits, Halt
from ckpt_engine.observe.events import Clock, Event, SnapshotStaged
from ckpt_engine.observe.log import FanOutSink
from ckpt_engine.observe.metrics import RunMetrics
from ckpt_engine.preempt.divergence import Divergence, LossGuard, On, StaleWatch
from ckpt_engine.preempt.stop_plan import Board
from ckpt_engine.preempt.stop_requests import Stop
from ckpt_engine.preempt.watch import open_watch
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.restore.load import Loaded
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.open import open_storage
from lightning_ckpt.compat import callbacks_of


class Endings:
    """Training thread only.

    One process that has diverged ends at once. One of several ranks takes part in no snapshot from then on, tells the
    others, and ends with all of them: alone it would leave them in a collective.

    Args:
        watches: hear of stops, and judge losses.
        halt: stops the run.
        diverging: makes the error of a run that has diverged.
        take: takes a last snapshot.
    """

    def __init__(self, watches: Watches, halt: Halt, diverging: Diverging, take: Take) -> None:
        self._watches = watches
        self._halt = halt
        self._shared = halt.shared
        self._diverging = diverging
        self._take = take
        self._judged_the_end = False

    def boundary(self, step: int, *, asked: bool) -> None:
        """Step `step` is complete, and nothing was decided yet of what comes after it.

        Args:
            asked: somebody wants a snapshot.

        Raises:
            SIGTERMException, KeyboardInterrupt: a stop.
            DivergedError: all ranks end here. Where they are stopped as well they end for that: see `Halt.end_of`.
        """
        stop = self._watches.boundary(step)
        if self._shared is None:
            if stop is not None:
                raise self._halt.now(stop, self._take)
            return
        try:
            stop = self._shared.stop(step, stop, asked=asked, fits=self._halt.fits)
            if stop is None and self._shared.diverged is None:
                self._judge(self._shared, due=self._shared.due)
        except RanksError as err:
            if (own := self._watches.divergence) is not None:
                raise self._diverging.cut_off(own, err) from err
            raise
        if self._shared.diverged is not None:
            raise self._halt.end_of(self._diverging.together(self._shared.diverged, self._watches.divergence))
        if stop is not None:
            raise self._halt.together(stop, self._take)

    def vetoed(self, *, due: bool) -> bool:
        """Whether the losses speak against a snapshot now; `due`: one would be taken.

        Raises:
            DivergedError: this process, which is alone, has diverged.
        """
        vetoed = self._watches.vetoed(due=due)
        if self._shared is None and (found := self._watches.divergence) is not None:
            raise self._diverging.error(found)
        return vetoed

    def no_batch(self, error: Exception, where: str | None) -> None:
        """A step has failed.

        Args:
            where: it had not begun, as no batch came: see `Together.all_stuck`. None: it may have.

        Raises:
            SIGTERMException, KeyboardInterrupt: a stop has ended the loader's workers too, and takes effect here.
            DivergedError: this rank has diverged, and waits for others that may be gone.
        """
        stop = self._watches.preemption.stop
        if self._halt.done:
            return
        if stop is not None and where is not None and is_dead_worker(error):
            if self._shared is not None and not self._shared.stop_stuck(stop, where):
                return
            _log.warning("%s: no batch came: %s", stop.notice.who, error)
            end = self._halt.now if self._shared is None else self._halt.together
            raise end(stop, self._take) from error
        if self._shared is not None and (own := self._watches.divergence) is not None:
            raise self._diverging.cut_off(own, error) from error

    def training_over(self, step: int) -> None:
        """Training has come to its end by itself, before its final snapshot. Of all ranks at once; idempotent.

        Raises:
            DivergedError: the last losses say so, of several ranks those of any of them.
            SIGTERMException, KeyboardInterrupt: and somebody stops the run.
        """
        if self._judged_the_end or not self._watches.guards:
            return
        self._judged_the_end = True
        if self._shared is None:
            self._watches.vetoed(due=True)
        else:
            try:
                self._judge(self._shared, due=True)
            except RanksError as err:
                _log.error("the other ranks do not learn that this one has diverged: %s", err)
        error = self._diverging.at_the_end(self._watches.divergence, step)
        if error is not None:
            raise self._halt.end_of(error)

    def _judge(self, shared: SharedCadence, *, due: bool) -> None:
        self._watches.vetoed(due=due)
        if (found := self._watches.divergence) is not None:
            shared.tell(found)


_log = logging.getLogger("lightning_ckpt")


class Watches:
    """From `start` to `close`, on the training thread.

    Args:
        config: options.
        clock: the source of moments.
        sinks: gets this run's events and takes those of the watches.
        telemetry: the numbers for the status page.
        cadence: is retuned when options change.
        live: the file that `config` came from.
        ranks: who trains together; None: this process alone.
    """

    def __init__(
        self,
        config: Config,
        clock: Clock,
        sinks: FanOutSink,
        telemetry: Telemetry,
        cadence: Cadence,
        live: LiveFile | None,
        ranks: Ranks | None,
    ) -> None:
        self._config = config
        self._sinks = sinks
        self._rank = None if ranks is None else ranks.rank
        self._ledger, self.preemption = open_watch(config, clock, ranks)
        self._board = Board(config.status, self.preemption.outlook, telemetry.plain_numbers)
        on = config.guard if config.rollback is None else config.rollback.on
        self._losses = Losses(On(on)) if on != "off" else None
        self._stale: StaleWatch | None = None
        self.edits = Edits(live, cadence, self.preemption, _log)
        sinks.add(self._ledger)
        sinks.add(self.preemption)

    def start(self, step: int, module: pl.LightningModule, loaded: Loaded | None) -> None:
        """Training of `module` starts at `step`, with what was loaded."""
        if loaded is not None:
            self._ledger.resumed(loaded.info.step, loaded.place)
        nearest = self._config.tiers[0]
        trained = [f"state_dict/{name}" for name, one in module.named_parameters() if one.requires_grad]
        self._stale = StaleWatch(trained, Repository(open_storage(nearest.url, nearest.for_storage())).read)
        self._sinks.add(self._stale)
        self.preemption.boundary(step)
        self.preemption.start()
        self._board.start()
        self.edits.start()

    def close(self) -> None:
        """Put signal handlers back, end all threads. Idempotent."""
        self.preemption.close()
        self._board.close()
        self.edits.close()

    def batch_ended(self, step: int, outputs: Any) -> None:
        """What `training_step` returned."""
        if self._losses is not None:
            self._losses.add(step, outputs)

    def boundary(self, step: int) -> Stop | None:
        """Step `step` is complete; the stop, if the run is to stop here."""
        if self._stale is not None and (stale := self._stale.take()) is not None:
            self._sinks.emit(stale)
        self.preemption.boundary(step)
        return self.preemption.stop

    @property
    def guards(self) -> bool:
        """Whether somebody judges the losses."""
        return self._losses is not None

    def vetoed(self, *, due: bool) -> bool:
        """Whether the losses so far speak against a snapshot now; `due`: one would be taken."""
        return self._losses is not None and self._losses.veto(due=due)

    @property
    def divergence(self) -> Divergence | None:
        """What `vetoed` has found: training has diverged; of several ranks, on this one."""
        found = None if self._losses is None else self._losses.divergence
        return found if found is None or self._rank is None else replace(found, rank=self._rank)


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


BAR_NAMES = frozenset({"ckpt_stall_ms", "ckpt_every", "ckpt_MB", "ckpt_age_s"})
"""Entries of the progress bar that are ours; they are no part of a snapshot."""


class Telemetry:
    """Keeps the newest numbers of one run; an event sink, used on the training thread only.

    Args:
        cadence: where the interval, the overhead and the age of the last durable snapshot come from.
    """

    def __init__(self, cadence: Cadence) -> None:
        self._cadence = cadence
        self._metrics = RunMetrics(cadence)
        self._nbytes = 0
        self._stall_seconds = 0.0

    def emit(self, event: Event) -> None:
        self._metrics.emit(event)
        if isinstance(event, SnapshotStaged):
            self._nbytes = event.nbytes

    def took(self, stall_seconds: float) -> None:
        """A snapshot blocked training for so long; the fence comes on top."""
        self._stall_seconds = stall_seconds

    def fenced(self, seconds: float) -> None:
        """The newest snapshot's fence blocked training for so long."""
        self._stall_seconds += seconds

    def plain_numbers(self) -> dict[str, float]:
        """Everything known. Any thread: each number is right, all of them together may be of two moments."""
        return self._metrics.numbers() | {
            "stall_seconds": self._stall_seconds,
            "snapshot_bytes": float(self._nbytes),
        }

    def numbers(self) -> dict[str, float]:
        """Everything known, by logger name."""
        return {f"ckpt/{name}": value for name, value in self.plain_numbers().items()}

    def log(self, trainer: pl.Trainer, step: int) -> None:
        """Send everything known to every logger of the trainer.

        Args:
            step: on the loggers' own axis.
        """
        numbers = self.numbers()
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=step)

    def show(self, bar: dict[str, Any]) -> None:
        """Put the four numbers that people watch into the progress bar's table."""
        if not self._nbytes:
            return
        bar["ckpt_stall_ms"] = round(1e3 * self._stall_seconds, 1)
        bar["ckpt_MB"] = round(self._nbytes / 1e6, 1)
        if (interval := self._cadence.interval_steps) is not None:
            bar["ckpt_every"] = float(interval)
        if self._metrics.committed:
            bar["ckpt_age_s"] = float(round(self._cadence.age_of_last_durable()))

    def hide(self, bar: dict[str, Any]) -> None:
        """Take them out again: after training the table is the user's alone."""
        for name in BAR_NAMES:
            bar.pop(name, None)


class StopWatch:
    """Tells a stop by `EarlyStopping`, which is part of a run, from all other reasons to set `trainer.should_stop`.

    Args:
        trainer: that is watched. `before` is called ahead of the callbacks that may stop it, `after` behind them.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._stopped = False
        self._epoch = 0
        self.by_early_stopping = False

    def before(self) -> None:
        self._stopped, self._epoch = bool(self._trainer.should_stop), self._trainer.current_epoch

    def after(self) -> None:
        if self._trainer.should_stop and not self._stopped:
            self.by_early_stopping |= any(
                callback.stopped_epoch == self._epoch
                for callback in callbacks_of(self._trainer)
                if isinstance(callback, EarlyStopping)
            )


def finish_again(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """A rerun of a finished run trains nothing: let averaging callbacks put their weights in place once more.

    The final snapshot is from before they did, because a longer run goes on from there.
    """
    for callback in callbacks_of(trainer):
        if _replaces_weights(callback, module):
            callback.on_train_end(trainer, module)


def _replaces_weights(callback: Callback, module: pl.LightningModule) -> bool:
    averaging = getattr(callbacks, "WeightAveraging", None)  # Lightning 2.5.5 and later
    if averaging is not None and isinstance(callback, averaging):
        return True
    # With batch norm it replaced them one epoch before the end, and its hook only undoes counters it never raised here.
    return isinstance(callback, StochasticWeightAveraging) and not callback.pl_module_contains_batch_norm(module)
