"""Exact, asynchronous snapshots of a PyTorch-Ignite trainer: an adapter on `ckpt_engine.adapter` alone."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from ignite.engine import Engine as Trainer
from ignite.engine import Events, State
from torch.utils.data import DataLoader

from ckpt_engine.adapter import ConfigError, Engine, LoaderSource, NamedParts, Surroundings, Tracker


def run(
    trainer: Trainer,
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
        CkptError: as `Tracker`; and what the trainer raises, after the last finished step is saved.
    """
    # Ignite asks for a batch before it counts the iteration, so its counters belong to the fetch boundary.
    parts = NamedParts({"trainer": trainer, **objects})
    if not parts.optimizers:
        raise ConfigError("run() needs the optimizer: its steps are the steps of the run", hint="run(…, optimizer=…)")
    engine = Engine(config)
    tracker: Tracker | None = None
    try:
        sources = {"loader": LoaderSource(loader, loader)}
        tracker = Tracker(engine, parts, sources, Surroundings(), trainer="ignite", folder=Path.cwd())
        _train(trainer, loader, max_epochs, tracker)
    except BaseException as error:
        if tracker is not None:
            tracker.failed_with(error)
            tracker.release()
        engine.close(Tracker.exception_wait_seconds, failed=True)
        raise
    engine.close()
    return trainer.state


def _train(trainer: Trainer, loader: DataLoader[Any], max_epochs: int, tracker: Tracker) -> None:
    state = trainer.state
    if state.epoch_length is not None and state.iteration >= state.epoch_length * max_epochs:
        tracker.finish()  # Ignite trains a finished run once more
        return
    # Retention may rank snapshots by what the trainer measures.
    with trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: tracker.report(state.metrics)):
        trainer.run(loader, max_epochs=max_epochs)
    tracker.finish(complete=True)  # Ignite never asks for the batch that does not exist
