"""Numbers about snapshots reach the loggers and the progress bar, and nothing else of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from tests.lightning.runs import Case, every_batch, fit


class ReadsBar(Callback):
    """Remembers what a progress bar would show."""

    def __init__(self) -> None:
        self.shown: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.shown.append(dict(trainer.progress_bar_metrics))


def test_loggers_get_stall_interval_bytes_and_age(tmp_path: Path) -> None:
    """On the trainer's own step axis, as often as the trainer logs."""
    outcome = fit(Case(trainer={"log_every_n_steps": 3}), every_batch(tmp_path))
    steps = [step for step, _ in outcome.logger.ours]
    assert steps == [2, 5, 8, 11, 14, 17]
    last = outcome.logger.ours[-1][1]
    assert last.keys() == {
        "ckpt/stall_seconds",
        "ckpt/latency_seconds",
        "ckpt/snapshot_bytes",
        "ckpt/written_bytes",
        "ckpt/committed",
        "ckpt/skipped",
        "ckpt/failed",
        "ckpt/interval_steps",
        "ckpt/overhead_percent",
        "ckpt/goodput_percent",
        "ckpt/age_of_last_durable_seconds",
    }
    assert last["ckpt/interval_steps"] == 1
    assert last["ckpt/committed"] >= 10
    assert last["ckpt/snapshot_bytes"] > 1000
    assert last["ckpt/failed"] == 0
    assert 0.0 <= last["ckpt/goodput_percent"] <= 100.0


def test_the_progress_bar_shows_four_numbers(tmp_path: Path) -> None:
    """They are not metrics of the run: callbacks and checkpoints do not see them, and they are gone after training."""
    bar = ReadsBar()
    outcome = fit(Case(), [*every_batch(tmp_path), bar])
    ours = {name for name in bar.shown[-1] if name.startswith("ckpt_")}
    assert ours == {"ckpt_stall_ms", "ckpt_every", "ckpt_MB", "ckpt_age_s"}
    assert not [name for name in outcome.trainer.progress_bar_metrics if name.startswith("ckpt")]
    assert not [name for name in outcome.trainer.callback_metrics if name.startswith("ckpt")]
    assert not [name for name in outcome.trainer.logged_metrics if name.startswith("ckpt")]
