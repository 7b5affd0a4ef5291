"""What Accelerate counts around a loop: the position in gradient accumulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator

from accelerate_ckpt.compat import Internals
from ckpt_engine.observe.resume_report import NotRestored, Restored
from ckpt_engine.tracking.surroundings import Counted, Counters


class Accumulation:
    """The accelerator's counter of `accumulate()`.

    Args:
        accelerator: whose it is.
        internals: of the accelerator.
    """

    def __init__(self, accelerator: Accelerator, internals: Internals) -> None:
        self._accelerator = accelerator
        self._internals = internals

    def accumulating(self) -> bool:
        return not self._accelerator.sync_gradients

    def now(self) -> Counters:
        return Counted({"step": self._internals.step})

    def restore(self, saved: Mapping[str, Any]) -> list[NotRestored]:
        self._internals.step = int(saved["step"])
        return []

    def adopt(self, state: dict[str, Any]) -> tuple[list[Restored], list[NotRestored]]:  # noqa: ARG002
        return [], []

    def audited(self) -> Mapping[str, Any]:
        return {}
