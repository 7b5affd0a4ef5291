"""What a transformers `Trainer` counts around its loop: its state, its callbacks' states, and the running loss."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState, TrainerControl

from accelerate_ckpt.private import source_of
from accelerate_ckpt.private_trainer import TrainerInternals
from ckpt_engine.adapter import (
    Counters,
    DerivedObject,
    LoaderSource,
    NotRestored,
    OnChange,
    Restored,
    ResumeError,
    Surroundings,
    Variables,
)

NOTE = Surroundings.COUNTERS
"""The key in a manifest's notes under which `resume_from` finds the trainer's state."""
PACE = "pace"
"""Its entry that says how many samples there are, and in a step."""
SHIFT = "shift"
"""In that entry: by how many steps the trainer counts more than were trained, as another loader had others."""
WHOLE = "whole"
"""In that entry, where another number of ranks has begun the epoch: how many batches this one takes it to have."""
_MOST_DEPTH = 32
_LONG = "log_history"
_RANKS = "ranks"
_OTHERS = (
    "the samples of a step (batch size x gradient_accumulation_steps x processes) are others, or a callback has ended "
    "an earlier epoch before its last batch"
)
_SAME = (
    "use the arguments of the saved run, or data: continue for another batch size or accumulation; with another number "
    "of processes another per_device_train_batch_size or gradient_accumulation_steps, so that each step has as many "
    "samples as before. transformers takes every epoch for a whole one: where one was ended early (should_epoch_stop), "
    "only a snapshot that was taken before can be continued"
)
_SINCE_THE_RESUME = "the next logged loss covers only the steps since the resume"


class TrainerSurroundings(Surroundings):
    """The counters of one trainer.

    Args:
        trainer: that trains.
        internals: of the trainer.
        own: our callback, which has no state of its own.
        shift: by how many steps the trainer counts more than were trained.
        counted: see `counts`.
        audits: what callbacks remember is looked at as hidden state.
    """

    def __init__(
        self,
        trainer: Trainer,
        internals: TrainerInternals,
        own: object,
        shift: int,
        counted: Callable[[], tuple[int, float]],
        *,
        audits: bool,
    ) -> None:
        self._audits, self._counted = audits, counted
        self._trainer = trainer
        self._internals = internals
        self._own = own
        self._rank, self._size = trainer.accelerator.process_index, trainer.accelerator.num_processes
        self._history: list[Any] = []
        self._shift = shift
        self.streams: Mapping[str, Any] | None = None
        """Random streams of an imported checkpoint, which belong right before the first step."""
        model = trainer.model
        # What `ckpt export --to transformers` needs besides the weights; too slow to be made for each snapshot.
        self._files = {"config.json": model.config.to_json_string()} if isinstance(model, PreTrainedModel) else {}

    @property
    def _foreign(self) -> list[Any]:
        """Callbacks of the user that remember something and have no state of their own to save."""
        return [
            one
            for one in self._internals.callbacks
            if one is not self._own and not isinstance(one, ExportableState) and _is_foreign(one)
        ]

    def audited(self) -> Mapping[str, Any]:
        callbacks = {f"callbacks.{type(one).__name__}": one for one in self._foreign}
        args, config = self._trainer.args, getattr(self._trainer.model, "config", None)
        return {
            "trainer": DerivedObject(self._trainer, Trainer),
            "trainer.args": DerivedObject(args, TrainingArguments),
            "args": Variables(partial(getattr, args), frozenset({"max_grad_norm"}), module=args),
            **(
                {"model.config": DerivedObject(config, PretrainedConfig)}
                if isinstance(config, PretrainedConfig)
                else {}
            ),
            **callbacks,
        }

    def accumulating(self) -> bool:
        return not self._trainer.accelerator.sync_gradients

    def now(self) -> Counters:
        state, callbacks = self._trainer.state, self._internals.callbacks
        step, epoch = counts(state, self._counted)
        values = {one.name: getattr(state, one.name) for one in dataclasses.fields(state)}
        # Callbacks' states are ours to restore: transformers would make new callbacks of them.
        values |= {"global_step": step, "epoch": epoch, "stateful_callbacks": {}}
        # Later entries are appended; a training that is longer, or begun again, says its own summary.
        logged = len(state.log_history) - self._internals.ended
        states = [[type(one).__name__, _text_of(one.state())] for one in callbacks if isinstance(one, ExportableState)]
        loss = self._internals.running_loss()

        def dump() -> dict[str, Any]:
            row = {**values, _LONG: values[_LONG][:logged]}
            if self._rank:
                del row[_LONG]  # it is the same on all ranks, and grows with the run: see `share_history`
            saved = {"state": _text_of(row), "callbacks": states, "loss": dict(loss), "files": self._files}
            return {**saved, _RANKS: self._size}

        def notes() -> dict[str, Any]:
            # The history grows with the run, and it is not needed before the snapshot is loaded; nor a best metric that
            # is NaN, which is no JSON: `restore` has it from `dump`.
            row = _json_of({**values, _LONG: []}, endless=False)
            pace = {**pace_of(self._trainer), SHIFT: self._shift}
            whole = source_of(self._trainer.callback_handler.train_dataloader).dealt
            return {NOTE: {**row, PACE: pace | ({WHOLE: whole} if whole is not None else {})}, **self.curves.note()}

        return Counters(dump, notes)

    def restore(self, saved: Mapping[str, Any]) -> list[NotRestored]:
        self._restore_state({_LONG: list(self._history), **json.loads(saved["state"])})
        ranks = int(saved.get(_RANKS, 1))
        moved = self._trainer.state.global_step - int(json.loads(saved["state"])["global_step"])
        loss = {**saved["loss"], "flos": saved["loss"]["flos"] * ranks / self._size}  # of all ranks they are added up
        loss["last_logged"] += moved
        loss["first"] += moved
        missing = []
        if moved and not self._rank:
            until = ", and as much further to max_steps" if self._trainer.args.max_steps > 0 else ""
            why = f"with this loader an epoch has other steps: the trainer counts on {moved:+d} from there{until}"
            missing.append(NotRestored("count of steps", f"{why}, and the schedule of learning rates does not"))
        if not self._internals.restore_running_loss(loss):
            missing.append(NotRestored("running loss", _SINCE_THE_RESUME))
        elif self._size % ranks and bool(loss["loss"]) and not self._rank:
            why = f"each rank has that of saved rank r mod {ranks}: the next logged loss is not the mean of all"
            missing.append(NotRestored("running loss", why))
        return missing + self._restore_callbacks([(name, json.loads(text)) for name, text in saved["callbacks"]])

    def share_history(self, agree: Callable[[Callable[[], list[Any]]], list[Any]]) -> None:
        """Every rank has the history of rank 0 now, in whose part of a snapshot alone it is.

        Args:
            agree: see `Engine.agree`.
        """
        self._history = agree(lambda: list(self._trainer.state.log_history))
        self._trainer.state.log_history = list(self._history)

    def adopt(self, state: dict[str, Any]) -> tuple[list[Restored], list[NotRestored]]:
        saved = state.pop(self.COUNTERS, None)
        if saved is None:
            return [], []
        state.pop(self.FILES, None)
        self._restore_state(saved)
        callbacks = [
            (name, one)
            for name, found in (saved.get("stateful_callbacks") or {}).items()
            for one in (found if isinstance(found, list) else [found])
        ]
        restored = [Restored("data position", "as the Trainer finds it: order and number of its batches")]
        # Of several processes an imported folder has the streams of the first one only.
        self.streams = state.get(self.STREAMS) if self._size == 1 else None
        if self.streams is not None:
            restored.append(Restored("random streams", "right before the first step, as the Trainer itself does it"))
        missing = [NotRestored("running loss", _SINCE_THE_RESUME)]
        return restored, missing + self._restore_callbacks(callbacks)

    def _restore_state(self, saved: Mapping[str, Any]) -> None:
        state: Any = self._trainer.state
        for name, value in saved.items():
            if name == _LONG or name.startswith(("best_", "total_", "num_input")):
                setattr(state, name, value)
        exportable: Any = [callback for callback in self._internals.callbacks if isinstance(callback, ExportableState)]
        state.stateful_callbacks = TrainerState(stateful_callbacks=exportable).stateful_callbacks  # as on a fresh start

    def _restore_callbacks(self, left: list[tuple[str, Any]]) -> list[NotRestored]:
        missing = []
        for callback in self._internals.callbacks:
            found = next((one for one in left if one[0] == type(callback).__name__), None)
            if isinstance(callback, ExportableState):
                if found is not None:
                    left.remove(found)
                    missing += _set(callback, found[1])
            elif not self._audits and callback in self._foreign:
                why = "it has no state(): give the class `ExportableState` if what it remembers matters"
                missing.append(NotRestored(f"callback {type(callback).__name__}", why))
        return missing + [NotRestored(f"callback {name}", "the trainer has none such now") for name, _ in left]


def pace_of(trainer: Trainer) -> dict[str, int | None]:
    """How many samples a trainer has, and how many go into one of its steps."""
    arguments = trainer.args
    batch = arguments.train_batch_size * trainer.accelerator.num_processes
    return {
        "samples": LoaderSource.length_of(trainer.train_dataset),
        "batch": batch,
        "step": batch * arguments.gradient_accumulation_steps,
    }


def steps_before(
    state: Mapping[str, Any], batches: int, trainer: Trainer, length: int, steps_of_an_epoch: int, on_change: OnChange
) -> int:
    """The steps that the trainer counts up to where a snapshot is, with its loader as it is now.

    Args:
        state: the snapshot's note.
        batches: of its epoch.
        length: of the loader.

    Raises:
        ResumeError: what is left of the epoch is no whole number of steps.
    """
    before, now = state.get(PACE), pace_of(trainer)
    step, epoch = int(state["global_step"]), float(state["epoch"] or 0.0)
    if before is None or (before["samples"], before["step"]) == (now["samples"], now["step"]):
        return step
    whole = int(epoch)
    within = batches > 0 and epoch > whole
    if within and on_change is OnChange.REFUSE:
        return step
    if not within or on_change is OnChange.RESTART_EPOCH:
        return whole * steps_of_an_epoch
    left = int(before["samples"] or 0) - batches * int(before["batch"] or 0)
    batch = int(now["batch"] or 1)
    done = length - (left // batch if trainer.args.dataloader_drop_last else -(-left // batch))
    if done < 0 or done % trainer.args.gradient_accumulation_steps:
        raise ResumeError(
            f"data: continue: the {left:,} samples that are left of the epoch are no whole number of steps",
            hint="data: restart_epoch starts the interrupted epoch again with this loader",
        )
    return whole * steps_of_an_epoch + done // int(trainer.args.gradient_accumulation_steps)


def _text_of(value: Any) -> str:
    """`value` as JSON, as far as it is: users put anything into what a trainer logs and remembers."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(_json_of(value))


