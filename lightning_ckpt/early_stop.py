"""Whether `EarlyStopping` has stopped the training: such a stop holds after a restart too."""

from __future__ import annotations

from dataclasses import dataclass

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping

from lightning_ckpt.compat import callbacks_of
from lightning_ckpt.compat_data import both


@dataclass(eq=False)
class EarlyStopWatch:
    """Tells a stop by `EarlyStopping`, which is part of a run, from all other reasons to set `trainer.should_stop`.

    Args:
        _trainer: that is watched. `before` is called ahead of the callbacks that may stop it, `after` behind them.
    """

    _trainer: pl.Trainer
    _stopped: bool = False
    _epoch: int = 0
    by_early_stopping: bool = False

    def before(self) -> None:
        self._stopped, self._epoch = bool(self._trainer.should_stop), self._trainer.current_epoch

    def after(self) -> None:
        if self._trainer.should_stop and not self._stopped:
            self.by_early_stopping |= any(
                callback.stopped_epoch == self._epoch
                for callback in callbacks_of(self._trainer)
                if isinstance(callback, both(EarlyStopping))
            )
