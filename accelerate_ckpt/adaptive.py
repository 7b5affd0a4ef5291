"""`AdaptiveCheckpoint` for Accelerate: one line after `accelerator.prepare(...)`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accelerate_ckpt.compat import Internals
from accelerate_ckpt.parts import AcceleratedParts
from accelerate_ckpt.ranks import ranks_of
from accelerate_ckpt.surroundings import Accumulation
from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.config import Config
from ckpt_engine.data import native
from ckpt_engine.errors import ConfigError, ResumeError
from ckpt_engine.tracking.tracker import Tracker


class AdaptiveCheckpoint(Tracker):
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
        LeaseHeldError, StorageError, WriterError: as `Checkpointer.start`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        engine = Checkpointer(config, ranks=ranks_of(accelerator, Internals(accelerator)), **options)
        self._internals = internals = Internals(accelerator)
        internals.probe()
        parts = AcceleratedParts(accelerator, internals)
        if not parts.optimizers:
            raise ConfigError(
                "accelerator.prepare() was given no optimizer yet",
                hint="make AdaptiveCheckpoint after model, optimizer and loaders were prepared",
            )
        folder = Path(accelerator.project_dir or ".")
        sources = internals.sources()
        for source in sources.values():
            # With `use_stateful_dataloader`, `prepare` has made an iterator already, in which no position was recorded.
            native.reset(source.base)
        try:
            super().__init__(
                engine,
                parts,
                internals.sources(),
                Accumulation(accelerator, internals),
                trainer="accelerate",
                folder=folder,
            )
        except BaseException:
            engine.close()
            raise
        internals.before_end_training(self.close)
        internals.instead_of_skipping(self._goes_on)
        self._before_step = register_optimizer_step_pre_hook(self._before_first_step)
        self._handle = accelerator.register_load_state_pre_hook(self._before_load_state)

    def __reduce__(self) -> tuple[Any, ...]:
        """A run belongs to one accelerator and one process, so a copy has not begun."""
        return UnstartedCheckpoint, (self._config, self.epoch, self.global_step, self.resumed_batches)

    def release(self) -> None:
        """Leave accelerator, loaders and optimizers as they were found, without a final snapshot."""
        super().release()
        self._internals.unwrap()
        self._before_step.remove()
        self._handle.remove()

    def _goes_on(self, loader: Any, batches: int) -> bool:
        """A script that skips what was trained, as one had to do before: after a resume the loader does that itself."""
        feed = next((one for one in self._feeds if self._sources[one.name].outer is loader), None)
        if feed is None or not (self._restoring and feed.resuming):
            return False
        said = f"skip_first_batches(loader, {batches}) skips nothing: the loader goes on after {feed.delivered} batches"
        self._resume.note(said)
        return True

    def _before_first_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """A loader that the function `skip_first_batches` has made is not followed, and what it gave is not ours."""
        feed = self._training
        waits = self._restoring and feed is not None and feed.resuming
        if waits and not self._recent and not self._begun_again and id(optimizer) in self._ids:
            assert feed is not None
            raise ResumeError(
                f"the resumed run trains on batches of a loader that is not followed: {feed.name!r}, whose next pass "
                f"starts after {feed.delivered} batches, was not asked for any",
                hint="iterate the loader itself: a resumed epoch starts in its middle, without skip_first_batches",
            )

    def _before_load_state(self, models: list[Any], input_dir: str) -> None:  # noqa: ARG002
        self.abandon_resume()


class UnstartedCheckpoint:
    """What a copy of an `AdaptiveCheckpoint` is: it takes and restores nothing, `AdaptiveCheckpoint(accelerator,
    copied.config)` does. The numbers are those of the moment of the copy.
    """

    def __init__(self, config: Config, epoch: int, global_step: int, resumed_batches: int) -> None:
        self.config, self.epoch, self.global_step, self.resumed_batches = config, epoch, global_step, resumed_batches

    def step(self) -> None: ...

    def before_update(self) -> None: ...

    def evaluated(self, seconds: float) -> None: ...

    def finish(self, *, complete: bool | None = None) -> None: ...

    def release(self) -> None: ...

    def close(self) -> None: ...

    def abandon_resume(self) -> None: ...
