"""What a `fit` shows of its snapshots in loggers and in the progress bar, and what callbacks do at its end."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback, EarlyStopping, StochasticWeightAveraging

from ckpt_engine.frequency.cadence import Cadence
from ckpt_engine.observe.events import Event, SnapshotStaged
from ckpt_engine.observe.metrics import RunMetrics, RunTimes
from lightning_ckpt.compat import LightningInternals, callbacks_of

BAR_NAMES = frozenset({"ckpt_stall_ms", "ckpt_every", "ckpt_MB", "ckpt_age_s"})
"""Entries of the progress bar that are ours; they are no part of a snapshot."""


class Telemetry:
    """Keeps the newest numbers of one run; an event sink, used on the training thread only.

    Args:
        cadence: where the interval, the overhead and the age of the last durable snapshot come from.
        times: where goodput comes from.
    """

    def __init__(self, cadence: Cadence, times: RunTimes) -> None:
        self._cadence = cadence
        self._metrics = RunMetrics(cadence, times)
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

    def batch_ended(self, trainer: pl.Trainer, internals: LightningInternals) -> None:
        """The progress bar shows the newest numbers, and loggers get them when they get all others."""
        self.show(internals.metric_tables["progress_bar"])
        if trainer.loggers and internals.logs_now:
            self.log(trainer, internals.batches_that_stepped)

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
