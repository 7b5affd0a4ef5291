"""The fence in a Lightning run: every place where weights may be about to change waits for a lazy copy first.

Parameters and optimizer state are copied while the next forward and backward run. Lightning's automatic optimisation
runs these inside `optimizer.step(closure)`, so the fence is after the closure (`on_before_optimizer_step`), not before
the step. Callbacks that swap weights without an optimizer (weight averaging) do so in validation and at the end of an
epoch or of training; `FenceGuard` comes before them in the list of callbacks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

_log = logging.getLogger(__name__)

Fence = Callable[[], object]


class Listener(Protocol):
    """Who is told, before any other callback, what has just happened."""

    def validation_over(self) -> None: ...

    def epoch_over(self) -> None: ...

    def training_over(self) -> None: ...

    def fit_over(self) -> None: ...


class FenceGuard(Callback):
    """The first callback of the list while `AdaptiveCheckpoint` is active.

    Args:
        fence: waits for lazy copies; cheap where none is under way.
        listener: see `Listener`.
    """

    def __init__(self, fence: Fence, listener: Listener) -> None:
        self._fence = fence
        self._listener = listener

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
        self._listener.validation_over()

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._fence()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._fence()
        self._listener.epoch_over()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._fence()
        self._listener.training_over()

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._listener.fit_over()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._fence()


class StepFence:
    """A process-wide hook on `torch.optim.Optimizer.step`, for steps that Lightning does not announce.

    Args:
        fence: as for `FenceGuard`.

    With a closure the fence is put behind the closure, because torch's own optimizers run it before they change
    anything. An optimizer whose `step` is not torch's may change weights first, so there the fence comes before it.
    """

    def __init__(self, fence: Fence) -> None:
        self._fence = fence
        self._reported: set[type] = set()
        self._handle: Any = None

    def install(self) -> None:
        """Start watching; harmless when installed already."""
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._before_step)

    def remove(self) -> None:
        """Stop watching."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None or not self._runs_closure_first(optimizer):
            self._fence()
            return None

        def fenced() -> Any:
            result = closure()
            self._fence()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": fenced}
        return (args[0], fenced, *args[2:]), kwargs

    def _runs_closure_first(self, optimizer: torch.optim.Optimizer) -> bool:
        kind = type(optimizer)
        if getattr(kind.step, "__module__", "").startswith("torch.optim"):
            return True
        if kind not in self._reported:
            self._reported.add(kind)
            _log.info(
                "%s.%s has its own step(): snapshots are copied before its closure runs, not during it",
                kind.__module__,
                kind.__qualname__,
            )
        return False
