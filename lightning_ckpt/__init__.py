"""Exact, asynchronous snapshots for PyTorch Lightning: add `AdaptiveCheckpoint`, call `fit(..., ckpt_path="auto")`."""

from lightning_ckpt.callback import AdaptiveCheckpoint

__all__ = ["AdaptiveCheckpoint"]
