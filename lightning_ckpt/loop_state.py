"""State of a Lightning run that its checkpoints leave out: running means, metrics, gradients, groups of parameters.

Every `dump_…` returns references to live tensors (the engine copies them); every `restore_…` puts them back and returns
what could not be.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torchmetrics import Metric

from ckpt_engine.observe.resume_report import NotRestored
from ckpt_engine.snapshot.arguments import numbers_among
from ckpt_engine.tracking import gradients
from lightning_ckpt.compat import Internals, metric_progress, set_metric_progress

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


# ---- self.log


def dump_results(internals: Internals) -> dict[str, Any]:
    """The accumulators behind `self.log`, with everything needed to make them again before the first batch."""
    return {key: _described(result, _values(result)) for key, result in internals.results.items()}


def results_now(internals: Internals) -> Callable[[], dict[str, Any]]:
    """What makes later what `dump_results` would give now: what describes an accumulator never changes."""
    rows = [(key, result, _copied(_values(result))) for key, result in internals.results.items()]
    return lambda: {key: _described(result, values) for key, result, values in rows}


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
    """With tensors of its own. Those in a list are only ever added to and replaced."""
    return {
        name: one.detach().clone() if isinstance(one, torch.Tensor) else list(one) if type(one) is list else one
        for name, one in values.items()
    }


def _described(result: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    meta, sync = result.meta, result.meta.sync
    return {
        "meta": {field: getattr(meta, field) for field in _META_FIELDS},
        "reduce": next((name for name, fx in _REDUCTIONS.items() if fx is meta.reduce_fx), None),
        "sync": {"should": sync.should, "rank_zero_only": sync.rank_zero_only, "grouped": sync.group is not None},
        "state": values,
    }


def restore_results(
    internals: Internals, trainer: pl.Trainer, module: pl.LightningModule, saved: Mapping[str, Any]
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
        metric = None if entry["state"]["is_tensor"] else metrics.get(meta["metric_attribute"])
        if not entry["state"]["is_tensor"] and metric is None:
            missing.append(
                NotRestored(f"metric {meta['name']!r}", f"the model has no {meta['metric_attribute']!r} now")
            )
            continue
        internals.results[key] = _make_result(internals, trainer, entry, metric)
    return missing


def _make_result(internals: Internals, trainer: pl.Trainer, entry: Mapping[str, Any], metric: Metric | None) -> Any:
    result_type, meta_type, sync_type = internals.result_types()
    state = entry["state"]
    meta = meta_type(**entry["meta"], reduce_fx=_REDUCTIONS[entry["reduce"]])
    # `self.log` compares the whole metadata with its own, including the strategy's reduce function.
    meta.sync = sync_type(
        _should=entry["sync"]["should"],
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


# ---- the trainer's metric tables


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [_to(item, device) for item in value] if isinstance(value, list) else value


def dump_tables(internals: Internals, hidden: frozenset[str]) -> dict[str, Any]:
    """The tables behind `callback_metrics`, `logged_metrics`, `progress_bar_metrics`, and where logging stands.

    Args:
        hidden: names in the progress bar that are not the user's.
    """
    tables = {
        name: {key: value for key, value in table.items() if key not in hidden and _plain(value)}
        for name, table in internals.metric_tables.items()
    }
    first, fx = internals.log_position
    return {**tables, "first_batch": first, "fx": fx}


def _plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor | int | float | str)


def restore_tables(internals: Internals, device: torch.device, saved: Mapping[str, Any]) -> None:
    """Put the metric tables back."""
    for name, table in internals.metric_tables.items():
        table.update({key: _to(value, device) for key, value in saved[name].items()})
    internals.log_position = (saved["first_batch"], saved["fx"])


def numbers(internals: Internals, limit: int = 64) -> dict[str, float]:
    """The trainer's callback metrics as plain numbers, for retention by a metric."""
    return numbers_among(internals.metric_tables["callback"], limit)


# ---- gradients and flags


def dump_gradients(module: torch.nn.Module) -> dict[str, Any]:
    """The gradients accumulated so far, by parameter name; of DTensors what this rank has."""
    return {name: gradients.stored(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def restore_gradients(module: torch.nn.Module, saved: Mapping[str, Any]) -> list[NotRestored]:
    """Put accumulated gradients back; must run after Lightning's `zero_grad` at the start of a run."""
    live = dict(module.named_parameters())
    for name, gradient in saved.items():
        if name in live:
            gradients.put_back(live[name], gradient)
    gone = [name for name in saved if name not in live]
    return [NotRestored(f"gradient of {name!r}", "the model has no such parameter now") for name in gone]


# ---- groups of parameters

Groups = list[dict[str, Any]]


def group_sizes(trainer: pl.Trainer) -> list[list[int]]:
    """How many parameters each group of each optimizer has."""
    return [[len(group["params"]) for group in optimizer.param_groups] for optimizer in trainer.optimizers]


def dump_groups(trainer: pl.Trainer, module: torch.nn.Module, at_start: list[list[int]]) -> list[list[list[str]]]:
    """The names of the parameters in each group, where training has changed the groups; `at_start` is `group_sizes`."""
    if group_sizes(trainer) == at_start:
        return []
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
        for optimizer in trainer.optimizers
    ]


def restore_groups(
    trainer: pl.Trainer, module: torch.nn.Module, states: list[dict[str, Any]], saved: list[list[list[str]]]
) -> list[tuple[torch.optim.Optimizer, Groups]]:
    """Group the parameters as they were, where this process has other groups; returns what it had."""
    live = dict(module.named_parameters())
    regrouped = []
    for optimizer, state, names, sizes in zip(trainer.optimizers, states, saved, group_sizes(trainer), strict=False):
        known = all(name in live for group in names for name in group)
        if sizes == [len(group) for group in names] or not known:
            continue
        regrouped.append((optimizer, optimizer.param_groups))
        optimizer.param_groups = [
            {**options, "params": [live[name] for name in group]}
            for options, group in zip(state["param_groups"], names, strict=True)
        ]
    return regrouped
