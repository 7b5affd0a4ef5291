"""The Accelerate adapter: `AdaptiveCheckpoint` for loops, `TransformersCallback` for transformers' `Trainer`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    from accelerate_ckpt.lazy import AdaptiveCheckpoint
except ModuleNotFoundError as err:
    raise ModuleNotFoundError(
        f"accelerate_ckpt needs Accelerate, and {err.name} is not installed: pip install 'ckpt-engine[accelerate]'",
        name=err.name,
    ) from err

if TYPE_CHECKING:
    from accelerate_ckpt.transformers_callback import TransformersCallback as TransformersCallback

__all__ = ["AdaptiveCheckpoint", "TransformersCallback"]


def __getattr__(name: str) -> Any:
    if name != "TransformersCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return import_module("accelerate_ckpt.transformers_callback").TransformersCallback
    except ModuleNotFoundError as err:  # transformers is not needed without it
        raise ModuleNotFoundError(
            f"{name} needs transformers, and {err.name} is not installed: pip install 'ckpt-engine[transformers]'",
            name=err.name,
        ) from err
