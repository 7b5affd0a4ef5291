"""A tiny model, its data, and `fit`: trains it while writing down everything an exact resume has to repeat."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ckpt import AdaptiveCheckpoint
from tests.support.digests import digest
from tests.support.digests import seed_everything as seed_everything
from tests.support.snapshots import Saved as Saved
from tests.support.snapshots import only as only
from tests.support.snapshots import saved as saved

BATCHES = 6
BATCH = 4
SAMPLES = BATCHES * BATCH
Entry = tuple[Any, ...]


class Augmented(Dataset[Any]):
    """Samples with noise drawn from all three global random streams."""

    def __init__(self, n: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(n, 6, generator=generator)
        self.y = torch.randn(n, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        x = self.x[i] + 0.1 * torch.randn(6) + 0.1 * float(np.random.rand()) + 0.1 * random.random()
        return x, self.y[i], i


class Stream(IterableDataset[Any]):
    """The same samples without a known length."""

    def __iter__(self) -> Iterator[Any]:
        source = Augmented()
        return (source[i] for i in range(SAMPLES))


class Journal:
    """Writes down what happens in this process alone: of a list that is no attribute, it is no state to put back."""

    def __init__(self, entries: list[Entry]) -> None:
        self.append = entries.append


class Model(pl.LightningModule):
    """Dropout, batch norm, a logged mean and a metric object; everything it sees goes to `trace`."""

    def __init__(self, case: Case, trace: list[Entry]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.mean = torchmetrics.MeanMetric()
        self.case, self.trace = case, Journal(trace)
        self.automatic_optimization = case.manual == ""
        if not case.needs_epoch_start:
            self.scale = 1.0

    def on_train_epoch_start(self) -> None:
        self.scale = 1.0 + 0.1 * self.current_epoch  # training_step fails without this hook

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, _ = _first(batch)
        loss = self.scale * ((self.net(x) - y) ** 2).mean()
        optimizers = self.trainer.optimizers
        lrs = tuple(group["lr"] for optimizer in optimizers for group in optimizer.param_groups)
        self.trace.append(
            ("train", self.current_epoch, batch_idx, self.global_step, _ids(batch), float(loss.detach()).hex(), lrs)
        )
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("loss", loss.detach(), on_step=True, on_epoch=True)
        if batch_idx == 0:
            self.log("first", loss.detach(), on_step=False, on_epoch=True, reduce_fx="max")
        if batch_idx % 3 == 2:
            self.log("third", loss.detach(), on_step=False, on_epoch=True, reduce_fx="sum")
        if self.case.manual:
            self._step_by_hand(loss, batch_idx)
            return None
        return loss

    def _step_by_hand(self, loss: torch.Tensor, batch_idx: int) -> None:
        if self.case.manual == "accumulate":
            self.manual_backward(loss)
            if batch_idx % 2 == 1:
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()
            return
        raw = self.case.manual == "raw"
        for optimizer in self.optimizers(use_pl_optimizer=not raw):
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers(use_pl_optimizer=not raw):
            optimizer.step()
        self.lr_schedulers().step()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y, ids = batch
        loss = ((self.net(x) - y) ** 2).mean()
        self.log("val_loss", loss)
        if not self.trainer.sanity_checking:
            self.trace.append(("val", self.global_step, batch_idx, tuple(ids.tolist()), float(loss).hex()))

    def configure_optimizers(self) -> Any:
        if self.case.uses_total_steps:
            assert self.trainer.estimated_stepping_batches > 0
        if self.case.manual:
            first = torch.optim.Adam(self.net[0].parameters(), lr=1e-2)
            second = torch.optim.SGD(self.net[4].parameters(), lr=1e-2, momentum=0.9)
            return [first, second], [torch.optim.lr_scheduler.ExponentialLR(first, 0.97)]
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2, fused=self.case.fused)
        if not self.case.schedule:
            return optimizer
        kind, interval, monitor = self.case.schedule
        if kind == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
            return [optimizer], [{"scheduler": plateau, "interval": interval, "monitor": monitor}]
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": decay, "interval": interval}]


def _first(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return next(iter(batch.values()))
    # A combination gives None in place of the batch of a loader that has ended.
    return batch if torch.is_tensor(batch[0]) else next(part for part in batch if part is not None)


def _ids(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return tuple(_ids(part) for part in batch.values())
    if batch is None:
        return None
    return tuple(batch[2].tolist()) if torch.is_tensor(batch[0]) else tuple(_ids(part) for part in batch)


class Recorder(Logger):
    """A logger that appends the numbers of the user to the trace and keeps ours apart."""

    def __init__(self, trace: list[Entry]) -> None:
        self.trace = trace
        self.ours: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "recorder"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        ours = {name: value for name, value in metrics.items() if name.startswith("ckpt/")}
        if ours:
            self.ours.append((step, ours))
        else:
            self.trace.append(("log", step, tuple((name, float(value).hex()) for name, value in metrics.items())))


def plain_loader() -> Any:
    return DataLoader(Augmented(), batch_size=BATCH, shuffle=True)


def plain_val_loader() -> Any:
    return DataLoader(Augmented(8), batch_size=4)


@dataclass(frozen=True)
class Case:
    """One configuration of trainer, model and data.

    Args:
        loader: makes the training data.
        val: `val_check_interval`, or None for no validation.
        schedule: (kind, interval, monitor).
        manual: "" (automatic), "two" optimizers, "raw" torch optimizers, or "accumulate" by hand.
        needs_epoch_start: `training_step` fails where `on_train_epoch_start` was not called in this process.
        model: what is trained.
        val_loader: makes the validation data.
        callbacks: makes more callbacks.
        trainer: more arguments of the trainer.
    """

    loader: Callable[[], Any] = plain_loader
    val: float | int | None = None
    schedule: tuple[str, str, str] | None = None
    manual: str = ""
    amp: bool = False
    fused: bool = False
    uses_total_steps: bool = False
    needs_epoch_start: bool = True
    model: type[Model] = Model
    val_loader: Callable[[], Any] = plain_val_loader
    callbacks: Callable[[], list[Callback]] = list
    trainer: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What a run did and where it ended."""

    trace: list[Entry]
    digest: dict[str, str]
    trainer: pl.Trainer
    model: Model
    logger: Recorder


