"""Records what a run does while it trains, for the comparison afterwards; nothing here is needed for checkpoints."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers.logger import Logger

from demo.record import Start, Step, Validation


class Recorder(pl.Callback):
    """Appends an entry per training step and validation to a file; a killed process loses nothing but its last line.

    Args:
        path: the file; the entries of a restarted process follow those of the killed one.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.write(self._fd, b"\n")
        self._pid = 0
        """Of the process that has begun to train: a flag would be restored with the run's other attributes."""

    def write(self, kind: type[Any], **values: object) -> None:
        """Append one entry; it is in the kernel's hands, hence safe from `kill -9`, on return."""
        entry = {"kind": kind.__name__.lower(), "time": time.time(), "pid": os.getpid(), **values}
        os.write(self._fd, (json.dumps(entry) + "\n").encode())

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self.write(Start, step=trainer.global_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.write(
            Step,
            step=trainer.global_step,
            epoch=trainer.current_epoch,
            batch=batch_idx,
            loss=outputs["loss"].item().hex(),
            lr=float(trainer.optimizers[0].param_groups[0]["lr"]).hex(),
            samples=batch[2].tolist(),
        )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.write(Validation, step=trainer.global_step, loss=float(trainer.callback_metrics["val_loss"]).hex())


class KeepNumbers(Logger):
    """A Lightning logger that keeps the newest value of every number and writes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.newest: dict[str, float] = {}

    @property
    def name(self) -> str:
        return "demo"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.newest.update({name: float(value) for name, value in metrics.items()})

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """There are none."""


class StepTimer(pl.Callback):
    """Times a span of training steps, what happens between them included: wall-clock and this process's CPU time.

    Args:
        skip: steps before the span.
        steps: of the span.
    """

    def __init__(self, skip: int, steps: int) -> None:
        self._first = skip
        self._last = skip + steps - 1
        self.seconds = self.cpu_seconds = math.nan
        self._began = self._cpu_began = math.nan

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self._first:
            self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self._last:
            self.seconds = time.perf_counter() - self._began
            self.cpu_seconds = time.process_time() - self._cpu_began


class FlipOneBit(pl.Callback):
    """Spoils a run: flips the lowest bit of one weight after the given step, once per process.

    Args:
        step: after which optimizer step.
    """

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            weight = next(pl_module.parameters()).detach().view(torch.int32)
            weight[0, 0] ^= 1


def save_final_state(path: Path, trainer: pl.Trainer) -> None:
    """Writes everything the end of a run consists of, for the comparison."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "weights": trainer.lightning_module.state_dict(),
        "optimizer": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "scheduler": [
            {key: value for key, value in config.scheduler.state_dict().items() if key != "lr_lambdas"}
            for config in trainer.lr_scheduler_configs
        ],
        "random": {
            "torch": torch.get_rng_state(),
            "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
            "python": random.getstate(),
        },
        "metrics": dict(trainer.callback_metrics),
    }
    temporary = path.with_suffix(".part")
    torch.save(state, temporary)
    temporary.replace(path)
