"""Metrics that are attributes of a LightningModule are bitwise after a resume in the middle of an epoch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torchmetrics.wrappers import MetricTracker

from lightning_ckpt import AdaptiveCheckpoint
from tests.loop.test_metrics import BATCHES, CLASSES, EPOCHS, METRICS, QUICK, KilledError, data, feed, values
from tests.support.digests import seed_everything


class Net(pl.LightningModule):
    """Writes down what its metric computes after each step."""

    def __init__(self, metric: Any, rows: list[Any], kill: int | None) -> None:
        super().__init__()
        self.layer, self.metric, self.kill = nn.Linear(6, CLASSES), metric, kill
        self.write = rows.append  # of a list that is no attribute: what this process alone does
        self.count = partial(len, rows)

    def on_train_epoch_start(self) -> None:
        if isinstance(self.metric, MetricTracker):
            self.metric.increment()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.count() == self.kill:
            raise KilledError
        out = self.layer(batch[0])
        feed(self.metric, out.detach().softmax(1), batch[1])
        self.write([self.global_step, values(out.detach()), values(self.metric.compute())])
        return nn.functional.cross_entropy(out, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    folder: Path,
    make: Callable[[], Any],
    seed: int,
    kill: int | None,
    kind: Callable[[Any, list[Any], int | None], pl.LightningModule] = Net,
    strategy: Any = "auto",
) -> list[Any]:
    """One process."""
    seed_everything(seed)
    rows: list[Any] = []
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        callbacks=[AdaptiveCheckpoint(folder, every_n_steps=1, writer="thread")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        strategy=strategy,
        use_distributed_sampler=False,
    )
    with contextlib.suppress(KilledError):
        trainer.fit(kind(make(), rows, kill), data(), ckpt_path="auto")
    return rows


@pytest.mark.cells(1)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in METRICS]
)
def test_a_metric_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    """Three processes, killed in the middle of an epoch, with other seeds: all values as in one."""
    whole = fit(tmp_path / "whole", METRICS[name], 1, None)
    assert len(whole) == EPOCHS * BATCHES
    for seed, kill in ((1, 3), (7, 4), (9, None)):
        rows = fit(tmp_path / "parts", METRICS[name], seed, kill)
        first = rows[0][0]
        assert (first > 0) == (seed > 1)
        assert rows == whole[first : first + len(rows)]
    report = json.loads((tmp_path / "parts" / "resume-report.json").read_text())
    assert report["not_restored"] == []


class Reducing(SingleDeviceStrategy):
    """`self.log` takes it for one of several processes."""

    is_distributed = True


class Logging(Net):
    """Logs its loss, to be reduced where there are several processes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.count() == self.kill:
            raise KilledError
        loss = nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        self.write(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("reduced", [True, False])
def test_a_mean_to_be_reduced_goes_on_with_another_number_of_processes(reduced: bool, tmp_path: Path) -> None:
    """One process has the mean of several; of what one has logged it is not known whether several reduce it."""
    kinds = [Reducing("cpu"), SingleDeviceStrategy("cpu")]
    first, second = kinds if reduced else kinds[::-1]
    fit(tmp_path, lambda: None, 1, 3, kind=Logging, strategy=first)
    assert fit(tmp_path, lambda: None, 1, None, kind=Logging, strategy=second)
    report = json.loads((tmp_path / "resume-report.json").read_text())
    assert [one["name"] for one in report["not_restored"]] == ([] if reduced else ["running value of 'loss'"])
