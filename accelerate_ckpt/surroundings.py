"""What Accelerate counts around a loop: the position in gradient accumulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator

from accelerate_ckpt.compat import Internals
from ckpt_engine.observe.resume_report import NotRestored, Restored


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

    def dump(self) -> dict[str, Any]:
        return {"step": self._internals.step}

    def restore(self, saved: Mapping[str, Any]) -> list[NotRestored]:
        self._internals.step = int(saved["step"])
        return []

    def adopt(self, state: dict[str, Any]) -> tuple[list[Restored], list[NotRestored]]:  # noqa: ARG002
        return [], []

    def notes(self) -> dict[str, Any]:
        return {}
