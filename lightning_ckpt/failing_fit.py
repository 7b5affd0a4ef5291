"""A fit that ends by an exception saves its last boundary; until then, weights change behind the fence only.

`FailingFit` records at each boundary what a training step changes before its optimizer steps; what it cannot know
prevents the save. A batch that does not come has changed the random streams and the loaders only.

Lightning's automatic optimisation runs forward and backward inside `optimizer.step(closure)`, so the fence is after
the closure (`on_before_optimizer_step`), not before the step. Callbacks that swap weights without an optimizer (weight
averaging) do so in validation and at the end of an epoch or of training; `FenceGuard` precedes them in the list of
callbacks. `StopWatch` sees which of them stops the run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback, EarlyStopping, StochasticWeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from ckpt_engine.audit.audit import Audit
from ckpt_engine.data import rng
from ckpt_engine.loop import components
from ckpt_engine.loop.failing_loop import (
    ImpossibleError,
    LastBoundary,
    Loose,
    loose_tensors,
    require_finite,
    require_unmoved,
    seen,
)
from ckpt_engine.snapshot.stage import Fence
from lightning_ckpt import run_state, sharded
from lightning_ckpt.compat import LightningInternals, callbacks_of
from lightning_ckpt.loaders import FitLoaders
from lightning_ckpt.restart import is_lightnings
from lightning_ckpt.run_state import BoundaryKind


@dataclass(frozen=True, slots=True)
class FitStepStart:
    """A boundary, as far as a step changes it before its optimizer steps.

    Args:
        kind: of the boundary.
        step: of the run.
        packed: our own entries of a snapshot, by name.
        moved: the same of what changes once a batch is there.
        tensors: of the model, by name, that change in forward.
        seen: what is compared, by the name of what it is of.
        obstacle: why nothing can be saved once a batch is there, or "".
        attributes: those that training had changed, as values that compare.
    """

    kind: BoundaryKind
    step: int
    packed: Mapping[str, Any]
    moved: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    seen: Mapping[str, Any]
    obstacle: str
    attributes: Mapping[str, Any]

    def undo(self, state: dict[str, Any]) -> None:
        """Take out of Lightning's part of a snapshot what the step that failed has done already."""
        fit_loop = state["loops"]["fit_loop"]
        fit_loop["epoch_loop.batch_progress"] = copy.deepcopy(self.packed["progress"]["batch"])
        fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] = self.packed["progress"]["stepped"]
        step = fit_loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
        for span in ("total", "current"):
            done = step["step"][span]["completed"]
            step["step"][span]["ready"] = done
            step["zero_grad"][span].update(dict.fromkeys(("ready", "started", "completed"), done))
        state.get("current_model_state", state["state_dict"]).update(
            {name: tensor for name, tensor in self.tensors.items() if name in state["state_dict"]}
        )


