"""The state of a Lightning run at one instant, as the tree that the engine stores.

Top-level keys are those of a Lightning checkpoint, so that a snapshot exports to a `.ckpt` file by leaving out our own
key, `ckpt_engine`. That key has what an exact resume needs besides: running means, metrics, gradients. Every `dump_…`
returns references to live tensors (the engine copies them); every `restore_…` puts them back and returns what could
not be.

`BoundaryKind` names the instants. The snapshot instant is the fetch boundary: the last batch is completely finished
(validation, schedulers, hooks, counters) and the next one is about to be asked for. `on_train_batch_end` is not: a
validation that is due would be lost, and after the last batch of an epoch so would be the epoch.

Steps after the snapshot are redone, and so are their files: `write_again` lets `ModelCheckpoint` overwrite files of
this run from after the snapshot instead of appending `-v1`. Each file says of which run it is.
"""

from __future__ import annotations

import builtins
import copy
import pickle
import time
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from torchmetrics import Metric

from ckpt_engine.adapter import NotRestored, TrainerResume, Variables, of_framework, problems
from lightning_ckpt.compat import LightningInternals, callbacks_of, is_lightnings, metric_progress, set_metric_progress
from lightning_ckpt.compat_data import both, is_overridden
from lightning_ckpt.sharded import is_sharded, live_states, model_of, wrappers_of

_HPARAMS = ("hyper_parameters", "datamodule_hyper_parameters")
_HPARAMS_TYPES = ("hparams_type", "datamodule_hparams_type")
MODEL = "model"
"""The LightningModule among the components."""
_WEIGHTS = ("current_model_state", "state_dict")
"""Keys of a checkpoint under which are the weights that are trained: the first of them that is there."""
_META_FIELDS = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
_REDUCTIONS = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in ((torch, ("mean", "sum", "min", "max")), (builtins, ("sum", "min", "max")))
    for name in names
}
BAR_NAMES = frozenset({"ckpt", "ckpt_stall_ms", "ckpt_every", "ckpt_MB", "ckpt_age_s"})
"""Entries of the progress bar that are ours; they are no part of a snapshot."""
Groups = list[dict[str, Any]]
MARK = "ckpt_engine_run"
"""The key in a checkpoint of Lightning's that says beside which of our runs it was written."""
OF_LIGHTNING = vars(pl.LightningModule()).keys() | vars(pl.LightningDataModule()).keys()
"""Attributes of Lightning's own classes, which users' classes inherit."""
_SETTINGS = frozenset(
    {
        "accumulate_grad_batches",
        "gradient_clip_val",
        "check_val_every_n_epoch",
        "limit_val_batches",
        "log_every_n_steps",
    }
)
"""Arguments of a trainer that a callback may change while it trains."""


