"""The losses of a Lightning run on their way to the guard, without making a device wait at every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckpt_engine.preempt.divergence import Divergence, LossGuard, On

_MOST_WAITING = 64
"""Losses on a device are fetched when a snapshot is due, or when there are so many."""


class Losses:
    """Collects what `training_step` returned and lets the guard judge it at boundaries.

    Args:
        on: what counts as divergence.
    """

    def __init__(self, on: On) -> None:
        self._guard = LossGuard(on)
        self.divergence: Divergence | None = None
        """Training has diverged. Nothing is judged any more, and no snapshot may be taken."""
        self._waiting: list[tuple[int, torch.Tensor]] = []

    def add(self, step: int, outputs: Any) -> None:
        """What step `step` returned: a loss, a mapping with one, or nothing to judge."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and self.divergence is None:
            self._waiting.append((step, loss.detach()))

    def veto(self, *, due: bool) -> bool:
        """Whether a snapshot now would be one of a state after a spike, or of a run that has diverged."""
        waits = self._waiting and self._waiting[-1][1].device.type != "cpu"
        if waits and not due and len(self._waiting) < _MOST_WAITING:
            return self.divergence is not None
        waiting, self._waiting = self._waiting, []
        losses = torch.stack([loss.reshape(()).float() for _, loss in waiting]).tolist() if waiting else []
        for (step, _), loss in zip(waiting, losses, strict=True):
            self.divergence = self.divergence or self._guard.judge(step, loss)
        return self.divergence is not None or self._guard.suspicious
