"""Runs with DTensors (`ModelParallelStrategy`): their live state, and putting it back, without gathering anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy

from ckpt_engine.errors import ResumeError
from ckpt_engine.restore.as_rank import size_of
from ckpt_engine.restore.shells import optimizer_shell
from ckpt_engine.store.manifest import Manifest

_LAYOUT = "tensor_parallel_size"


def is_sharded(trainer: pl.Trainer) -> bool:
    """Whether the strategy leaves saving and restoring of weights to itself."""
    return isinstance(trainer.strategy, ModelParallelStrategy)


def notes(trainer: pl.Trainer) -> dict[str, Any]:
    """What a manifest keeps of the layout: nothing where each rank has samples of its own."""
    size = _tensor_parallel(trainer)
    return {_LAYOUT: size} if size > 1 else {}


def require_layout(manifest: Manifest, trainer: pl.Trainer) -> None:
    """Raise where a resume is impossible because other ranks share their samples and streams.

    Raises:
        ResumeError: says both layouts.
    """
    before, now = int(manifest.notes.get(_LAYOUT, 1)), _tensor_parallel(trainer)
    if before != now or (now > 1 and size_of(manifest) != trainer.world_size):
        raise ResumeError(
            f"snapshot {manifest.info.id} was taken by {size_of(manifest)} ranks with tensor_parallel_size={before}, "
            f"and this run has {trainer.world_size} with {now}",
            hint="start it with the same numbers; Checkpointer.load takes the weights to any layout",
        )


def _tensor_parallel(trainer: pl.Trainer) -> int:
    strategy = trainer.strategy
    # Its dimensions are data_parallel and tensor_parallel.
    return int(strategy.device_mesh.shape[-1]) if isinstance(strategy, ModelParallelStrategy) else 1


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
