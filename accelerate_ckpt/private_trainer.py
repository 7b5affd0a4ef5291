"""All access to names of transformers that its documentation does not promise; each is listed with its reason."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from transformers import Trainer
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    MLflowCallback,
    TensorBoardCallback,
    WandbCallback,
)

from accelerate_ckpt.private import is_known
from ckpt_engine.adapter import PrivateName, Replaced, TrackedRun, WriterCurve, require_names

TRANSFORMERS_VERSION: str = version("transformers")

TRANSFORMERS_NAMES: tuple[PrivateName, ...] = (
    PrivateName("module", "skip_first_batches", "resuming without drawing the trained samples again (replaced)"),
    PrivateName("Trainer", "_load_from_checkpoint", "resuming without a second copy of the weights (replaced)"),
    PrivateName("Trainer", "_load_rng_state", "resuming without a file of random streams (its absence is allowed)"),
    PrivateName("Trainer", "_maybe_log_save_evaluate", "the running loss where it is a local variable (wrapped)"),
    PrivateName("trainer", "set_initial_training_values", "the steps of an epoch, with another batch size (wrapped)"),
    PrivateName("trainer", "callback_handler", "the state of callbacks"),
    PrivateName("trainer", "control", "the state of callbacks"),
    PrivateName("trainer", "current_flos", "the count of floating point operations"),
)
"""Those that all supported versions have; `tests/accelerate/test_transformers_compat.py` has a test for each."""

_MODULE: Any = transformers.trainer
_RUN_VARIABLES = {
    "MLflowCallback": {"MLFLOW_RUN_ID": "{run}"},
    "WandbCallback": {"WANDB_RUN_ID": "{run}", "WANDB_RESUME": "allow"},
}
"""By callback: what makes it go on in a run, as its library documents."""
_RUNNING_LOSS = "_tr_loss"  # 5.0 and later; a local variable of the loop before
_LAST_LOGGED = "_globalstep_last_logged"
_TOTAL_LOSS = "_total_loss_scalar"
_FIRST_STEP = "_initial_global_step"
_COUNTS = "_init_training_state"  # 5.0 and later; a part of the loop before


def _curve_of(callback: Any) -> WriterCurve | TrackedRun | None:
    if type(callback) is TensorBoardCallback and is_known(callback.tb_writer):
        folder = Path(callback.tb_writer.log_dir)
        dated = folder.parent.name == "runs"  # transformers makes one for each start, unless the user names it
        return WriterCurve("TensorBoardCallback", callback.tb_writer, folder.parent if dated else folder)
    if type(callback) is MLflowCallback and (run := (mlflow := sys.modules["mlflow"]).active_run()) is not None:
        scheme, _, path = run.info.artifact_uri.rpartition("://")
        metrics = Path(path).parent / "metrics" if scheme in ("", "file") else None
        in_folder = metrics is not None and (metrics.parent / "meta.yaml").is_file()
        home = f"{mlflow.get_tracking_uri()} {run.info.experiment_id}"
        return TrackedRun(
            "MLflowCallback", home, run.info.run_id, metrics if in_folder else None, mlflow.flush_async_logging
        )
    if type(callback) is WandbCallback and (run := sys.modules["wandb"].run) is not None:
        return TrackedRun("WandbCallback", f"{run.entity}/{run.project}", run.id, None, lambda: None)
    return None


def trainer_above() -> Trainer | None:
    """The trainer whose method calls this, through whatever: it hands itself to none of its callbacks."""
    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(inspect.currentframe()))
    return next((owner for owner in owners if isinstance(owner, Trainer)), None)


@dataclass(eq=False)
class TrainerInternals(Replaced):
    """Typed, narrow access to the insides of one trainer.

    Args:
        trainer: whose insides are reached.
    """

    trainer: Any
    _first_step: Replaced = field(default_factory=Replaced)
    _skipping: Replaced = field(default_factory=Replaced)
    _shown: torch.Tensor | None = None
    _variables: dict[str, str] = field(default_factory=dict)

    def owners(self) -> dict[str, Any]:
        """The objects that `PrivateName.owner` refers to."""
        return {"module": _MODULE, "Trainer": Trainer, "trainer": self.trainer}

    def probe(self) -> None:
        """Raises `CkptError` where this version lacks a name."""
        require_names(TRANSFORMERS_NAMES, self.owners(), "transformers", TRANSFORMERS_VERSION, "accelerate_ckpt")

    # ---- what the trainer does when it resumes, and we do instead

    def train_with(self, checkpoint: Callable[[], str | None], failed: Callable[[BaseException], None]) -> None:
        """`train()` of no trial resumes from `checkpoint()` where it is given no `resume_from_checkpoint`, and what it
        raises goes through `failed`. Stays for good, and is done once.
        """
        original = self.trainer.train
        if getattr(original, "_ckpt", None) == failed:
            return

        def train(resume_from_checkpoint: Any = None, trial: Any = None, *arguments: Any, **more: Any) -> Any:
            try:
                if resume_from_checkpoint is None and trial is None:
                    resume_from_checkpoint = checkpoint()
                return original(resume_from_checkpoint, trial, *arguments, **more)
            except BaseException as err:
                failed(err)
                raise

        train._ckpt = failed  # type: ignore[attr-defined]
        Replaced().replace(self.trainer, "train", train)

    def keep_weights(self) -> None:
        """The folder that the trainer resumes from has no weights; they come from the snapshot. Undone by `unwrap`."""
        self.replace(self.trainer, "_load_from_checkpoint", lambda *_, **__: None)

    def count_from(self, epoch: int, batches: int) -> None:
        """Training goes on in this pass over the data after so many of its batches. Undone by `unwrap`.

        The trainer computes both from the number of steps. Where that of batches is not known it takes all steps for
        one epoch, and would skip those of the passes before in this one; else it takes every epoch for a whole one,
        though a callback may have ended one early. Before 5.0 there is no place to tell it.
        """
        if not hasattr(self.trainer, _COUNTS):
            return

        def init_training_state(original: Any, *arguments: Any, **more: Any) -> tuple[int, int]:
            original(*arguments, **more)
            return epoch, batches

        self.around(self.trainer, _COUNTS, init_training_state)

    def skip_with(self, skip: Callable[[Any, int], Any]) -> None:
        """`skip(loader, batches)` runs instead of `skip_first_batches`, once. Undone by `unwrap`."""

        def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
            self.unskip()
            return skip(dataloader, num_batches)

        self._skipping.replace(_MODULE, "skip_first_batches", skip_first_batches)

    def unskip(self) -> bool:
        """Put `skip_first_batches` back; whether its next call was ours."""
        return self._skipping.undo()

    def unwrap(self) -> None:
        """Leave the trainer and its module as they were found."""
        self.unskip()
        self._first_step.undo()
        self.undo()

    def recount_with(self, recount: Callable[[Any, int], int]) -> None:
        """`recount(loader, steps_of_an_epoch)` runs before the trainer reads where it resumes. Undone by `unwrap`.

        It returns by how many steps the trainer counts more than it trains: so many more are in the epochs that it
        needs for its `max_steps`.
        """

        def set_initial_training_values(original: Any, args: Any, dataloader: Any, *more: Any, **named: Any) -> Any:
            epochs, steps, *others = original(args, dataloader, *more, **named)
            shift = recount(dataloader, int(steps))
            if shift and args.max_steps > 0:
                epochs = -(-(args.max_steps + shift) // steps)
            return epochs, steps, *others

        self.around(self.trainer, "set_initial_training_values", set_initial_training_values)

    # ---- counters

    @property
    def callbacks(self) -> list[Any]:
        """The trainer's callbacks and its control, in order."""
        return [*self.trainer.callback_handler.callbacks, self.trainer.control]

    @property
    def reports(self) -> list[Any]:
        """The callbacks that report to TensorBoard, W&B and the like."""
        kinds = tuple(INTEGRATION_TO_CALLBACK.values())
        return [one for one in self.trainer.callback_handler.callbacks if isinstance(one, kinds)]

    def curves(self) -> list[WriterCurve | TrackedRun]:
        """Of the callbacks that log, those that go on after a resume, as far as they have begun; where this logs."""
        if not self.trainer.state.is_world_process_zero:
            return []
        return list(filter(None, map(_curve_of, self.trainer.callback_handler.callbacks)))

    def open_runs(self, runs: Mapping[str, str]) -> None:
        """The callbacks of these names open the runs of these ids, unless the user names others. See `forget_runs`."""
        for name, variables in _RUN_VARIABLES.items():
            if name in runs and not any(variable in os.environ for variable in variables):
                given = {key: value.format(run=runs[name]) for key, value in variables.items()}
                self._variables.update(given)
                os.environ.update(given)

    def forget_runs(self) -> None:
        """The runs are open: programs that are started from here on do not take them for theirs."""
        while self._variables:
            os.environ.pop(self._variables.popitem()[0], None)

    def follow_running_loss(self) -> None:
        """Before 5.0 the loss since the last log is a local variable: seen when the loop hands it on to be logged."""
        if hasattr(self.trainer, _RUNNING_LOSS):
            return

        def maybe_log(original: Any, tr_loss: torch.Tensor, *arguments: Any, **more: Any) -> Any:
            result = original(tr_loss, *arguments, **more)
            self._shown = tr_loss.detach().clone()  # it was emptied if it was logged
            return result

        self.around(self.trainer, "_maybe_log_save_evaluate", maybe_log)

    @property
    def ended(self) -> bool:
        """The last entry of the history is the summary of the training that has just ended."""
        state = self.trainer.state
        last = state.log_history[-1] if state.log_history else {}
        return "train_loss" in last and last.get("step") == state.global_step

    def running_loss(self) -> dict[str, Any]:
        """The loss since the last log and the step of that log, all loss and the step it counts from, and the
        operations that are not counted yet.
        """
        trainer = self.trainer
        loss = getattr(trainer, _RUNNING_LOSS, self._shown)
        # At its end a training adds what is left to the total: one that is started again, or goes on, does so again.
        added = float(loss) if self.ended and loss is not None else 0.0
        return {
            "loss": None if loss is None else loss.detach().clone(),
            "total": float(getattr(trainer, _TOTAL_LOSS)) - added,
            "first": int(getattr(trainer, _FIRST_STEP, 0)),
            "last_logged": int(getattr(trainer, _LAST_LOGGED)),
            "flos": float(trainer.current_flos),
        }

    def restore_running_loss(self, saved: dict[str, Any]) -> bool:
        """Put `running_loss` back; False if the saved run could not see the loss."""
        trainer = self.trainer
        trainer.current_flos = saved["flos"]
        if saved["loss"] is None:
            return False
        loss = getattr(trainer, _RUNNING_LOSS, None)
        if loss is not None:
            setattr(trainer, _RUNNING_LOSS, saved["loss"].to(loss.device))
        else:
            self._carry(saved["loss"])
        setattr(trainer, _LAST_LOGGED, saved["last_logged"])
        setattr(trainer, _TOTAL_LOSS, saved["total"])
        if hasattr(trainer, _FIRST_STEP):  # the final mean is over the steps since there
            setattr(trainer, _FIRST_STEP, saved["first"])
        return True

    def _carry(self, loss: torch.Tensor) -> None:
        """Add what was left of the loss to that of the first step, which the loop adds to nothing."""
        self._shown = loss
        self._first_step.undo()

        def training_step(original: Any, *arguments: Any, **more: Any) -> Any:
            self._first_step.undo()
            first = original(*arguments, **more)
            return first + loss.to(first.device)

        self._first_step.around(self.trainer, "training_step", training_step)
