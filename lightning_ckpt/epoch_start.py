"""Replays `on_train_epoch_start` in an epoch that is resumed in the middle, where Lightning does not call it.

Callbacks and models set up per-epoch things there: the accumulation factor (`GradientAccumulationScheduler`), the
scheduler of `StochasticWeightAveraging`, progress bars, a curriculum, attributes that `training_step` uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, Callback, StochasticWeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from ckpt_engine.observe.resume_report import NotRestored
from lightning_ckpt.compat import Internals, callbacks_of
from lightning_ckpt.kept import Kept
from lightning_ckpt.loop_state import Groups

HOOK = "on_train_epoch_start"
_RESTORES_ITSELF = (BaseFinetuning,)
"""Callbacks whose saved state already contains what their hook did."""


class _InEpoch:
    """A trainer in another epoch."""

    def __init__(self, trainer: pl.Trainer, epoch: int) -> None:
        self._trainer, self.current_epoch = trainer, epoch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


def begin_averaging(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """What `StochasticWeightAveraging` sets up in this hook, but not in its extra epoch after the last one.

    Its scheduler and its count are part of a checkpoint only once they are set up.
    """
    found = [one for one in callbacks_of(trainer) if isinstance(one, StochasticWeightAveraging)]
    late = [one for one in found if trainer.current_epoch > one.swa_end]
    if late:
        kept = Kept(trainer, module, HOOK, {})
        for callback in late:
            earlier: Any = _InEpoch(trainer, callback.swa_end)
            callback.on_train_epoch_start(earlier, module)
        kept.put_back()


def replay(
    internals: Internals,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    saved: Mapping[str, Any],
    regrouped: Sequence[tuple[Optimizer, Groups]],
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
    kept = Kept(trainer, module, HOOK, saved, regrouped)
    with internals.in_hook(HOOK):
        for callback in callbacks:
            callback.on_train_epoch_start(trainer, module)
        if in_module:
            module.on_train_epoch_start()
    return kept.put_back()
