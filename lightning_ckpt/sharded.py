"""Runs with DTensors (`ModelParallelStrategy`): their live state, and putting it back, without gathering anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy

from ckpt_engine.restore.shells import optimizer_shell
from ckpt_engine.store.manifest import Manifest


def is_sharded(trainer: pl.Trainer) -> bool:
    """Whether the strategy leaves saving and restoring of weights to itself."""
    return isinstance(trainer.strategy, ModelParallelStrategy)


@contextmanager
def live_states(trainer: pl.Trainer) -> Iterator[None]:
    """While this lasts the strategy's states are the live ones: it would gather them, with all ranks at once."""
    if not is_sharded(trainer):
        yield
        return
    strategy: Any = trainer.strategy
    strategy.lightning_module_state_dict = trainer.lightning_module.state_dict
    strategy.optimizer_state = _state_of
    try:
        yield
    finally:
        del strategy.lightning_module_state_dict
        del strategy.optimizer_state


def _state_of(optimizer: Any) -> Any:
    return (optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict()


def live_of(trainer: pl.Trainer, module: pl.LightningModule) -> Callable[[Manifest], Any] | None:
    """What a snapshot is read into, for a manifest; None: Lightning puts the state back itself."""
    if not is_sharded(trainer):
        return None

    def live(manifest: Manifest) -> Any:
        nodes = manifest.tree.get("optimizer_states", [])
        pairs = zip(trainer.optimizers, nodes, strict=False)
        shells = [optimizer_shell(optimizer, node, manifest.entries) for optimizer, node in pairs]
        shells += [{"state": {}} for _ in nodes[len(shells) :]]
        return {"state_dict": module.state_dict(), "optimizer_states": shells}

    return live


def restore_optimizers(trainer: pl.Trainer, state: Mapping[str, Any]) -> None:
    """Give the optimizers their states, whose DTensors are divided as the parameters are."""
    for optimizer, saved in zip(trainer.optimizers, state.get("optimizer_states", []), strict=False):
        optimizer.load_state_dict(saved)
