"""Replays `on_train_epoch_start` in an epoch that is resumed in the middle, where Lightning does not call it.

Callbacks and models set up per-epoch things there: the accumulation factor (`GradientAccumulationScheduler`), the
scheduler of `StochasticWeightAveraging`, progress bars, a curriculum, attributes that `training_step` uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from lightning.pytorch.utilities.model_helpers import is_overridden

from ckpt_engine.observe.resume_report import NotRestored
from lightning_ckpt.compat import Internals, callbacks_of
from lightning_ckpt.kept import Kept

HOOK = "on_train_epoch_start"
_RESTORES_ITSELF = (BaseFinetuning,)
"""Callbacks whose saved state already contains what their hook did."""


def replay(
    internals: Internals, trainer: pl.Trainer, module: pl.LightningModule, saved: Mapping[str, Any]
) -> list[NotRestored]:
    """Call the hooks of callbacks and model as Lightning would, and keep the restored state as it is; see `Kept`."""
    callbacks = [
        callback
        for callback in callbacks_of(trainer)
        if is_overridden(HOOK, callback, parent=Callback) and not isinstance(callback, _RESTORES_ITSELF)
    ]
    in_module = is_overridden(HOOK, module)
    if not callbacks and not in_module:
        return []
    kept = Kept(trainer, module, HOOK, saved)
    with internals.in_hook(HOOK):
        for callback in callbacks:
            callback.on_train_epoch_start(trainer, module)
        if in_module:
            module.on_train_epoch_start()
    return kept.put_back()