class FitParts:
    """What a snapshot of a Lightning run consists of: what Lightning puts into a checkpoint of its own.

    Args:
        internals: of the trainer.
        trainer: whose state it is.
        module: the LightningModule.

    Attributes:
        left_out: paths of hyper-parameters that no snapshot has, and why.
    """

    def __init__(self, internals: LightningInternals, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._internals = internals
        self._trainer = trainer
        self.modules: Mapping[str, torch.nn.Module] = {MODEL: module}
        self.left_out: dict[str, str] = {}
        self._looked = False
        self._callbacks: list[Callback] = []
        self._stateful: dict[str, Callback] = {}

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        return named_optimizers(self._trainer)

    @property
    def objects(self) -> Mapping[str, Any]:
        schedulers = {f"scheduler {n}": one.scheduler for n, one in enumerate(self._trainer.lr_scheduler_configs)}
        callbacks = callbacks_of(self._trainer)
        if callbacks != self._callbacks:
            self._callbacks = list(callbacks)
            stateful = (one for one in enumerate(callbacks) if is_overridden("state_dict", one[1], parent=Callback))
            self._stateful = {f"callback {n}, a {type(one).__name__},": one for n, one in stateful}
        return {**self.modules, **self.optimizers, **schedulers, **self._stateful}

    @property
    def flat(self) -> Any:
        return model_of(self._trainer).flat

    def wrappers(self) -> list[torch.nn.Module]:
        """See `TrainerParts.wrappers`."""
        return wrappers_of(self._trainer)

    def loaders(self) -> dict[str, Any]:
        """See `TrainerParts.loaders`."""
        return {name: getattr(self._trainer, name) for name in ("train_dataloader", "val_dataloaders")}

    @cached_property
    def unknown(self) -> str:
        """What of the state only the user's code knows: a step that has its batch cannot be undone. Or ""."""
        data: Any = self._trainer.datamodule  # type: ignore[attr-defined]
        what = ""
        if is_overridden("on_save_checkpoint", self.modules[MODEL]):
            what = "the model's on_save_checkpoint"
        elif data is not None and is_overridden("state_dict", data, parent=pl.LightningDataModule):
            what = "the data module's state"
        for callback in callbacks_of(self._trainer):
            if is_overridden("on_save_checkpoint", callback, parent=Callback) and not is_lightnings(type(callback)):
                what = what or f"{type(callback).__name__}'s on_save_checkpoint"
        return what and f"it is not known what of {what} the step has changed"

    def owner(self, path: tuple[Any, ...]) -> torch.nn.Module | torch.optim.Optimizer | None:
        """See `Components.owner`."""
        if path[0] == "optimizer_states":
            return self._trainer.optimizers[path[1]] if path[2:3] == ("state",) else None
        return self.modules[MODEL] if path[0] in _WEIGHTS and len(path) == 2 else None

    def state(self) -> dict[str, Any]:
        """A checkpoint, with references to live tensors."""
        with live_states(self._trainer):
            state = self._internals.dump_checkpoint()
        state.pop(MARK, None)  # for Lightning's own files
        # Lightning would restore a loader that has its own state a second time, after we did.
        state["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        self._drop_unstorable(state)
        model = model_of(self._trainer)
        for key in () if is_sharded(self._trainer) else state.keys() & set(_WEIGHTS):
            state[key] = model.canonical(state[key])
        return state

    def _drop_unstorable(self, state: dict[str, Any]) -> None:
        """Hyper-parameters may hold any object; Lightning does not need them to resume, so those are left out."""
        for key in _HPARAMS_TYPES:
            state.pop(key, None)
        if not self._looked:
            self._looked = True
            found = {
                f"{key}/{name}": problems(value, (key, name))
                for key in _HPARAMS
                for name, value in dict(state.get(key) or {}).items()
            }
            self.left_out.update({path: problem for path, problem in found.items() if problem})
        for key in _HPARAMS:
            if any(path.startswith(f"{key}/") for path in self.left_out):
                state[key] = {n: v for n, v in dict(state[key]).items() if f"{key}/{n}" not in self.left_out}


def as_of(
    kind: BoundaryKind, progress: Mapping[str, Any], undo: Callable[..., Any] | None, state: dict[str, Any]
) -> dict[str, Any]:
    """Make of a checkpoint, as it is now, one of a boundary that Lightning itself resumes exactly from.

    Args:
        kind: of the boundary.
        progress: at the boundary.
        undo: takes out of the model what a step has done since; None: nothing was done.
    """
    fit_loop = state["loops"]["fit_loop"]
    if undo is not None:
        fit_loop["epoch_loop.batch_progress"] = copy.deepcopy(progress["batch"])
        fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] = progress["stepped"]
        step = fit_loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
        for span in ("total", "current"):
            done = step["step"][span]["completed"]
            step["step"][span]["ready"] = done
            step["zero_grad"][span].update(dict.fromkeys(("ready", "started", "completed"), done))
        key = next(key for key in _WEIGHTS if key in state)
        state[key] = undo({MODEL: state[key]})[MODEL]
    _canonicalise(fit_loop, kind)
    return state


def _canonicalise(fit_loop: dict[str, Any], kind: BoundaryKind) -> None:
    """Rewrite the counters to a form that Lightning itself resumes from without repeating or losing anything."""
    if kind is BoundaryKind.VALIDATED:
        # As saved in `on_train_batch_end`: otherwise Lightning counts one more logger step after the validation.
        for span in ("total", "current"):
            fit_loop["epoch_loop.batch_progress"][span]["completed"] -= 1
        fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
    elif kind is BoundaryKind.STOPPED:
        for span in ("total", "current"):
            fit_loop["epoch_progress"][span]["processed"] -= 1


def results_now(internals: LightningInternals) -> Callable[[], dict[str, Any]]:
    """The accumulators behind `self.log` as they are now, with everything needed to make them again.

    They are copied now and described when it is called: what describes an accumulator never changes.
    """
    rows = [(key, result, _copied(_values(result))) for key, result in internals.results.items()]
    return lambda: {key: _described(result, values, internals.reduces) for key, result, values in rows}


def _values(result: Any) -> dict[str, Any]:
    update_count, cache = metric_progress(result)
    state = {
        "is_tensor": result.is_tensor,
        "has_reset": result.has_reset,
        "update_count": update_count,
        "cache": cache,
    }
    if result.is_tensor:
        state["value"] = result.value
        if result.meta.is_mean_reduction:
            state["weight"] = result.cumulated_batch_size
    return state


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """With tensors of its own."""
    return {key: one.detach().clone() if isinstance(one, torch.Tensor) else one for key, one in values.items()}


def _described(result: Any, values: Mapping[str, Any], reduces: bool) -> dict[str, Any]:
    meta, sync = result.meta, result.meta.sync
    return {
        "meta": {field: getattr(meta, field) for field in _META_FIELDS},
        "reduce": next((name for name, fx in _REDUCTIONS.items() if fx is meta.reduce_fx), None),
        "sync": {
            "should": sync.should,
            "rank_zero_only": sync.rank_zero_only,
            "grouped": sync.group is not None,
            "known": reduces,
        },
        "state": values,
    }


def restore_results(
    internals: LightningInternals, trainer: pl.Trainer, module: pl.LightningModule, saved: Mapping[str, Any]
) -> list[NotRestored]:
    """Make the accumulators again, as they were after the last trained batch."""
    missing: list[NotRestored] = []
    metrics = {name: one for name, one in module.named_modules() if isinstance(one, Metric)}
    internals.results.clear()
    for key, entry in saved.items():
        meta = entry["meta"]
        if entry["sync"]["grouped"] or entry["reduce"] is None:
            missing.append(NotRestored(f"running value of {meta['name']!r}", "it was logged with a process group"))
            continue
        if internals.reduces and not entry["sync"].get("known", True):
            if entry["state"]["is_tensor"] and meta["on_epoch"]:
                missing.append(
                    NotRestored(
                        f"running value of {meta['name']!r}", "of one process, which does not know whether to reduce it"
                    )
                )
            continue
        metric = None if entry["state"]["is_tensor"] else metrics.get(meta["metric_attribute"])
        if not entry["state"]["is_tensor"] and metric is None:
            missing.append(
                NotRestored(f"metric {meta['name']!r}", f"the model has no {meta['metric_attribute']!r} now")
            )
            continue
        internals.results[key] = _make_result(internals, trainer, entry, metric)
    return missing


def _make_result(
    internals: LightningInternals, trainer: pl.Trainer, entry: Mapping[str, Any], metric: Metric | None
) -> Any:
    result_type, meta_type, sync_type = internals.result_types()
    state = entry["state"]
    meta = meta_type(**entry["meta"], reduce_fx=_REDUCTIONS[entry["reduce"]])
    # `self.log` compares the whole metadata with its own, including the strategy's reduce function.
    meta.sync = sync_type(
        _should=entry["sync"]["should"] and internals.reduces,
        fn=trainer.strategy.reduce,
        rank_zero_only=entry["sync"]["rank_zero_only"],
    )
    result = result_type(meta, state["is_tensor"])
    result.has_reset = state["has_reset"]
    set_metric_progress(result, state["update_count"], state["cache"])
    if metric is not None:
        result.value = metric
    elif state["is_tensor"]:
        result.value = state["value"]
        if meta.is_mean_reduction:
            result.cumulated_batch_size = state["weight"]
    return result


def dump_tables(internals: LightningInternals) -> dict[str, Any]:
    """The tables behind `callback_metrics`, `logged_metrics`, `progress_bar_metrics`, and where logging stands."""
    tables = {
        name: {
            key: value
            for key, value in table.items()
            if key not in BAR_NAMES
            and isinstance(value, torch.Tensor | int | float | str)
            and problems({key: value}, (name,)) is None
        }
        for name, table in internals.metric_tables.items()
    }
    first, fx = internals.log_position
    return {**tables, "first_batch": first, "fx": fx}


def restore_tables(internals: LightningInternals, device: torch.device, saved: Mapping[str, Any]) -> None:
    """Put the metric tables back."""
    for name, table in internals.metric_tables.items():
        table.update({key: one.to(device) if hasattr(one, "to") else one for key, one in saved[name].items()})
    internals.log_position = (saved["first_batch"], saved["fx"])


def named_optimizers(trainer: pl.Trainer) -> dict[str, torch.optim.Optimizer]:
    """By the names that reports give them."""
    return {f"optimizers[{number}]": optimizer for number, optimizer in enumerate(trainer.optimizers)}


def named_schedulers(trainer: pl.Trainer) -> dict[str, Any]:
    """As `named_optimizers`."""
    return {f"lr_schedulers[{number}]": one.scheduler for number, one in enumerate(trainer.lr_scheduler_configs)}


def restore_groups(
    trainer: pl.Trainer, parts: FitParts, states: list[dict[str, Any]], saved: Mapping[str, list[list[str]]]
) -> list[tuple[torch.optim.Optimizer, Groups]]:
    """Group the parameters as they were, where training had added groups; returns the groups of this process.

    Args:
        saved: the names of the parameters, by optimizer; only of those that had more groups than now.
    """
    live = {f"{MODEL}.{name}": one for name, one in parts.modules[MODEL].named_parameters(remove_duplicate=False)}
    regrouped = []
    for (key, optimizer), state in zip(named_optimizers(trainer).items(), states, strict=False):
        names = saved.get(key, [])
        if not names or not all(name in live for group in names for name in group):
            continue
        regrouped.append((optimizer, optimizer.param_groups))
        optimizer.param_groups = [
            {**options, "params": [live[name] for name in group]}
            for options, group in zip(state["param_groups"], names, strict=True)
        ]
    return regrouped


class BoundaryKind(StrEnum):
    """What kind of instant a snapshot shows. Stored in snapshots: the values never change."""

    START = "start"
    """The epoch has started, nothing of it was trained."""
    PLAIN = "plain"
    """Between two batches."""
    VALIDATED = "validated"
    """Between two batches, with a validation in between."""
    ACCUMULATING = "accumulating"
    """Between two batches whose gradients belong to the same optimizer step."""
    STOPPED = "stopped"
    """Training ended in the middle of an epoch."""
    FINISHED = "finished"
    """An epoch, and with it training, ended."""


def kind_of(internals: LightningInternals, *, validated: bool) -> BoundaryKind:
    """The kind of the fetch boundary that the trainer is at.

    Args:
        validated: a validation ran since the last batch.
    """
    if internals.batches_in_epoch == 0:
        return BoundaryKind.START
    if internals.accumulating:
        return BoundaryKind.ACCUMULATING
    return BoundaryKind.VALIDATED if validated else BoundaryKind.PLAIN


def write_again(
    trainer: pl.Trainer, root_url: str, created: float, wrap: Callable[[Any, str, Callable[..., Any]], None]
) -> None:
    """From now on names of files that the interrupted run wrote after the snapshot are free."""
    began, mark = time.time(), TrainerResume.mark_of(root_url)

    def exists_for(original: Callable[..., bool]) -> Callable[..., bool]:
        def file_exists(filepath: Any, trainer: pl.Trainer) -> bool:
            if not original(filepath, trainer):
                return False
            mine = trainer.is_global_zero and _is_redone(Path(filepath), created, began, mark)
            return not trainer.strategy.reduce_boolean_decision(mine, all=False)

        return file_exists

    for callback in callbacks_of(trainer):
        if isinstance(callback, both(ModelCheckpoint)):
            wrap(callback, "file_exists", exists_for(callback.file_exists))


def _is_redone(path: Path, after: float, before: float, mark: str) -> bool:
    """Whether a file was written between these times by the run of this mark."""
    if not path.is_file() or not after < path.stat().st_mtime < before:
        return False
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True).get(MARK)
    except (pickle.UnpicklingError, RuntimeError, AttributeError):
        return False  # of another program, or cut off: it stays
    return bool(found == mark)


def audited(trainer: pl.Trainer, module: pl.LightningModule, left_out: Collection[Callback]) -> dict[str, Any]:
    """Model, data module, the user's callbacks, and the trainer's settings, by the names that users know them by."""
    data: Any = getattr(trainer, "datamodule", None)
    own = [one for one in callbacks_of(trainer) if not of_framework(type(one)) or isinstance(one, both(LambdaCallback))]
    callbacks = [one for one in own if one not in left_out]
    return {
        "model": module,
        **({} if data is None else {"datamodule": data}),
        **{f"callbacks.{type(one).__name__}": one for one in callbacks},
        "trainer": Variables(partial(getattr, trainer), _SETTINGS, module=trainer),
    }
