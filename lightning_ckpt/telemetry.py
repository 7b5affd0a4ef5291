"""What snapshots cost, as numbers for the trainer's loggers and its progress bar."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from ckpt_engine.frequency.driver import Cadence
from ckpt_engine.observe.events import Event, SnapshotStaged
from ckpt_engine.observe.metrics import RunMetrics

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
