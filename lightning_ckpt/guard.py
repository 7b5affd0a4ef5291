"""The first callback of a fit: weights change behind the fence only, and an exception is heard of before all others.

Lightning's automatic optimisation runs forward and backward inside `optimizer.step(closure)`, so the fence is after
the closure (`on_before_optimizer_step`), not before the step. Callbacks that swap weights without an optimizer (weight
averaging) do so in validation and at the end of an epoch or of training; `FenceGuard` precedes them in the list of
callbacks. `StopWatch` sees which of them stops the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback, EarlyStopping, StochasticWeightAveraging
from typing_extensions import override

from ckpt_engine.snapshot.stage import Fence
from lightning_ckpt.compat import callbacks_of


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
        self._given: Callable[[], None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return FenceGuard, (_no_fence, None)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._listener is not None:
            self._listener.training_begins()

    def first_batch(self, given: Callable[[], None]) -> None:
        """Once the next batch is there, `given` is called."""
        self.on_train_batch_start = self._first_batch  # type: ignore[assignment, method-assign]
        self._given = given

    @property
    def waits_for_batch(self) -> bool:
        """Whether the batch of `first_batch` is still to come."""
        return self._given is not None

    def _first_batch(self, *_: Any) -> None:
        given, self._given = self._given, None
        self.on_train_batch_start = None  # type: ignore[assignment, method-assign]
        if given is not None:
            given()

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


class StopWatch:
    """Tells a stop by `EarlyStopping`, which is part of a run, from all other reasons to set `trainer.should_stop`.

    Args:
        trainer: that is watched. `before` is called ahead of the callbacks that may stop it, `after` behind them.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._stopped = False
        self._epoch = 0
        self.by_early_stopping = False

    def before(self) -> None:
        self._stopped, self._epoch = bool(self._trainer.should_stop), self._trainer.current_epoch

    def after(self) -> None:
        if self._trainer.should_stop and not self._stopped:
            self.by_early_stopping |= any(
                callback.stopped_epoch == self._epoch
                for callback in callbacks_of(self._trainer)
                if isinstance(callback, EarlyStopping)
            )


def finish_again(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """A rerun of a finished run trains nothing: let averaging callbacks put their weights in place once more.

    The final snapshot is from before they did, because a longer run goes on from there.
    """
    for callback in callbacks_of(trainer):
        if _replaces_weights(callback, module):
            callback.on_train_end(trainer, module)


def _replaces_weights(callback: Callback, module: pl.LightningModule) -> bool:
    averaging = getattr(callbacks, "WeightAveraging", None)  # Lightning 2.5.5 and later
    if averaging is not None and isinstance(callback, averaging):
        return True
    # With batch norm it replaced them one epoch before the end, and its hook only undoes counters it never raised here.
    return isinstance(callback, StochasticWeightAveraging) and not callback.pl_module_contains_batch_norm(module)
