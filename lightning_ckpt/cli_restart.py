"""Lets a LightningCLI job restart into the same log folder."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.cli import SaveConfigCallback

from ckpt_engine.checkpointer import Checkpointer
from lightning_ckpt.compat import callbacks_of
from lightning_ckpt.fresh import AUTO


def allow_restart(trainer: pl.Trainer, checkpointer: Checkpointer) -> None:
    """Let LightningCLI overwrite the configuration file that the first start of this run has written.

    Its `SaveConfigCallback` refuses to, and would end every restart with the same log folder.

    Args:
        checkpointer: where the nearest tier has snapshots it is a restart even if the command line does not say so.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, SaveConfigCallback):
            asked = getattr(callback.config, "ckpt_path", None) == AUTO
            callback.overwrite = callback.overwrite or asked or bool(checkpointer.snapshots(nearest=True))
