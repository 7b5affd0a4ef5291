"""A `fit` that does not resume from its own folder: what it is asked for, and what becomes of the snapshots there."""

from __future__ import annotations

import weakref
from typing import Any

import lightning.pytorch as pl

from ckpt_engine.checkpointer import Checkpointer

AUTO = "auto"


class Fitted:
    """What an earlier `fit` of a callback has left in memory.

    Args:
        trainer, module: that were fitted.
        attempt: of the snapshots that were taken meanwhile.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, attempt: str) -> None:
        self._trainer, self._module = weakref.ref(trainer), weakref.ref(module)
        self.attempt = attempt

    def goes_on(self, trainer: pl.Trainer, module: pl.LightningModule) -> bool:
        """Whether another `fit` of them trains on from there, without any file."""
        return self._trainer() is trainer and self._module() is module and trainer.global_step > 0


class Fresh:
    """Of one `fit`.

    Args:
        trainer, module: that is fitted.
        checkpointer: opens the run's folder.

    `fitted` is what an earlier `fit` has left.
    """

    fitted: Fitted | None = None
    _asked = False

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, checkpointer: Checkpointer) -> None:
        self._trainer = trainer
        self._module = module
        self._engine = checkpointer

    def path(self, path: Any) -> Any:
        """What the argument `ckpt_path` comes to with the option `resume`; if that is not `auto`, the run is begun."""
        self._asked, option = True, self._engine.config.resume
        if path == AUTO and option == "off":
            path = None
        elif path is None and option == AUTO:
            path = AUTO
        if path != AUTO:
            self._begin(path)
        return path

    def go_on_beside(self) -> None:
        """Where the run resumes from the folder of another callback: what is in this one goes on too."""
        if not self._asked and (candidate := self._engine.choose()) is not None:
            self._engine.go_on_after(candidate.info)

    def _begin(self, path: Any) -> None:
        """Training begins afresh, from a file of Lightning, or with what the trainer holds since its last `fit`."""
        engine, fitted = self._engine, self.fitted
        engine.start()
        if path is None and fitted is not None and fitted.goes_on(self._trainer, self._module):
            found = next(reversed(engine.snapshots(nearest=True)), None)
            if found is not None and found.line.attempt == fitted.attempt:
                engine.go_on_after(found)
                return
        off = engine.config.resume == "off"
        how = (
            "leave out resume='off'" if off else "pass ckpt_path='auto' to fit, or resume='auto' to AdaptiveCheckpoint"
        )
        engine.start_fresh(how)
