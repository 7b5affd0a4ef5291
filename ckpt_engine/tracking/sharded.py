"""What of tracked objects a snapshot is read into where they are: models of DTensors, and their optimizers."""

from __future__ import annotations

from typing import Any

from ckpt_engine.restore.load import Live
from ckpt_engine.restore.shells import optimizer_shell
from ckpt_engine.snapshot.sharding import is_sharded
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.tracking.parts import Parts


def live_of(parts: Parts) -> Live | None:
    """None: no model has DTensors, and everything is put back by `load_state_dict`."""
    if not any(is_sharded(p) for module in parts.modules.values() for p in module.parameters()):
        return None

    def live(manifest: Manifest) -> Any:
        found: dict[str, Any] = {name: module.state_dict() for name, module in parts.modules.items()}
        for name, optimizer in parts.optimizers.items():
            if name in manifest.tree:
                found[name] = optimizer_shell(optimizer, manifest.tree[name], manifest.entries)
        return found

    return live
