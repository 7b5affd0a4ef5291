"""What of tracked objects a snapshot is read into where they are: divided models, and their optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ckpt_engine.errors import ResumeError
from ckpt_engine.restore.load import Live
from ckpt_engine.restore.shells import optimizer_shell
from ckpt_engine.snapshot.sharding import is_sharded
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.tracking.fsdp1 import is_flat
from ckpt_engine.tracking.parts import Parts, state_of


def live_of(parts: Parts) -> Live | None:
    """None: no model is divided, and everything is put back by `load_state_dict`."""
    if not any_sharded(parts.modules.values()):
        return None

    def live(manifest: Manifest) -> Any:
        found: dict[str, Any] = {name: state_of(module, parts.flat) for name, module in parts.modules.items()}
        divided = {} if parts.flat is None else parts.flat.parts()
        for name, optimizer in parts.optimizers.items():
            if name in manifest.tree:
                found[name] = optimizer_shell(optimizer, manifest.tree[name], manifest.entries, divided)
        return found

    return live


def require_whole_gradients(modules: Iterable[nn.Module], saved_size: int) -> None:
    """Raise where gradients of another number of ranks are parts that fit nowhere.

    Raises:
        ResumeError: a model is divided.
    """
    if any_sharded(modules):
        raise ResumeError(
            f"the snapshot was taken by {saved_size} ranks in the middle of gradient accumulation, and the "
            "gradients of a sharded model are stored as their parts",
            hint=f"start it with {saved_size} ranks, or load an older snapshot",
        )


def any_sharded(modules: Iterable[nn.Module]) -> bool:
    """Whether ranks have parts of a model."""
    return any(is_flat(module) or any(map(is_sharded, module.parameters())) for module in modules)
