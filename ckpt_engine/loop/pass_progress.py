"""What training has made of one pass over a loader."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PassProgress:
    """The current or last pass over a loader, for training.

    Args:
        count: passes that the loader itself had counted when it began.
        stepped_at: batches of it that were given before the last step, or before it resumed.
        trained: weights changed during it.
        interior: a snapshot could have been taken in the middle of it.
    """

    count: int = 0
    stepped_at: int = 0
    trained: bool = False
    interior: bool = False

    def step(self, delivered: int) -> int:
        """Weights have changed after so many batches; how many of them that took."""
        self.trained = True
        taken, self.stepped_at = delivered - self.stepped_at, delivered
        return taken
