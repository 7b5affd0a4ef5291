"""What of a Lightning run takes part in training besides the trainer itself, for the audit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from ckpt_engine.audit.attributes import of_framework
from ckpt_engine.audit.audit import roots_of_loader
from lightning_ckpt.compat import callbacks_of

OF_LIGHTNING = vars(pl.LightningModule()).keys() | vars(pl.LightningDataModule()).keys()
"""Attributes of Lightning's own classes, which users' classes inherit."""


def audited(trainer: pl.Trainer, module: pl.LightningModule, left_out: Collection[Callback]) -> dict[str, Any]:
    """Model, data module, the user's callbacks and what is in the loaders, by the names that users know them by."""
    data: Any = getattr(trainer, "datamodule", None)
    callbacks = [one for one in callbacks_of(trainer) if not of_framework(one) and one not in left_out]
    return {
        "model": module,
        **({} if data is None else {"datamodule": data}),
        **{f"callbacks.{type(one).__name__}": one for one in callbacks},
        **_in_loaders("train_dataloader", trainer.train_dataloader),
        **_in_loaders("val_dataloaders", trainer.val_dataloaders),
    }


def _in_loaders(name: str, loaders: Any) -> dict[str, Any]:
    """Of a loader, or of any nesting of loaders."""
    if isinstance(loaders, Mapping):
        rows = [(f"{name}[{key!r}]", one) for key, one in loaders.items()]
    elif isinstance(loaders, list | tuple):
        rows = [(f"{name}[{index}]", one) for index, one in enumerate(loaders)]
    else:
        return roots_of_loader(name, loaders)
    return {path: root for inner, one in rows for path, root in _in_loaders(inner, one).items()}
