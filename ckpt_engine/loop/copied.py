"""What a copy or a pickle of a running tracker is: a run belongs to one process, so a copy has not begun."""

from __future__ import annotations

from ckpt_engine.config import Config


class UnstartedCheckpoint:
    """Takes and restores nothing.

    Args:
        config: the options of the run.
        epoch, global_step, resumed_batches: those of the moment of the copy.
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
