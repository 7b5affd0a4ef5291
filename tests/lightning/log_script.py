"""Trains with loggers in processes that can be killed, and reads back what they logged.

`python -m tests.lightning.log_script` serves jobs.
"""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lightning_ckpt import AdaptiveCheckpoint
from tests.lightning.runs import Case, Model, make_trainer, seed_everything, train
from tests.support.curves import Curve, read_events
from tests.support.trainers import TraceFile, serve

CASE = Case(val=3, schedule=("decay", "step", ""))


class Pace(Callback):
    """Makes batches take some time, so that there are moments to be killed at."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_before_backward(self, *args: Any) -> None:
        time.sleep(self.seconds)


class Parametrised(Model):
    """Has hyper-parameters, which Lightning logs at every start."""

    def __init__(self, case: Case, trace: list[Any], width: int = 8) -> None:
        super().__init__(case, trace)
        self.save_hyperparameters("width")


def logger_of(kind: str, folder: str, version: Any) -> Any:
    """A logger as a user makes it, again at every start."""
    if kind == "csv":
        return CSVLogger(folder, version=version, flush_logs_every_n_steps=7)
    if kind == "tensorboard":
        return TensorBoardLogger(folder, version=version)
    if kind == "wandb":
        return WandbLogger(save_dir=folder, offline=True)
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # MLflow 3 asks for it
    return MLFlowLogger("curves", save_dir=folder)


def run(job: dict[str, Any]) -> None:
    """One training process."""
    torch.set_num_threads(1)
    seed_everything(job["seed"])
    logger = logger_of(job["kind"], job["folder"], job.get("version"))
    trace = TraceFile(job["trace"])
    callbacks: list[Any] = [LearningRateMonitor(), *([Pace(job["pace"])] if job["pace"] else [])]
    if job["root"] is not None:
        callbacks.append(AdaptiveCheckpoint(job["root"], **{"every_n_steps": 2, **job.get("options", {})}))
    model = Parametrised(CASE, trace)
    trainer = make_trainer(CASE, callbacks, logger, max_epochs=job.get("epochs", 3), log_every_n_steps=1)
    train(trainer, model, CASE, "auto" if job["root"] is not None else None)
    trace.append(("digest", logger.version))


# ---- reading


def read_csv(folder: Path) -> Curve:
    """The points of the one table."""
    (table,) = folder.rglob("metrics.csv")
    with table.open(newline="") as file:
        return [
            (tag, int(row["step"]), value)
            for row in csv.DictReader(file)
            for tag, value in sorted(row.items())
            if value and tag != "step" and not tag.startswith("ckpt/")
        ]


def read_mlflow(folder: Path) -> Curve:
    """The points of the one run."""
    (metrics,) = folder.rglob("metrics")
    return [
        (path.relative_to(metrics).as_posix(), int(step), value)
        for path in sorted(metrics.rglob("*"))
        if path.is_file() and "ckpt" not in path.relative_to(metrics).parts
        for _, value, step in (line.split()[:3] for line in path.read_text().splitlines())
    ]


READERS: dict[str, Callable[[Path], Curve]] = {"csv": read_csv, "tensorboard": read_events, "mlflow": read_mlflow}


if __name__ == "__main__":
    serve(run)
