"""`AdaptiveCheckpoint` for Accelerate: one line after `accelerator.prepare(...)`.

The engine is imported when one is made: a loader worker that imports the script does without it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self, Unpack

from accelerate import Accelerator


def becomes(module: str, name: str, base: type) -> type:
    """A class with this base until the first object is made, and with the named one from then on."""

    class Later(base):  # type: ignore[misc]
        def __new__(cls, *_: Any, **__: Any) -> Self:
            Later.__bases__ = (getattr(import_module(module), name),)
            return object.__new__(cls)

    return Later


if TYPE_CHECKING:
    from accelerate_ckpt.adaptive import AcceleratedLoop
    from ckpt_engine.adapter import Options
else:
    Plain = type("Plain", (), {})  # the base of a class that derives from `object` itself cannot be changed
    AcceleratedLoop = becomes("accelerate_ckpt.adaptive", "AcceleratedLoop", Plain)


class AdaptiveCheckpoint(AcceleratedLoop):
    """Exact, asynchronous snapshots of an Accelerate loop whose body stays as it is.

    ```python
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    ckpt = AdaptiveCheckpoint(accelerator, "ckpt.yaml")     # resumes if there is something
    for epoch in range(ckpt.epoch, epochs):                 # 0 on a fresh start; a resumed epoch starts in its middle
        for batch in loader:
            ...
    ```

    Everything that was given to `prepare` and `register_for_checkpointing` belongs to a snapshot; hooks of
    `register_save_state_pre_hook` and `register_load_state_pre_hook` run as in `save_state` and `load_state`, which go
    on working. The run is bit for bit the same as without it; only with `use_stateful_dataloader` the iterators that
    `prepare` has made are made again, which moves their draws. `accelerator.end_training()` finishes the snapshots too,
    so `close()` is needed only without it; at the end of the process they are finished in any case, without one of the
    final state.

    Args:
        accelerator: after `prepare` and `register_for_checkpointing`.
        config: a YAML file, a folder or storage URL, or a mapping; see docs/configuration.md.
        options: the same options as keywords; they win over `config`.

    Raises:
        ConfigError: an option is unknown or impossible, nothing was prepared, or several processes divide the state.
        CkptError: this version of Accelerate lacks something that is needed; names it.
        NoUsableSnapshotError: there are snapshots, and none is usable.
        MismatchError: the newest snapshot is of another model; names the keys. Nothing was changed.
        LeaseHeldError, StorageError, WriterError: as `Engine.start`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(accelerator, config, **options)
