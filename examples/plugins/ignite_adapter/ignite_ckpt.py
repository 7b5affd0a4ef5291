"""Exact, asynchronous snapshots of a PyTorch-Ignite trainer."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from ignite.engine import Engine, State
from torch.utils.data import DataLoader

from ckpt_engine import Checkpointer


def run(
    trainer: Engine,
    loader: DataLoader[Any],
    config: str | PathLike[str] | Mapping[str, Any],
    *,
    max_epochs: int,
    **objects: Any,
) -> State:
    """`trainer.run(loader, max_epochs)` with snapshots; resumes from the newest one, in the middle of an epoch too.

    Args:
        config: as of `Checkpointer`.
        objects: what belongs to the run, by name: model, optimizer, scheduler and all else with a `state_dict`.

    Raises:
        CkptError: as `Checkpointer.track`; and what the trainer raises, after the last finished step is saved.
    """
    with Checkpointer(config) as checkpointer:
        # Ignite asks for a batch before it counts the iteration, so its counters belong to the fetch boundary.
        tracker = checkpointer.track(trainer=trainer, loader=loader, **objects)
        state = trainer.state
        if state.epoch_length is not None and state.iteration >= state.epoch_length * max_epochs:
            return state  # Ignite trains a finished run once more
        trainer.run(loader, max_epochs=max_epochs)
        tracker.finish(complete=True)  # Ignite never asks for the batch that does not exist
        return state
