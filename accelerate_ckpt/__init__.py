"""The Accelerate adapter: `AdaptiveCheckpoint` for loops with an `Accelerator`."""

from accelerate_ckpt.adaptive import AdaptiveCheckpoint

__all__ = ["AdaptiveCheckpoint"]
