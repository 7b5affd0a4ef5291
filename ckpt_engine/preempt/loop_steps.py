"""The steps of a loop, as far as its boundaries were seen."""

from __future__ import annotations

from dataclasses import dataclass

UNSEEN = -1
"""Of `LoopSteps.first`: the loop has made steps of which no boundary was seen."""


@dataclass(slots=True)
class LoopSteps:
    """How far a loop is, and what its last step took. Times are monotonic seconds.

    Args:
        started: when it began.
        ended: when its last step ended.
        took: how long that was, in seconds.
        last: the number of that step.
        first: the first step whose end was seen; None: none was.
    """

    started: float
    ended: float
    took: float = 0.0
    last: int = 0
    first: int | None = None

    def trained(self, step: int) -> None:
        """Training has ended with this step, maybe without a boundary after it."""
        self.last = max(self.last, step)
