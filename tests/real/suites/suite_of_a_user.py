"""A user's test suite, run by `third_party/suite.py`: not one of our tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(folder: Path, **options: Any) -> pl.Trainer:
    shown = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder, **shown, **options)


@pytest.mark.parametrize("callbacks", [None, [], pl.Callback(), [pl.Callback()]])
def test_trains(tmp_path: Path, callbacks: Any) -> None:
    made = trainer(tmp_path, callbacks=callbacks)
    made.fit(Model(), DataLoader(torch.ones(4, 2)))
    assert made.global_step == 4


def test_that_counts_callbacks(tmp_path: Path) -> None:
    names = [type(one).__name__ for one in trainer(tmp_path, enable_checkpointing=False).callbacks]
    assert "AdaptiveCheckpoint" not in names, "there is a callback\nof which this test does not know"


def test_that_fails_anyway() -> None:
    raise ValueError("as ever")


def test_that_is_unsteady(tmp_path: Path) -> None:
    runs = Path(sys.modules[__name__].__file__ or "").with_name("runs")
    number = len(runs.read_text()) if runs.exists() else 0
    runs.write_text("x" * (number + 1))
    assert number == 0


def test_that_skips() -> None:
    pytest.skip("not here")
