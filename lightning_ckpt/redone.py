"""Checkpoint files that Lightning writes again: steps after the snapshot are redone, and so are their files.

`ModelCheckpoint` takes a name that is there for another run's and appends `-v1`. Files of this run from after the
snapshot it writes again instead. Each file says of which run it is.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ckpt_engine.store.digest import digest
from ckpt_engine.store.manifest import SnapshotInfo
from lightning_ckpt.compat import callbacks_of

MARK = "ckpt_engine_run"
"""The key in a checkpoint of Lightning's that says beside which of our runs it was written."""

Wrap = Callable[[Any, str, Callable[..., Any]], None]


def mark_of(root_url: str) -> str:
    """What `MARK` says of a run in this place."""
    return digest(root_url.encode())


def write_again(trainer: pl.Trainer, root_url: str, info: SnapshotInfo, wrap: Wrap) -> None:
    """From now on names of files that the interrupted run wrote after the snapshot are free."""
    began, mark = time.time(), mark_of(root_url)

    def exists_for(original: Callable[..., bool]) -> Callable[..., bool]:
        def file_exists(filepath: Any, trainer: pl.Trainer) -> bool:
            if not original(filepath, trainer):
                return False
            mine = trainer.is_global_zero and _is_redone(Path(filepath), info.created, began, mark)
            return not trainer.strategy.reduce_boolean_decision(mine, all=False)

        return file_exists

    for callback in callbacks_of(trainer):
        if isinstance(callback, ModelCheckpoint):
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
