"""The fence in a Lightning run: every place where weights may be about to change waits for a lazy copy first.

Parameters and optimizer state are copied while the next forward and backward run. Lightning's automatic optimisation
runs these inside `optimizer.step(closure)`, so the fence is after the closure (`on_before_optimizer_step`), not before
the step. Callbacks that swap weights without an optimizer (weight averaging) do so in validation and at the end of an
epoch or of training; `FenceGuard` comes before them in the list of callbacks.
"""

from __future__ import annotations

from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from ckpt_engine.snapshot.stage import Fence


class GuardListener(Protocol):
    """Hears, before any other callback, what happens."""

    def training_begins(self) -> None: ...

    def validation_over(self) -> None: ...

    def epoch_over(self) -> None: ...

    def training_over(self) -> None: ...

    def fit_over(self) -> None: ...

    def failed(self, exception: BaseException) -> None: ...


class FenceGuard(Callback):
    """The first callback of the list while `AdaptiveCheckpoint` is active.

    Args:
        fence: waits for lazy copies; cheap where none is under way.
        listener: see `GuardListener`; None: a guard that a copied trainer has, where there is nothing to guard.
    """

    def __init__(self, fence: Fence, listener: GuardListener | None) -> None:
        self._fence = fence
        self._listener = listener

    def __reduce__(self) -> tuple[Any, ...]:
        return FenceGuard, (_no_fence, None)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._listener is not None:
            self._listener.training_begins()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._fence()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._fence()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._listener is not None:
            self._listener.validation_over()

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._fence()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._fence()
        if self._listener is not None:
            self._listener.epoch_over()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._fence()
        if self._listener is not None:
            self._listener.training_over()

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._listener is not None:
            self._listener.fit_over()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._listener is not None:
            self._listener.failed(exception)
        self._fence()


def _no_fence() -> None:
    """Of a copy: nothing is copied lazily."""
