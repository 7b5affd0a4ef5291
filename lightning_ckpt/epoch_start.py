"""Replays `on_train_epoch_start` in an epoch that is resumed in the middle, where Lightning does not call it.

Callbacks and models set up per-epoch things there: the accumulation factor (`GradientAccumulationScheduler`), the
scheduler of `StochasticWeightAveraging`, progress bars, a curriculum, attributes that `training_step` uses. Whatever
the hooks change of the state that was just restored is put back afterwards, so that only what a snapshot cannot hold
remains of them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, StochasticWeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_ckpt.compat import callbacks_of

_RESTORES_ITSELF = (BaseFinetuning,)
"""Callbacks whose saved state already contains what their hook did."""


def replay(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Call the hooks of callbacks and model as Lightning would, and keep the restored state as it is."""
    callbacks = [
        callback
        for callback in callbacks_of(trainer)
        if is_overridden("on_train_epoch_start", callback, parent=Callback)
        and not isinstance(callback, _RESTORES_ITSELF)
    ]
    in_module = is_overridden("on_train_epoch_start", module)
    if not callbacks and not in_module:
        return
    weights = {name: tensor.detach().clone() for name, tensor in _tensors(module)}
    options = [[_options(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
    states = [(callback, copy.deepcopy(callback.state_dict())) for callback in callbacks]
    for callback in callbacks:
        callback.on_train_epoch_start(trainer, module)
    if in_module:
        module.on_train_epoch_start()
    _put_back(module, weights)
    for optimizer, groups in zip(trainer.optimizers, options, strict=True):
        for group, saved in zip(optimizer.param_groups, groups, strict=False):
            group.update(saved)
    for callback, state in states:
        # SWA moved its restored state into live objects just now; loading it again would not reach them.
        if state and not isinstance(callback, StochasticWeightAveraging):
            callback.load_state_dict(state)


def _tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _put_back(module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in _tensors(module):
            saved = weights.get(name)
            if saved is not None and saved.shape == tensor.shape and not torch.equal(saved, tensor):
                tensor.copy_(saved)
