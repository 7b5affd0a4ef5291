"""The counters of a framework around the loop, which are neither in the tracked objects nor in the loaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Surroundings(Protocol):
    """What runs the loop, as far as a snapshot has to know it."""

    def accumulating(self) -> bool:
        """Gradients of the last batch wait for those of the next one."""

    def dump(self) -> dict[str, Any]:
        """Its counters, as values that a snapshot stores."""

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Put `dump`'s counters back."""


class Nothing:
    """A plain loop has no surroundings."""

    def accumulating(self) -> bool:
        return False

    def dump(self) -> dict[str, Any]:
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        pass
