"""Lets no optimizer change a tensor that is still being compared with the arena."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ckpt_engine.snapshot.stage import Staging


class Guard:
    """Finishes the comparisons of the newest snapshot before any optimizer of this process steps."""

    def __init__(self) -> None:
        self._staging: Staging | None = None
        self._handle: RemovableHandle | None = None

    def watch(self, staging: Staging) -> None:
        """From now on this is the newest one."""
        self._staging = staging
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Leave the optimizers alone."""
        self._staging = None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _before_step(self, *_: Any) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.finish_hints()
