"""Asynchronous snapshots of training runs that resume exactly.

Names are imported on first use, so that the writer process and the command line start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_engine.audit.carried import Carry as Carry
    from ckpt_engine.checkpointer import Checkpointer as Checkpointer
    from ckpt_engine.config import Config as Config
    from ckpt_engine.engine import Engine as Engine
    from ckpt_engine.errors import CkptError as CkptError
    from ckpt_engine.restore.follower import follow as follow
    from ckpt_engine.snapshot.save_request import SaveHandle as SaveHandle
    from ckpt_engine.store.manifest import SnapshotInfo as SnapshotInfo

    __version__: str

_HOMES = {
    "Carry": "ckpt_engine.audit.carried",
    "Checkpointer": "ckpt_engine.checkpointer",
    "CkptError": "ckpt_engine.errors",
    "Config": "ckpt_engine.config",
    "Engine": "ckpt_engine.engine",
    "SaveHandle": "ckpt_engine.snapshot.save_request",
    "SnapshotInfo": "ckpt_engine.store.manifest",
    "follow": "ckpt_engine.restore.follower",
}

__all__ = ["Carry", "Checkpointer", "CkptError", "Config", "Engine", "SaveHandle", "SnapshotInfo", "follow"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("ckpt-engine")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
