"""The same training inside a Lightning Trainer, timed from the start of training until every file is written."""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measure import children_seconds
from benchmarks.workloads import SEED, perceptron


class Module(pl.LightningModule):
    """A perceptron classifier with Adam."""

    def __init__(self, parameters: int, inputs: int) -> None:
        super().__init__()
        self.net = perceptron(parameters, inputs=inputs)
        # Learned by heart without it: the gradients become subnormal numbers, and a step takes three times as long.
        self._loss = nn.CrossEntropyLoss(label_smoothing=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, labels = batch
        loss: torch.Tensor = self._loss(self.net(inputs), labels)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4, fused=True)


class Stopwatch(pl.Callback):
    """Notes when training starts and when its last step is done. MUST be the first callback."""

    def __init__(self) -> None:
        self.started = self.ended = self.helper_seconds = 0.0
        self.starts: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.started = time.perf_counter()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self.starts:
            self.helper_seconds = -children_seconds()
        self.starts.append(time.perf_counter())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.ended = time.perf_counter()
        self.helper_seconds += children_seconds()


def seeded_data(count: int, inputs: int) -> TensorDataset:
    """Random inputs and labels."""
    generator = torch.Generator().manual_seed(SEED)
    return TensorDataset(
        torch.randn(count, inputs, generator=generator), torch.randint(10, (count,), generator=generator)
    )


class Fit:
    """One fit, ready to run.

    Args:
        root: where the Trainer may write.
    """

    def __init__(
        self,
        root: str,
        module: pl.LightningModule,
        data: TensorDataset,
        batch_size: int,
        steps: int,
        *,
        callbacks: Sequence[pl.Callback] = (),
        plugins: Sequence[Any] = (),
    ) -> None:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        self._module = module
        self._stopwatch = Stopwatch()
        self._loader = DataLoader(data, batch_size, shuffle=True, drop_last=True)
        self._trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=-1,
            max_steps=steps,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks),
            default_root_dir=root,
            callbacks=[self._stopwatch, *callbacks],
            plugins=list(plugins),
        )

    def run(self) -> None:
        """Train."""
        self._trainer.fit(self._module, self._loader)
        self._returned = time.perf_counter()

    @property
    def starting_seconds(self) -> float:
        """From the start of training to its first step."""
        return self._stopwatch.starts[0] - self._stopwatch.started

    @property
    def training_seconds(self) -> float:
        """From the start of the first step to the end of the last."""
        return self._stopwatch.ended - self._stopwatch.starts[0]

    @property
    def moments(self) -> tuple[float, ...]:
        """When each step began, and when the last one ended."""
        return (*self._stopwatch.starts, self._stopwatch.ended)

    @property
    def helper_seconds(self) -> float:
        """Processor time of other processes of this one from the first step to the end of the last."""
        return self._stopwatch.helper_seconds

    @property
    def share_beyond_typical_steps(self) -> float:
        """What the run took beyond its steps at their median length; drift from run to run has no part in it."""
        moments = self.moments
        steps = [b - a for a, b in itertools.pairwise(moments)]
        return self.training_seconds / (len(steps) * statistics.median(steps)) - 1

    @property
    def seconds_until_written(self) -> float:
        """From the start of training until `fit` returned, when every file is written."""
        return self._returned - self._stopwatch.started