def fit(
    case: Case, extra: Iterable[Callback] = (), *, ckpt_path: str | None = None, seed: int = 0, **more: Any
) -> Outcome:
    """Train `case` once in this process."""
    seed_everything(seed)
    trace: list[Entry] = []
    model, logger = case.model(case, trace), Recorder(trace)
    trainer = make_trainer(case, [*case.callbacks(), *extra], logger, **more)
    train(trainer, model, case, ckpt_path)
    return Outcome(trace, final_digest(trainer, model), trainer, model, logger)


def train(trainer: pl.Trainer, model: pl.LightningModule, case: Case, ckpt_path: str | None) -> None:
    val = case.val_loader() if case.val is not None else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning has advice on loaders this small
        trainer.fit(model, case.loader(), val, ckpt_path=ckpt_path)


def make_trainer(case: Case, callbacks: list[Callback], logger: Any, **more: Any) -> pl.Trainer:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 3,
        "logger": logger,
        "log_every_n_steps": 1,
        "callbacks": callbacks,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0 if case.val is None else 1.0,
        "val_check_interval": 1.0 if case.val is None else case.val,
        **case.trainer,
        **more,
    }
    if case.amp:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=4)
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pl.Trainer(**options)


def final_digest(trainer: pl.Trainer, model: nn.Module) -> dict[str, str]:
    """Where a run ended: one number each for weights, optimizers, schedulers and all random streams."""
    return digest(
        weights=dict(model.state_dict()),
        optimizers=[optimizer.state_dict() for optimizer in trainer.optimizers],
        schedulers=[config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    )


# ---- snapshots


class EverySnapshotIsDurable(Callback):
    """Waits until each snapshot is durable, so that none is skipped because the writer is busy."""

    def __init__(self, ckpt: AdaptiveCheckpoint) -> None:
        self.ckpt = ckpt

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        run = self.ckpt._run
        assert run is not None
        run.engine.before_update()
        assert run.engine.wait(30)


def every_batch(root: Path, **options: Any) -> list[Callback]:
    """Callbacks that leave a durable snapshot of every boundary in `root`."""
    ckpt = AdaptiveCheckpoint(
        **{
            "tiers": str(root),
            "every_n_steps": 1,
            "on_validation_end": True,
            "keep": {"last": 1000},
            "writer": "thread",
            "lazy": "on",
            **options,
        }
    )
    return [ckpt, EverySnapshotIsDurable(ckpt)]


def resumer(root: Path, **options: Any) -> AdaptiveCheckpoint:
    """A callback that resumes from `root` and adds nothing to it but at the end."""
    return AdaptiveCheckpoint(
        **{"tiers": str(root), "every_n_steps": 10**9, "at_end": False, "writer": "thread", **options}
    )


def tail(trace: list[Entry], epoch: int, batch: int) -> list[Entry]:
    """The trace from the training of this batch on."""
    start = next((i for i, entry in enumerate(trace) if entry[:3] == ("train", epoch, batch)), len(trace))
    return trace[start:]


def trained(trace: list[Entry], epoch: int, batch: int) -> int:
    """How many batches were trained from this one on."""
    return sum(entry[0] == "train" and entry[1:3] >= (epoch, batch) for entry in trace)
