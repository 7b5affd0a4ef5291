"""Exact, asynchronous snapshots for PyTorch Lightning: add `AdaptiveCheckpoint`, call `fit(..., ckpt_path="auto")`."""

try:
    from lightning_ckpt.callback import AdaptiveCheckpoint
except ModuleNotFoundError as err:
    raise ModuleNotFoundError(
        f"lightning_ckpt needs Lightning, and {err.name} is not installed: pip install 'ckpt-engine[lightning]'",
        name=err.name,
    ) from err

__all__ = ["AdaptiveCheckpoint"]
