"""What of tracked objects a snapshot is read into where they are: models of DTensors, and their optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ckpt_engine.errors import ResumeError
from ckpt_engine.restore.load import Live
from ckpt_engine.restore.shells import optimizer_shell
from ckpt_engine.snapshot.sharding import is_sharded
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.tracking.parts import Parts


def live_of(parts: Parts) -> Live | None:
    """None: no model has DTensors, and everything is put back by `load_state_dict`."""
    if not _any_sharded(parts.modules.values()):
        return None

    def live(manifest: Manifest) -> Any:
        found: dict[str, Any] = {name: module.state_dict() for name, module in parts.modules.items()}
        for name, optimizer in parts.optimizers.items():
            if name in manifest.tree:
                found[name] = optimizer_shell(optimizer, manifest.tree[name], manifest.entries)
        return found

    return live


def require_whole_gradients(modules: Iterable[nn.Module], saved_size: int) -> None:
    """Raise where gradients of another number of ranks are parts that fit nowhere.

    Raises:
        ResumeError: a model has DTensors.
    """
    if _any_sharded(modules):
        raise ResumeError(
            f"the snapshot was taken by {saved_size} ranks in the middle of gradient accumulation, and the "
            "gradients of a sharded model are stored as their parts",
            hint=f"start it with {saved_size} ranks, or load an older snapshot",
        )


def _any_sharded(modules: Iterable[nn.Module]) -> bool:
    return any(is_sharded(parameter) for module in modules for parameter in module.parameters())
