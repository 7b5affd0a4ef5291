"""The counters of a framework around the loop, which are neither in the tracked objects nor in the loaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ckpt_engine.observe.resume_report import NotRestored, Restored


class Surroundings(Protocol):
    """What runs the loop, as far as a snapshot has to know it."""

    def accumulating(self) -> bool:
        """Gradients of the last batch wait for those of the next one."""

    def dump(self) -> dict[str, Any]:
        """Its counters, as values that a snapshot stores."""

    def restore(self, saved: Mapping[str, Any]) -> list[NotRestored]:
        """Put `dump`'s counters back; called when the run resumes, and again right before its first batch."""

    def adopt(self, state: dict[str, Any]) -> tuple[list[Restored], list[NotRestored]]:
        """Take out of the state of an imported checkpoint what belongs to the surroundings, and put it back."""

    def notes(self) -> dict[str, Any]:
        """JSON values that a manifest keeps, to be read before a snapshot is loaded."""


class Nothing:
    """A plain loop has no surroundings."""

    def accumulating(self) -> bool:
        return False

    def dump(self) -> dict[str, Any]:
        return {}

    def restore(self, saved: Mapping[str, Any]) -> list[NotRestored]:  # noqa: ARG002
        return []

    def adopt(self, state: dict[str, Any]) -> tuple[list[Restored], list[NotRestored]]:  # noqa: ARG002
        return [], []

    def notes(self) -> dict[str, Any]:
        return {}
