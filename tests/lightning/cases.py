"""The matrix: one `Case` per thing that a resume could get wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import CombinedLoader
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.lightning.runs import BATCH, BATCHES, SAMPLES, Augmented, Case, Model, Stream
from tests.loop.runs import StickyStream

HAS_AVERAGING = hasattr(callbacks, "EMAWeightAveraging")
"""Lightning 2.6 and later."""


SWA_IS_PLAIN = "anneal_func" not in SWALR(torch.optim.SGD([torch.zeros(1)], 1.0), 1.0).state_dict()
"""Else its scheduler's state has a function, which needs `pickle`: docs/support.md."""


def averaging() -> list[Callback]:
    """The callback that swaps averaged weights in for validation."""
    return [callbacks.EMAWeightAveraging(decay=0.9)]


def stochastic() -> list[Callback]:
    """The callback that averages from an epoch on."""
    return [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)]


class Permutation(Sampler[Any]):
    """A batch sampler that shuffles with Python's global stream when it is iterated."""

    def __iter__(self) -> Any:
        order = torch.randperm(SAMPLES).tolist()
        return iter([order[i : i + BATCH] for i in range(0, SAMPLES, BATCH)])

    def __len__(self) -> int:
        return BATCHES


class CurvatureModel(Model):
    """L-BFGS: several closures per step, and a state of lists whose dot products depend on memory alignment."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class ImpatientModel(Model):
    """Skips the rest of each epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 else None


class SparingModel(Model):
    """Trains on some batches only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else loss


class OneCycleModel(Model):
    """Its schedule also moves the momentum."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class FineTunedModel(Model):
    """Has a backbone that is frozen at first."""

    def __init__(self, case: Case, trace: list[Any]) -> None:
        super().__init__(case, trace)
        self.backbone = torch.nn.Sequential(torch.nn.Linear(6, 6))
        self.net.insert(0, self.backbone)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.01)


class StatefulData(pl.LightningDataModule):
    """A datamodule with a state."""

    def train_dataloader(self) -> Any:
        return shuffled()()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": torch.arange(3)}


def shuffled(n: int = SAMPLES, kind: Any = DataLoader, **options: Any) -> Callable[[], Any]:
    return lambda: kind(Augmented(n), batch_size=BATCH, shuffle=True, **options)


def weighted() -> Any:
    weights = torch.rand(SAMPLES, generator=torch.Generator().manual_seed(1))
    return DataLoader(Augmented(), batch_size=BATCH, sampler=WeightedRandomSampler(weights.tolist(), SAMPLES))


LOADERS: Mapping[str, Case] = {
    "shuffled": Case(),
    "two workers": Case(loader=shuffled(num_workers=2)),
    "persistent workers": Case(loader=shuffled(num_workers=2, persistent_workers=True)),
    "own generator": Case(
        loader=lambda: DataLoader(
            Augmented(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3)
        )
    ),
    "weighted sampler": Case(loader=weighted),
    "batch sampler": Case(loader=lambda: DataLoader(Augmented(), batch_sampler=Permutation())),
    "iterable dataset": Case(loader=lambda: DataLoader(Stream(), batch_size=BATCH)),
    "iterable dataset that keeps what was loaded": Case(loader=lambda: DataLoader(StickyStream(), batch_size=BATCH)),
    "stateful loader": Case(loader=shuffled(kind=StatefulDataLoader)),
    "stateful loader, two workers": Case(loader=shuffled(kind=StatefulDataLoader, num_workers=2)),
    "combined, shorter one cycles": Case(loader=lambda: {"a": shuffled()(), "b": shuffled(8)()}),
    "combined, shortest ends": Case(loader=lambda: CombinedLoader([shuffled()(), shuffled(16)()], "min_size")),
    "combined, one without length": Case(
        loader=lambda: CombinedLoader([shuffled(16)(), DataLoader(Stream(), batch_size=BATCH)], "max_size_cycle")
    ),
}

LOOPS: Mapping[str, Case] = {
    "validation per epoch": Case(val=1.0),
    "validation within epochs": Case(val=3),
    "validation after every batch": Case(val=1),
    "validation with its own shuffling": Case(
        val=3,
        val_loader=lambda: DataLoader(
            Augmented(8), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)
        ),
    ),
    "max_steps": Case(val=3, trainer={"max_epochs": -1, "max_steps": 16}),
    "scheduler per step": Case(schedule=("decay", "step", "")),
    "scheduler per epoch": Case(schedule=("decay", "epoch", ""), val=1.0),
    "plateau per epoch": Case(schedule=("plateau", "epoch", "loss_epoch")),
    "plateau per epoch on validation": Case(schedule=("plateau", "epoch", "val_loss"), val=3),
    "plateau per step": Case(schedule=("plateau", "step", "loss_step"), val=3),
    "accumulation of 2": Case(trainer={"accumulate_grad_batches": 2}, val=3, schedule=("decay", "step", "")),
    "accumulation of 4": Case(trainer={"accumulate_grad_batches": 4}, val=3),
    "mixed precision with a scaler": Case(amp=True, trainer={"accumulate_grad_batches": 2}),
    "double precision, clipped and limited, of estimated length": Case(
        uses_total_steps=True, trainer={"precision": "64-true", "gradient_clip_val": 0.5, "limit_train_batches": 4}
    ),
    "gradient clipping": Case(trainer={"gradient_clip_val": 0.5}),
    "fused optimizer": Case(fused=True, val=3),
    "two optimizers by hand": Case(manual="two", val=3),
    "raw optimizers by hand": Case(manual="raw"),
    "accumulation by hand": Case(manual="accumulate"),
    **({"averaged weights": Case(callbacks=averaging, val=3)} if HAS_AVERAGING else {}),
    **({"stochastic weight averaging": Case(callbacks=stochastic)} if SWA_IS_PLAIN else {}),
    "accumulation schedule": Case(callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})]),
    "early stopping": Case(callbacks=lambda: [EarlyStopping("val_loss", patience=6, min_delta=1.0)], val=2),
    "early stopping before min_epochs": Case(
        callbacks=lambda: [EarlyStopping("val_loss", patience=1, min_delta=1.0)], val=2, trainer={"min_epochs": 3}
    ),
    "estimated_stepping_batches": Case(uses_total_steps=True),
    "limit_train_batches": Case(trainer={"limit_train_batches": 4}),
    "one batch per epoch": Case(trainer={"limit_train_batches": 1, "max_epochs": 6}, val=1.0),
    "L-BFGS": Case(model=CurvatureModel),
    "double precision": Case(trainer={"precision": "64-true"}),
    "rest of the epoch skipped": Case(model=ImpatientModel, val=3),
    "batches without a loss": Case(model=SparingModel),
    "one cycle": Case(model=OneCycleModel),
    "backbone unfrozen later": Case(
        model=FineTunedModel, callbacks=lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)]
    ),
    "datamodule": Case(loader=StatefulData),
    "validation every second epoch": Case(val=1.0, trainer={"check_val_every_n_epoch": 2, "max_epochs": 4}),
    "validation across epochs": Case(val=4, trainer={"check_val_every_n_epoch": None}),
    "loaders made again": Case(trainer={"reload_dataloaders_every_n_epochs": 2, "max_epochs": 4}),
}

CASES: Mapping[str, Case] = {**LOADERS, **LOOPS}
