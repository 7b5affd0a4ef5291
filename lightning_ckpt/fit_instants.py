"""What a snapshot of one `fit` consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl

from ckpt_engine.adapter import BoundaryRecord, RunInstant, TrainerRun
from lightning_ckpt import run_state, sharded
from lightning_ckpt.compat import LightningInternals
from lightning_ckpt.early_stop import EarlyStopWatch
from lightning_ckpt.fit_resume import FitResume
from lightning_ckpt.loaders import FitLoaders
from lightning_ckpt.run_state import MODEL, BoundaryKind, FitParts, as_of, kind_of


class FitInstants:
    """Describes instants of one `fit` to the engine.

    Args:
        trainer: that fits.
        internals: of the trainer.
        loaders: of this fit.
        parts: what a checkpoint of Lightning has.
        early_stop: knows whether `EarlyStopping` has stopped it.
        run: captures the state.
        resume: knows the curves of the loggers.

    Attributes:
        validated: a validation ran since the last batch.
        flags_at_start: those of `LiveModel.entries` when training started.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        internals: LightningInternals,
        loaders: FitLoaders,
        parts: FitParts,
        early_stop: EarlyStopWatch,
        run: TrainerRun,
        resume: FitResume,
    ) -> None:
        self._trainer, self._internals, self._loaders, self._parts = trainer, internals, loaders, parts
        self._early_stop, self._run, self._resume = early_stop, run, resume
        self._module = trainer.lightning_module
        self.validated = False
        self.flags_at_start: dict[str, list[str]] = {"frozen": [], "eval": []}

    @property
    def step(self) -> int:
        """The training step: optimizer steps, or batches where the model steps raw optimizers itself."""
        if self._module.automatic_optimization:
            return self._internals.automatic_steps
        return int(self._trainer.global_step) or self._internals.batches_in_total

    def kind(self) -> BoundaryKind:
        """The kind of the boundary that the trainer is at."""
        return kind_of(self._internals, validated=self.validated)

    def at(self, kind: BoundaryKind) -> RunInstant:
        """What a snapshot that is taken now is."""
        batch = self._internals.batches_in_epoch
        return RunInstant(
            step=self.step,
            epoch=self._trainer.current_epoch,
            state=lambda: self.state(kind),
            metrics=self._run.numbers(self._internals.metric_tables["callback"]),
            notes=lambda: {"batch": batch, **self._notes(kind)},
        )

    def _notes(self, kind: BoundaryKind) -> dict[str, Any]:
        return {"kind": kind.value, **sharded.notes(self._trainer), **self._resume.curves()}

    def record(self) -> BoundaryRecord:
        """What of this boundary the next step changes before its optimizers do."""
        internals, kind = self._internals, self.kind()
        obstacle = "it has gradients of earlier batches" if self._gradients_wait(kind) else self._parts.unknown
        own: dict[str, Any] = {
            "loaders": self._loaders.states(epoch_is_over=False),
            "combined": internals.combined_position,
            "progress": internals.progress,
            "buffer_syncs": self._run.capture.gradient_order.syncs(),
            "should_stop": bool(self._trainer.should_stop),
            "epoch": self._trainer.current_epoch,
            "batch": internals.batches_in_epoch,
        }
        if not obstacle:
            own |= {"results": run_state.results_now(internals), "tables": run_state.dump_tables(internals)}
        return BoundaryRecord(
            own,
            partial(self._state_before, kind),
            lambda: self._run.numbers(internals.metric_tables["callback"]),
            partial(self._notes, kind),
            obstacle,
        )

    def _state_before(self, kind: BoundaryKind, own: dict[str, Any], undo: Callable[..., Any] | None) -> dict[str, Any]:
        """Of the boundary with these entries."""
        own["flags"] = own["flags"][MODEL]
        if "results" in own:
            own["results"] = own["results"]()
        if undo is not None:
            own["metrics"] = own.pop("metric_states").get(MODEL, {})
        return self.state(kind, own, undo)

    def _gradients_wait(self, kind: BoundaryKind) -> bool:
        # In manual optimisation only the user knows when gradients are used up, and if no backward runs they are not.
        waits = self._internals.skips_backward or not self._module.automatic_optimization
        return bool(self._run.step_fence.uses_left) or waits or kind is BoundaryKind.ACCUMULATING

    def state(
        self,
        kind: BoundaryKind,
        before: Mapping[str, Any] | None = None,
        undo: Callable[..., Any] | None = None,
    ) -> dict[str, Any]:
        """As it is now, or with the entries of the boundary `before`."""
        trainer, internals = self._trainer, self._internals
        tables = run_state.dump_tables(internals)
        if kind is BoundaryKind.STOPPED:
            # The logger connector already knows that the epoch is over, which a longer run would not be.
            tables["first_batch"] = internals.batches_in_epoch == 1
        own: dict[str, Any] = {
            **self._run.entries(),
            "kind": kind.value,
            "epoch": trainer.current_epoch,
            "batch": internals.batches_in_epoch,
            "stopped_early": self._early_stop.by_early_stopping,
            "should_stop": bool(trainer.should_stop),
            "loaders": self._loaders.states(epoch_is_over=kind is BoundaryKind.FINISHED),
            "validation": self._loaders.validation_states(),
            "combined": internals.combined_position,
            "progress": internals.progress,
            "results": run_state.results_now(internals)(),
            "tables": tables,
            **sharded.model_of(self._trainer).entries(),
            "flags_at_start": self.flags_at_start,
            "reload_epoch": internals.reload_epochs[0],
            "validation_reload_epoch": internals.reload_epochs[1],
            "batch_sizes": internals.batch_sizes,
            "left_out": self._parts.left_out,
            **(before or {}),
        }
        waits = self._gradients_wait(kind) or (before is None and internals.accumulating)
        gradients = sharded.model_of(self._trainer).gradients() if waits and kind is not BoundaryKind.FINISHED else {}
        return self._run.capture.state(own, gradients, partial(as_of, kind, own["progress"], undo))
