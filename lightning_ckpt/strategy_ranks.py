"""Which processes train together under a Lightning strategy, and what of their states is the same."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
)

from ckpt_engine.errors import ConfigError
from ckpt_engine.ranks.process_group import ProcessGroupRanks
from ckpt_engine.ranks.world import Ranks
from lightning_ckpt.run_state import OWN_KEY

_HINTS = {
    "DeepSpeedStrategy": "it keeps its state to itself: use its own checkpoints, or FSDP2 with ModelParallelStrategy",
}


def ranks_of(trainer: pl.Trainer, module: pl.LightningModule) -> Ranks | None:
    """All ranks of `trainer`; None: it is one process.

    Parameters and what optimizers know of them are the same on all ranks of DDP; DTensors and FSDP1 tell who has what.
    Buffers are those of rank 0, which DDP hands to the others before the next forward. Streams, positions and metrics
    are each rank's own.

    Raises:
        ConfigError: a strategy whose state is divided in ways that are not supported.
    """
    strategy = trainer.strategy
    if trainer.world_size == 1 or isinstance(strategy, SingleDeviceStrategy):
        return None
    # Kinds of DDP divide the optimizer's state.
    if type(strategy) not in (DDPStrategy, ModelParallelStrategy) and not isinstance(strategy, FSDPStrategy):
        raise ConfigError(
            f"several processes are supported with DDP, FSDP and ModelParallelStrategy, and this run has "
            f"{type(strategy).__name__}",
            hint=_HINTS.get(type(strategy).__name__, "use strategy='ddp', 'ddp_spawn' or 'ddp_fork'"),
        )
    parameters = frozenset(name for name, _ in module.named_parameters(remove_duplicate=False))

    def alike(path: tuple[Any, ...]) -> bool:
        if path[0] in ("state_dict", "current_model_state"):
            return len(path) == 2 and path[1] in parameters
        return path[0] == "optimizer_states" and len(path) > 2 and path[2] == "state"

    return ProcessGroupRanks(own={OWN_KEY}, divides=alike)


def replicas_of(trainer: pl.Trainer) -> int:
    """By how many the training samples are divided: ranks that share a model have the same ones."""
    strategy = trainer.strategy
    if trainer.world_size == 1 or not isinstance(strategy, ParallelStrategy):
        return 1
    return int(strategy.distributed_sampler_kwargs["num_replicas"])
