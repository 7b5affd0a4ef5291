"""Finishes what Lightning's own restore leaves inexact in weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Dtypes = Mapping[str, torch.dtype]


def dtypes_of(module: torch.nn.Module) -> dict[str, torch.dtype]:
    """The dtype of every parameter and buffer that is saved with the model."""
    return {name: value.dtype for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}


def load_again_where_converted(module: torch.nn.Module, saved: Mapping[str, Any], loaded_as: Dtypes) -> None:
    """Copy weights again whose dtype has changed since Lightning loaded them.

    With `precision="64-true"` it loads the weights into the float32 model and converts the model afterwards, so that
    half of each saved number is lost.

    Args:
        module: as it trains.
        saved: its weights in the snapshot.
        loaded_as: `dtypes_of` when they were loaded.
    """
    with torch.no_grad():
        for name, live in module.state_dict().items():
            value = saved.get(name)
            if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor) and live.dtype is not loaded_as[name]:
                live.copy_(value)
