"""Tracks the objects of a loop that no framework runs, or Lightning Fabric: sorts them and finds what is inside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from ckpt_engine.errors import ConfigError
from ckpt_engine.tracking.engine import Engine
from ckpt_engine.tracking.feed import Source
from ckpt_engine.tracking.parts import NamedParts
from ckpt_engine.tracking.surroundings import Nothing
from ckpt_engine.tracking.tracker import Tracker

_FABRIC_LOADER = "_dataloader"
_FABRIC_COUNTER = "_num_iter_calls"


def track_objects(engine: Engine, objects: Mapping[str, Any]) -> Tracker:
    """See `Checkpointer.track`.

    Raises:
        ConfigError: as there.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        processes = torch.distributed.get_world_size()
        if processes > 1 and engine.ranks is None:
            raise ConfigError(
                f"this is one of {processes} processes, and this Checkpointer does not know of the others",
                hint="pass ranks=ProcessGroupRanks(own={'ckpt_engine'}), see docs/many-ranks.md",
            )
    sources = {name: source for name, value in objects.items() if (source := source_of(value)) is not None}
    parts = NamedParts({name: value for name, value in objects.items() if name not in sources})
    if not parts.optimizers:
        raise ConfigError(
            "track() needs the optimizer: its steps are the steps of the run",
            hint="track(model=model, optimizer=optimizer, loader=loader)",
        )
    return Tracker(engine, parts, sources, Nothing(), trainer="loop", folder=Path.cwd())


def source_of(value: Any) -> Source | None:
    """The loader in `value`, a `DataLoader` or what Fabric's `setup_dataloaders` makes of one; None if it is none.

    Raises:
        ConfigError: the loader was prepared by Accelerate.
    """
    if issubclass(type(value), DataLoader):
        return Source(value, value)
    if isinstance(value, DataLoader):  # Accelerate's wrappers say that they are one
        raise ConfigError(
            f"a {type(value).__name__} belongs to Accelerate",
            hint="use accelerate_ckpt.AdaptiveCheckpoint(accelerator)",
        )
    inner = getattr(value, "__dict__", {}).get(_FABRIC_LOADER)
    if isinstance(inner, DataLoader) and hasattr(value, _FABRIC_COUNTER):
        return Source(value, inner, counter=_FABRIC_COUNTER)
    return None