class FailingFit:
    """Training thread only.

    Args:
        trainer, module, internals, loaders: of the fit.
        budget: the share of training time that snapshots may cost.
        audit: of the fit.
        kind: of the boundary that the trainer is at.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        internals: LightningInternals,
        loaders: FitLoaders,
        budget: float,
        audit: Audit,
        kind: Callable[[], BoundaryKind],
    ) -> None:
        self.step = 0
        """Of the last boundary."""
        self._trainer, self._module = trainer, module
        self._internals, self._loaders = internals, loaders
        self._audit = audit
        self.last: LastBoundary[FitStepStart] = LastBoundary(self._make, budget)
        self._kind, self._alone = kind, trainer.world_size == 1
        self._obstacle: str | None = None
        self._loose: list[Loose] = []
        self._metrics: list[tuple[str, torch.nn.Module]] = []
        self._callbacks: list[Callback] = []
        self._stateful: list[tuple[str, Callback]] = []

    def reached(self, step: int) -> None:
        """The boundary after `step`; the next batch is asked for when this returns."""
        self.step = step
        if self._alone or (self._module.automatic_optimization and not self._internals.accumulating):
            self.last.reached()
        else:
            self.last.missed("ranks may be at different batches of one step")

    def before(self) -> FitStepStart:
        """What to save now, after an exception.

        Raises:
            ImpossibleError: the last boundary cannot be had.
        """
        before = self.last.record()
        require_unmoved(before.attributes, self._audit.frozen())
        if self._internals.batches_in_epoch == before.packed["batch"] and not self._internals.user_fetches:
            require_finite(self._trainer.optimizers)
            return FitStepStart(before.kind, before.step, _packed(before), {}, {}, {}, "", before.attributes)
        if before.obstacle:
            raise ImpossibleError(before.obstacle)
        require_unmoved(before.seen, self._seen())
        if before.moved["metrics"].keys() != dict(components.found_in(self._module)).keys():
            raise ImpossibleError("the model has other metric objects than at that boundary")
        require_finite(self._trainer.optimizers)
        moved = {**before.moved, "results": before.moved["results"]()}
        return replace(before, packed=_packed(before), moved=moved)

    # ---- at every boundary

    def _make(self) -> FitStepStart:
        kind, step = self._kind(), self.step
        attributes = self._audit.frozen(quick=True)
        internals = self._internals
        packed = {
            "rng": rng.capture_later(),
            "loaders": self._loaders.states(epoch_is_over=False),
            "combined": internals.combined_position,
            "progress": internals.progress,
            "buffer_syncs": sharded.gradient_order(self._trainer).syncs(),
            "should_stop": bool(self._trainer.should_stop),
            "epoch": self._trainer.current_epoch,
            "batch": internals.batches_in_epoch,
        }
        if self._obstacle is None:
            self._obstacle = self._always()
        obstacle = self._obstacle or (
            "it has gradients of earlier batches" if kind is BoundaryKind.ACCUMULATING else ""
        )
        if obstacle:
            return FitStepStart(kind, step, packed, {}, {}, {}, obstacle, attributes)
        try:
            compared = self._seen()
        except ImpossibleError as err:
            self._obstacle = str(err)
            return FitStepStart(kind, step, packed, {}, {}, {}, str(err), attributes)
        moved = {
            "results": run_state.results_now(internals),
            "metrics": components.dump_below(self._metrics, own=True),
            "tables": run_state.dump_tables(internals),
        }
        tensors = {one.key: one.tensor.detach().clone() for one in self._loose}
        return FitStepStart(kind, step, packed, moved, tensors, compared, "", attributes)

    def _always(self) -> str:
        """Why a step that has its batch can never be undone in this fit, or ""."""
        trainer, module = self._trainer, self._module
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not module.automatic_optimization or self._internals.skips_backward:
            return "it has gradients of earlier batches"
        if sharded.is_sharded(trainer):
            return "the model is divided"
        if is_overridden("on_save_checkpoint", module):
            return "it is not known what of the model's on_save_checkpoint the step has changed"
        if data is not None and is_overridden("state_dict", data, parent=pl.LightningDataModule):
            return "it is not known what of the data module's state the step has changed"
        for callback in callbacks_of(trainer):
            if is_overridden("on_save_checkpoint", callback, parent=Callback) and not is_lightnings(type(callback)):
                return f"it is not known what of {type(callback).__name__}'s on_save_checkpoint the step has changed"
        if any(type(one).get_extra_state is not torch.nn.Module.get_extra_state for one in module.modules()):
            return "it is not known what of the model's get_extra_state the step has changed"
        try:
            self._loose = loose_tensors(module, trainer.optimizers)
            self._metrics = components.topmost(module)
        except ImpossibleError as err:
            return str(err)
        return ""

    def _seen(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, optimizer in enumerate(self._trainer.optimizers):
            groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            found[f"optimizer {number}"] = seen(f"optimizer {number}", groups)
        for number, config in enumerate(self._trainer.lr_scheduler_configs):
            found[f"scheduler {number}"] = seen(f"scheduler {number}", config.scheduler.state_dict())
        callbacks = callbacks_of(self._trainer)
        if callbacks != self._callbacks:
            self._callbacks = list(callbacks)
            stateful = (one for one in enumerate(callbacks) if is_overridden("state_dict", one[1], parent=Callback))
            self._stateful = [(f"callback {n}, a {type(one).__name__},", one) for n, one in stateful]
        for name, callback in self._stateful:
            found[name] = seen(name, callback.state_dict())
        return found


def _packed(before: FitStepStart) -> dict[str, Any]:
    return {**before.packed, "rng": before.packed["rng"]()}


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
