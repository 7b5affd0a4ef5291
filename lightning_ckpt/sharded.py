"""Which processes train together under a Lightning strategy, and the live state of models that they divide.

Nothing of a divided model (`ModelParallelStrategy`, `FSDPStrategy`) is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
)

from ckpt_engine.adapter import ConfigError, LiveModel, Manifest, ProcessGroupRanks, ResumeError
from lightning_ckpt.compat_data import both

_LAYOUT = "tensor_parallel_size"
_HINTS = {
    "DeepSpeedStrategy": "it keeps its state to itself: use its own checkpoints, or FSDP2 with ModelParallelStrategy",
}


def is_sharded(trainer: pl.Trainer) -> bool:
    """Whether the strategy leaves saving and restoring of weights to itself."""
    return isinstance(trainer.strategy, both(ModelParallelStrategy, FSDPStrategy))


def require_trained(trainer: pl.Trainer) -> None:
    """As `FlatModels.require_trained`, for all optimizers."""
    if (flat := model_of(trainer).flat) is not None:
        for optimizer in trainer.optimizers:
            flat.require_trained(optimizer)


def model_of(trainer: pl.Trainer) -> LiveModel:
    """The model; the root that FSDP1 wraps is not the LightningModule but around it."""
    is_wrapped = isinstance(trainer.strategy, both(FSDPStrategy))
    return LiveModel(trainer.lightning_module, trainer.strategy.model if is_wrapped else None)


def notes(trainer: pl.Trainer) -> dict[str, Any]:
    """What a manifest keeps of the layout: nothing where each rank has samples of its own."""
    size = _tensor_parallel(trainer)
    return {_LAYOUT: size} if size > 1 else {}


def require_layout(manifest: Manifest, trainer: pl.Trainer) -> None:
    """Raise where a resume is impossible because other ranks share their samples and streams.

    Raises:
        ResumeError: says both layouts.
    """
    before, now = team_sizes(manifest, trainer)
    if before != now and manifest.world_size == trainer.world_size:
        raise ResumeError(
            f"snapshot {manifest.info.id} was taken by {manifest.world_size} ranks with tensor_parallel_size={before}, "
            f"and this run has as many ranks with {now}",
            hint="start it with the same tensor_parallel_size, or with another number of ranks, which may change both",
        )


def team_sizes(manifest: Manifest, trainer: pl.Trainer) -> tuple[int, int]:
    """How many ranks share a model, then and now."""
    return int(manifest.notes.get(_LAYOUT, 1)), _tensor_parallel(trainer)


def wrappers_of(trainer: pl.Trainer) -> list[torch.nn.Module]:
    """The model with what DDP wraps around it, once it trains."""
    return [one for one in (trainer.strategy.model,) if one is not None]


def _tensor_parallel(trainer: pl.Trainer) -> int:
    strategy = trainer.strategy
    # Its dimensions are data_parallel and tensor_parallel.
    return int(strategy.device_mesh.shape[-1]) if isinstance(strategy, both(ModelParallelStrategy)) else 1


@contextmanager
def live_states(trainer: pl.Trainer) -> Iterator[None]:
    """While this lasts the strategy's states are the live ones: it would gather them, with all ranks at once."""
    if not is_sharded(trainer):
        yield
        return
    live: Any = trainer.strategy
    model = model_of(trainer)
    live.lightning_module_state_dict = model.state
    live.optimizer_state = model.state
    try:
        yield
    finally:
        del live.lightning_module_state_dict
        del live.optimizer_state


def live_of(trainer: pl.Trainer) -> Callable[[Manifest], Any] | None:
    """What a snapshot is read into, for a manifest; None: Lightning puts the state back itself."""
    if not is_sharded(trainer):
        return None
    model, key = model_of(trainer), "optimizer_states"
    return lambda manifest: {"state_dict": model.state(), key: model.shells(trainer.optimizers, manifest, key)}


def ranks_of(trainer: pl.Trainer) -> ProcessGroupRanks | None:
    """All ranks of `trainer`; None: it is one process.

    Parameters and what optimizers know of them are the same on all ranks of DDP; DTensors and FSDP1 tell who has what.
    Buffers are those of rank 0, which DDP hands to the others before the next forward. Streams, positions and metrics
    are each rank's own.

    Raises:
        ConfigError: a strategy whose state is divided in ways that are not supported.
    """
    strategy = trainer.strategy
    if trainer.world_size == 1 or isinstance(strategy, both(SingleDeviceStrategy)):
        return None
    # Kinds of DDP divide the optimizer's state.
    if type(strategy) not in both(DDPStrategy, ModelParallelStrategy) and not isinstance(strategy, both(FSDPStrategy)):
        raise ConfigError(
            f"several processes are supported with DDP, FSDP and ModelParallelStrategy, and this run has "
            f"{type(strategy).__name__}",
            hint=_HINTS.get(type(strategy).__name__, "use strategy='ddp', 'ddp_spawn' or 'ddp_fork'"),
        )
    return ProcessGroupRanks()


def replicas_of(trainer: pl.Trainer) -> int:
    """By how many the training samples are divided: ranks that share a model have the same ones."""
    strategy = trainer.strategy
    if trainer.world_size == 1 or not isinstance(strategy, both(ParallelStrategy)):
        return 1
    return int(strategy.distributed_sampler_kwargs["num_replicas"])
