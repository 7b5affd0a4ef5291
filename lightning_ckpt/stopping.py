"""The end of a run: who stopped it, and what callbacks did to the weights when it was over."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback, EarlyStopping, StochasticWeightAveraging

from lightning_ckpt.compat import callbacks_of


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
