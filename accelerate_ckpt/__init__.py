"""The Accelerate adapter: `AdaptiveCheckpoint` for loops, `TransformersCallback` for transformers' `Trainer`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from accelerate_ckpt.adaptive import AdaptiveCheckpoint

if TYPE_CHECKING:
    from accelerate_ckpt.transformers_callback import TransformersCallback as TransformersCallback

__all__ = ["AdaptiveCheckpoint", "TransformersCallback"]


def __getattr__(name: str) -> Any:
    if name == "TransformersCallback":  # transformers is not needed without it
        return import_module("accelerate_ckpt.transformers_callback").TransformersCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
