"""Runs whose loaders have more to remember than the order of one epoch: validation, combinations, samplers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Sampler

from tests.lightning.cases import shuffled
from tests.lightning.runs import BATCH, SAMPLES, Augmented, Case, Model, Stream

_KEPT = {"num_workers": 2, "persistent_workers": True}


def validation(n: int = 8, **options: Any) -> Callable[[], Any]:
    """A factory of validation loaders."""

    def make() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about more workers than cores
            return DataLoader(Augmented(n), batch_size=4, **options)

    return make


class Rotating(Sampler[int]):
    """Starts one further on in each pass."""

    def __init__(self, n: int) -> None:
        self.n, self.passes = n, 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter([(i + self.passes) % self.n for i in range(self.n)])

    def __len__(self) -> int:
        return self.n


class RotatingBatches(Rotating):
    """The same as a batch sampler."""

    def __iter__(self) -> Iterator[Any]:
        order = list(super().__iter__())
        return iter([order[i : i + 4] for i in range(0, self.n, 4)])

    def __len__(self) -> int:
        return self.n // 4


class OneLoader(pl.LightningDataModule):
    """Trains and validates with the same object."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.loader = shuffled(**options)()

    def train_dataloader(self) -> Any:
        return self.loader

    def val_dataloader(self) -> Any:
        return self.loader


def two_validations() -> Any:
    return [validation(**_KEPT)(), validation(12, shuffle=True)()]


VALIDATION: Mapping[str, Case] = {
    "persistent workers": Case(val=3, val_loader=validation(**_KEPT)),
    "persistent workers per epoch": Case(val=1.0, val_loader=validation(**_KEPT)),
    "persistent workers in both": Case(
        val=3, loader=shuffled(**_KEPT), val_loader=validation(12, shuffle=True, **_KEPT)
    ),
    "persistent workers, no sanity check": Case(
        val=2, val_loader=validation(**_KEPT), trainer={"num_sanity_val_steps": 0}
    ),
    "persistent workers, a part of the batches": Case(
        val=2, val_loader=validation(24, **_KEPT), trainer={"limit_val_batches": 1}
    ),
    "three persistent workers, a part of the batches": Case(
        val=2,
        val_loader=validation(24, num_workers=3, persistent_workers=True),
        trainer={"limit_val_batches": 2, "num_sanity_val_steps": 1},
    ),
    "new workers": Case(val=3, val_loader=validation(num_workers=2)),
    "a rotating sampler": Case(val=3, val_loader=lambda: DataLoader(Augmented(8), batch_size=4, sampler=Rotating(8))),
    "a rotating batch sampler": Case(
        val=2, val_loader=lambda: DataLoader(Augmented(8), batch_sampler=RotatingBatches(8), **_KEPT)
    ),
    "two loaders": Case(val=3, val_loader=two_validations),
    "stream": Case(val=3, val_loader=lambda: DataLoader(Stream(), batch_size=BATCH)),
    "the training loader": Case(loader=OneLoader, trainer={"limit_val_batches": 1.0, "val_check_interval": 3}),
    "the training loader at the end of an epoch": Case(loader=OneLoader, trainer={"limit_val_batches": 1.0}),
    "the training loader with workers": Case(
        loader=lambda: OneLoader(num_workers=2), trainer={"limit_val_batches": 1.0, "val_check_interval": 3}
    ),
    "from the second epoch on": Case(
        val=1.0, val_loader=validation(**_KEPT), trainer={"check_val_every_n_epoch": 2, "max_epochs": 4}
    ),
    "made again every second epoch": Case(
        val=3,
        val_loader=validation(**_KEPT),
        trainer={"reload_dataloaders_every_n_epochs": 2, "max_epochs": 4},
    ),
}


class OrderedByLoss(Sampler[int]):
    """Draws by weights that training moves, and can save them."""

    def __init__(self, n: int) -> None:
        self.weights = torch.ones(n, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.weights)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.multinomial(self.weights, len(self.weights), replacement=True).tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"].clone()


class LearningModel(Model):
    """Tells its sampler which samples it has seen."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        sampler = self.trainer.train_dataloader.sampler
        sampler.weights[batch[2]] += 1.0 + batch_idx


def by_loss(**options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(Augmented(), batch_size=BATCH, sampler=OrderedByLoss(SAMPLES), **options)


SAMPLERS: Mapping[str, Case] = {
    "learns and saves itself": Case(loader=by_loss(), model=LearningModel, val=3),
    "learns and saves itself, workers": Case(loader=by_loss(**_KEPT), model=LearningModel),
}

COMBINATIONS: Mapping[str, Case] = {
    "max_size": Case(loader=lambda: CombinedLoader([shuffled()(), shuffled(8)()], "max_size")),
    "max_size, workers": Case(
        loader=lambda: CombinedLoader([shuffled(12, **_KEPT)(), shuffled(num_workers=2)()], "max_size")
    ),
    "max_size, a short stream": Case(
        loader=lambda: CombinedLoader([shuffled(36)(), DataLoader(Stream(), batch_size=BATCH)], "max_size")
    ),
    "max_size, a long stream": Case(
        loader=lambda: CombinedLoader([shuffled(8)(), DataLoader(Stream(), batch_size=BATCH)], "max_size")
    ),
}

CASES: Mapping[str, Case] = {
    **{f"validation: {name}": case for name, case in VALIDATION.items()},
    **{f"sampler: {name}": case for name, case in SAMPLERS.items()},
    **{f"combined: {name}": case for name, case in COMBINATIONS.items()},
}
