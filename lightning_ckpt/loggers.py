"""What a `fit` shows of its snapshots in loggers and in the progress bar, and how its loggers go on after a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only

from ckpt_engine.adapter import Config, Curves, NotRestored, TrainerResume, TrainerRun
from lightning_ckpt.compat import LightningInternals
from lightning_ckpt.compat_data import curves_of
from lightning_ckpt.restart import AUTO
from lightning_ckpt.run_state import BAR_NAMES


def show_numbers(run: TrainerRun, trainer: pl.Trainer, internals: LightningInternals) -> None:
    """The progress bar shows the newest numbers of a run, and loggers get them when they get all others."""
    if run.metrics.snapshot_bytes:
        _show_in(internals.metric_tables["progress_bar"], run)
    if trainer.loggers and internals.logs_now and run.config.log.loggers != "off":
        numbers = run.metrics.logged(run.config.log.loggers)
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=internals.batches_that_stepped)


def _show_in(bar: dict[str, Any], run: TrainerRun) -> None:
    """Put the step of the newest durable snapshot into the progress bar's table, and what else the options ask."""
    metrics, durable, interval = run.metrics, run.metrics.durable_step, run.cadence.interval_steps
    # Of a number the bar shows but three digits.
    shown: dict[str, Any] = {"ckpt": None if durable is None else str(durable)}
    if run.config.log.bar == "full" and metrics.snapshot_bytes:
        shown |= {
            "ckpt_stall_ms": round(1e3 * metrics.stall_seconds, 1),
            "ckpt_MB": round(metrics.snapshot_bytes / 1e6, 1),
            "ckpt_every": None if interval is None else float(interval),
            "ckpt_age_s": None if durable is None else float(round(run.cadence.age_of_last_durable())),
        }
    if run.config.log.bar != "off":
        bar.update({name: value for name, value in shown.items() if value is not None})


def hide_numbers(bar: dict[str, Any]) -> None:
    """Take them out of the progress bar's table again: after training it is the user's alone."""
    for name in BAR_NAMES:
        bar.pop(name, None)


_LOGS = ("log_metrics", "log_hyperparams", "log_graph")


class FitLoggers:
    """The loggers of one `fit`: a run that is resumed has one curve in each, and every step once.

    Args:
        trainer: that is about to begin; it has not opened its loggers yet.
        config: options.
    """

    def __init__(self, trainer: pl.Trainer, config: Config) -> None:
        self._loggers = list(trainer.loggers)
        self._config = config
        self._notes: Mapping[str, Any] | None = None
        writes = rank_zero_only.rank == 0 and not trainer.fast_dev_run  # type: ignore[attr-defined]
        self._curves = Curves(config.root_url, curves_of(self._loggers) if writes else [])

    def begin(self, path: Any) -> None:
        """Before Lightning opens them: a version folder is chosen then, and an old table deleted.

        Args:
            path: the argument `ckpt_path`.
        """
        resume = self._config.resume_word
        resumes = resume != "off" and (path == AUTO or (path is None and resume == AUTO))
        if self._curves:
            self._curves.begin(TrainerResume.newest_notes(self._config) if resumes else {})

    def note(self) -> dict[str, Any]:
        """For the notes of a snapshot."""
        return self._curves.note()

    def wait(self, notes: Mapping[str, Any]) -> None:
        """The run goes on from a snapshot with these notes: what the start logs once more is not logged."""
        self._notes = notes
        for logger in self._loggers if self._curves.continues(notes) else ():
            for name in _LOGS:
                setattr(logger, name, _log_nothing)

    def go_on(self, forked_from: str) -> list[NotRestored]:
        """The first batch is about to be asked for: steps from here on are logged; what stays of them from before.

        Args:
            forked_from: the snapshot that the run began with, if it is a fork.
        """
        notes, self._notes = self._notes, None
        if notes is None:
            return []
        for logger in self._loggers:
            for name in _LOGS:
                vars(logger).pop(name, None)
            if forked_from and not self._curves.continues(notes):
                logger.log_hyperparams({"forked_from": forked_from})
        return self._curves.cut(notes)


def _log_nothing(*_: Any, **__: Any) -> None:
    """The first start of the run has logged it."""
