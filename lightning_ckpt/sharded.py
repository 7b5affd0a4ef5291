"""Which processes train together under a Lightning strategy, and the live state of models that they divide.

Nothing of a divided model (`ModelParallelStrategy`, `FSDPStrategy`) is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
)

from ckpt_engine.data.rng import Teams
from ckpt_engine.errors import ConfigError, ResumeError
from ckpt_engine.loop.components import Shapes, put_back, state_of, weight_shapes
from ckpt_engine.loop.distributed_models import FlatModels, flat_models
from ckpt_engine.ranks.process_group import ProcessGroupRanks
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.state.sharding import optimizer_shell
from ckpt_engine.store.manifest import Manifest
from lightning_ckpt.compat_data import both

_LAYOUT = "tensor_parallel_size"


def is_sharded(trainer: pl.Trainer) -> bool:
    """Whether the strategy leaves saving and restoring of weights to itself."""
    return isinstance(trainer.strategy, both(ModelParallelStrategy, FSDPStrategy))


def is_flat(trainer: pl.Trainer) -> bool:
    """Whether FSDP1 divides the model: its `state_dict` would gather all of it."""
    return flat_of(trainer) is not None


def require_trained(trainer: pl.Trainer) -> None:
    """As `FlatModels.require_trained`, for all optimizers."""
    if (flat := flat_of(trainer)) is not None:
        for optimizer in trainer.optimizers:
            flat.require_trained(_plain(optimizer))


def shapes(trainer: pl.Trainer, module: pl.LightningModule) -> Shapes:
    """Shapes of the weights, as a snapshot has them."""
    return weight_shapes(model_of(trainer, module), flat_of(trainer))


def flat_of(trainer: pl.Trainer) -> FlatModels | None:
    """What FSDP1 divides; the root that it wraps is not the LightningModule but around it."""
    return flat_models([_wrapped(trainer)]) if isinstance(trainer.strategy, both(FSDPStrategy)) else None


def _wrapped(trainer: pl.Trainer) -> torch.nn.Module:
    model = trainer.strategy.model
    assert model is not None
    return model


def model_of(trainer: pl.Trainer, module: pl.LightningModule) -> torch.nn.Module:
    """The model; where FSDP1 divides it, with what that wraps around the LightningModule."""
    return module if flat_of(trainer) is None else _wrapped(trainer)


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
    if before != now and manifest.world_size == trainer.world_size:
        raise ResumeError(
            f"snapshot {manifest.info.id} was taken by {manifest.world_size} ranks with tensor_parallel_size={before}, "
            f"and this run has as many with {now}",
            hint="start it with the same tensor_parallel_size, or with another number of ranks, which may change both",
        )


def teams_of(manifest: Manifest, trainer: pl.Trainer) -> Teams:
    """Which ranks share a model, then and now."""
    before = int(manifest.notes.get(_LAYOUT, 1))
    return Teams.of_sizes(manifest.world_size, before, trainer.global_rank, _tensor_parallel(trainer))


def wrappers_of(trainer: pl.Trainer) -> list[torch.nn.Module]:
    """The model with what DDP wraps around it, once it trains."""
    model = trainer.strategy.model
    return [] if model is None else [model]


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
    flat, model = flat_of(trainer), model_of(trainer, trainer.lightning_module)
    live.lightning_module_state_dict = lambda: state_of(model, flat)
    live.optimizer_state = lambda optimizer: state_of(_plain(optimizer), flat)
    try:
        yield
    finally:
        del live.lightning_module_state_dict
        del live.optimizer_state


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = (
        optimizer._optimizer if isinstance(optimizer, both(LightningOptimizer)) else optimizer
    )
    return found


def live_of(trainer: pl.Trainer, module: pl.LightningModule) -> Callable[[Manifest], Any] | None:
    """What a snapshot is read into, for a manifest; None: Lightning puts the state back itself."""
    if not is_sharded(trainer):
        return None

    flat = flat_of(trainer)

    def live(manifest: Manifest) -> Any:
        nodes = manifest.tree.get("optimizer_states", [])
        pairs = zip(trainer.optimizers, nodes, strict=False)
        divided = {} if flat is None else flat.parts()
        shells = [optimizer_shell(optimizer, node, manifest.entries, divided) for optimizer, node in pairs]
        shells += [{"state": {}} for _ in nodes[len(shells) :]]
        return {"state_dict": state_of(model_of(trainer, module), flat), "optimizer_states": shells}

    return live


def restore(trainer: pl.Trainer, state: Mapping[str, Any]) -> None:
    """Give model and optimizers what Lightning will not: their strategies do that where they read a file."""
    flat = flat_of(trainer)
    if flat is not None:
        put_back("state_dict", _wrapped(trainer), state["state_dict"], flat)
    for optimizer, saved in zip(trainer.optimizers, state.get("optimizer_states", []), strict=False):
        put_back("optimizer_states", optimizer, saved, flat)


_HINTS = {
    "DeepSpeedStrategy": "it keeps its state to itself: use its own checkpoints, or FSDP2 with ModelParallelStrategy",
}


def ranks_of(trainer: pl.Trainer) -> Ranks | None:
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