def _json_of(value: Any, depth: int = 0, *, endless: bool = True) -> Any:
    """`value` with numbers of any make as plain ones, and None in the place of all that is not JSON.

    Args:
        endless: NaN and infinity stay.
    """
    if depth > _MOST_DEPTH:
        return None
    if isinstance(value, Mapping):
        return {
            str(key).encode(errors="replace").decode(): _json_of(one, depth + 1, endless=endless)
            for key, one in value.items()
            if isinstance(key, str | int | float | bool)
        }
    if isinstance(value, list | tuple):
        return [_json_of(one, depth + 1, endless=endless) for one in value]
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    try:
        number = None if value is None else Surroundings.plain_number(value)
        finite = number is None or math.isfinite(number)
    except (ValueError, OverflowError):  # it is none, or a whole number that no float has
        return None
    return number if finite or endless else None


def counts(state: TrainerState, counted: Callable[[], tuple[int, float]]) -> tuple[int, float]:
    """The steps and epochs of a trainer.

    Args:
        counted: as we have counted them: for where the trainer, or a callback of the user, has put what is no number.
    """
    try:
        step = Surroundings.whole_number("global_step", state.global_step)
    except ValueError:
        step = counted()[0]
    try:
        epoch = float(Surroundings.plain_number(state.epoch))
    except (ValueError, OverflowError, RuntimeError, TypeError):
        epoch = math.nan
    return step, epoch if math.isfinite(epoch) else counted()[1]


