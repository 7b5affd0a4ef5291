"""The counters of a framework around the loop, which are neither in the tracked objects nor in the loaders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckpt_engine.observe.resume_report import NotRestored, Restored


class Counters(Protocol):
    """The counters as they were at one moment."""

    def dump(self) -> dict[str, Any]:
        """Values that a snapshot stores."""

    def notes(self) -> dict[str, Any]:
        """JSON values that a manifest keeps, to be read before a snapshot is loaded."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A few numbers.

    Args:
        values: by name.
    """

    values: Mapping[str, Any] = field(default_factory=dict)

    def dump(self) -> dict[str, Any]:
        return dict(self.values)

    def notes(self) -> dict[str, Any]:
        return {}


class Surroundings(Protocol):
    """What runs the loop, as far as a snapshot has to know it."""

    def accumulating(self) -> bool:
        """Gradients of the last batch wait for those of the next one."""

    def now(self) -> Counters:
        """Its counters; cheap, as it is called at every boundary."""

    def restore(self, saved: Mapping[str, Any]) -> list[NotRestored]:
        """Put back what `Counters.dump` gave; called when the run resumes, and again right before its first batch."""

    def adopt(self, state: dict[str, Any]) -> tuple[list[Restored], list[NotRestored]]:
        """Take out of the state of an imported checkpoint what belongs to the surroundings, and put it back."""

    def audited(self) -> Mapping[str, Any]:
        """The user's objects that it calls while it trains, by name: what they remember may be hidden state."""


class Nothing:
    """A plain loop has no surroundings."""

    def accumulating(self) -> bool:
        return False

    def now(self) -> Counters:
        return Counted()

    def restore(self, saved: Mapping[str, Any]) -> list[NotRestored]:  # noqa: ARG002
        return []

    def adopt(self, state: dict[str, Any]) -> tuple[list[Restored], list[NotRestored]]:  # noqa: ARG002
        return [], []

    def audited(self) -> Mapping[str, Any]:
        return {}
