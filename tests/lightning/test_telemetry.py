"""Numbers about snapshots reach the loggers and the progress bar, and nothing else of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from ckpt_engine.observe.run_times import RunSpent
from tests.lightning.runs import Case, every_batch, fit


class ReadsBar(Callback):
    """Remembers what a progress bar would show."""

    def __init__(self) -> None:
        self.shown: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.shown.append(dict(trainer.progress_bar_metrics))


SIX = {
    "ckpt/overhead_percent",
    "ckpt/interval_steps",
    "ckpt/age_of_last_durable_seconds",
    "ckpt/work_at_risk_seconds",
    "ckpt/failed",
    "ckpt/goodput_percent",
}


def test_loggers_get_six_numbers(tmp_path: Path) -> None:
    """On the trainer's own step axis, as often as the trainer logs."""
    outcome = fit(Case(trainer={"log_every_n_steps": 3}), every_batch(tmp_path))
    assert [step for step, _ in outcome.logger.ours] == [2, 5, 8, 11, 14, 17]
    last = outcome.logger.ours[-1][1]
    assert last.keys() == SIX
    assert last["ckpt/interval_steps"] == 1
    assert last["ckpt/failed"] == 0
    assert last["ckpt/work_at_risk_seconds"] >= 0.0
    assert 0.0 <= last["ckpt/goodput_percent"] <= 100.0


def test_loggers_get_all_numbers_if_the_options_ask(tmp_path: Path) -> None:
    """With `log: {loggers: full}`, whenever the six are."""
    outcome = fit(Case(trainer={"log_every_n_steps": 3}), every_batch(tmp_path, log={"loggers": "full"}))
    steps = [step for step, _ in outcome.logger.ours]
    assert steps == [2, 5, 8, 11, 14, 17]
    last = outcome.logger.ours[-1][1]
    assert last.keys() == SIX | {
        "ckpt/step",
        "ckpt/durable_step",
        "ckpt/work_at_risk_steps",
        "ckpt/seconds_to_durable",
        "ckpt/snapshots_in_flight",
        "ckpt/stall_seconds",
        "ckpt/latency_seconds",
        "ckpt/snapshot_bytes",
        "ckpt/written_bytes",
        "ckpt/committed",
        "ckpt/skipped",
        "ckpt/idle_percent",
        *(f"ckpt/run_{name}_seconds" for name in (*RunSpent().parts, "slowdown_error")),
    }
    assert last["ckpt/committed"] >= 10
    assert last["ckpt/snapshot_bytes"] > 1000
    assert last["ckpt/run_stall_seconds"] > 0.0
    assert last["ckpt/idle_percent"] == 0.0  # it is alone


def test_loggers_can_be_left_alone(tmp_path: Path) -> None:
    """With `log: {loggers: off}` nothing is sent to the loggers."""
    assert fit(Case(trainer={"log_every_n_steps": 3}), every_batch(tmp_path, log={"loggers": "off"})).logger.ours == []


FULL = {"ckpt", "ckpt_stall_ms", "ckpt_every", "ckpt_MB", "ckpt_age_s"}


@pytest.mark.cells(1)
@pytest.mark.parametrize(("bar", "names"), [("off", set()), (None, {"ckpt"}), ("full", FULL)])
def test_the_progress_bar_shows_what_the_options_ask(bar: str | None, names: set[str], tmp_path: Path) -> None:
    """One short entry by default, from which step a restart would go on: a bar of 80 columns has room for it."""
    shown = ReadsBar()
    fit(Case(), [*every_batch(tmp_path, log=None if bar is None else {"bar": bar}), shown])
    ours = {name: value for name, value in shown.shown[-1].items() if name.startswith("ckpt")}
    assert ours.keys() == names
    assert bar == "off" or 10 < int(ours["ckpt"]) <= 17


def test_entries_of_the_progress_bar_are_no_metrics(tmp_path: Path) -> None:
    """Callbacks and checkpoints do not see them, and they are gone after training."""
    outcome = fit(Case(), every_batch(tmp_path, log={"bar": "full"}))
    assert not [name for name in outcome.trainer.progress_bar_metrics if name.startswith("ckpt")]
    assert not [name for name in outcome.trainer.callback_metrics if name.startswith("ckpt")]
    assert not [name for name in outcome.trainer.logged_metrics if name.startswith("ckpt")]