def as_file(state: Mapping[str, Any]) -> str:
    """The text of a `trainer_state.json` with this state; what a later version added is left out."""
    known = {field.name for field in dataclasses.fields(TrainerState)}
    return json.dumps({name: value for name, value in state.items() if name in known})


def _set(callback: Any, state: Mapping[str, Any]) -> list[NotRestored]:
    """Put the state of a callback back; its arguments are the script's, so those that differ are returned."""
    values, saved = dict(state["attributes"]), dict(state.get("args", {}))
    if isinstance(callback, TrainerControl):
        values |= saved  # it has no attributes besides its arguments
        saved.clear()
        values["should_training_stop"] = callback.should_training_stop  # a stop may have been for the restart only
    for name, value in values.items():
        setattr(callback, name, value)
    now = callback.state()["args"] if saved else {}
    texts = {name: (_text_of(value), _text_of(now.get(name))) for name, value in saved.items()}
    return [
        NotRestored(f"{name} of {type(callback).__name__}", f"it was {then}, and is {new} now, as the script made it")
        for name, (then, new) in texts.items()
        if then != new
    ]


def _is_foreign(callback: object) -> bool:
    """Whether a callback is the user's and remembers something."""
    return not type(callback).__module__.startswith("transformers.") and bool(vars(callback))


def require_same_batch(loader: Any, batches: int, saved: int) -> None:
    """Raises ResumeError if transformers would not go on with the batch behind the snapshot.

    Args:
        batches: after so many of the epoch transformers goes on.
        saved: after so many the snapshot was taken.
    """
    whole = source_of(loader).dealt
    if whole is None and batches != saved:
        raise ResumeError(
            f"transformers resumes after {batches} batches of the epoch, the snapshot is after {saved}: {_OTHERS}",
            hint=_SAME,
        )
    # Another number of ranks has begun this epoch: what was trained is counted in their batches.
    if whole is not None and len(loader) - batches != (left := whole - saved):
        raise ResumeError(
            f"transformers would train {len(loader) - batches} more batches of the epoch, the snapshot leaves "
            f"{left} to this number of processes: {_OTHERS}",
            hint=_SAME,
        )


def require_same_epoch(epoch: int, saved: int) -> None:
    """Raises ResumeError if transformers would not go on in the snapshot's epoch."""
    if epoch != saved:
        raise ResumeError(
            f"transformers resumes in epoch {epoch}, the snapshot is of epoch {saved}: {_OTHERS}", hint=_SAME
        )
