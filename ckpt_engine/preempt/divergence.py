"""Whether training has left the road, judged by its losses alone: a pure rule, and the history that it needs."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

WINDOW = 128
"""Losses that say what is usual."""
LEAST = 16
"""Before there are so many nothing is far above."""
SPREADS = 8.0
LEAST_SPREAD = 0.125
"""Of the median: a loss that hardly varies is no reason to be strict; a spike is at least twice the median."""
PATIENCE = 4
"""Losses in a row that are far above the others, until it is no bad batch any more."""


class On(StrEnum):
    """What counts as divergence."""

    NAN = "nan"
    """A loss that is not finite."""
    LOSS_SPIKE = "loss_spike"
    """That, or losses far above the usual ones."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Training has diverged.

    Args:
        step: of the loss that has shown it.
        first_step: of the first loss in question.
        loss: of `step`.
        usual: the median before it.
        rank: of several, which has seen it.
    """

    step: int
    first_step: int
    loss: float
    usual: float | None
    rank: int | None = None

    def text(self) -> str:
        """For people."""
        where = "" if self.rank is None else f" on rank {self.rank}"
        if not math.isfinite(self.loss):
            return f"the loss of step {self.step} is {self.loss}{where}"
        since = f"since step {self.first_step}, and {self.loss:.4g} at step {self.step}"
        return f"the loss{where} is far above its usual {self.usual:.4g} {since}"


def earliest(found: Iterable[Divergence | None]) -> Divergence | None:
    """What several ranks have seen, as one: that with the earliest first loss; None: none has seen anything."""
    seen = [one for one in found if one is not None]
    return min(seen, key=lambda one: (one.first_step, one.step, one.rank or 0), default=None)


def limit_of(usual: Sequence[float]) -> float:
    """The loss above which one is far above `usual`: median plus eight robust standard deviations (1.4826 x MAD).

    Infinite while there are too few. The median absolute deviation does not grow with the outliers themselves, which
    a standard deviation does (Rousseeuw and Croux, 1993).
    """
    if len(usual) < LEAST:
        return math.inf
    median = statistics.median(usual)
    spread = 1.4826 * statistics.median(abs(loss - median) for loss in usual)
    return median + SPREADS * max(spread, LEAST_SPREAD * abs(median))


class LossGuard:
    """Judges losses one after the other. Losses that are far above do not become usual.

    Args:
        on: what counts.
    """

    def __init__(self, on: On) -> None:
        self._on = on
        self._usual: deque[float] = deque(maxlen=WINDOW)
        self._first = 0
        self._in_a_row = 0

    @property
    def suspicious(self) -> bool:
        """The last loss was far above: a state after it must not replace one from before."""
        return self._in_a_row > 0

    def judge(self, step: int, loss: float) -> Divergence | None:
        """Take in the loss of `step`; the divergence, if it is one."""
        finite = math.isfinite(loss)
        if finite and (self._on is On.NAN or loss <= limit_of(self._usual)):
            self._usual.append(loss)
            self._in_a_row = 0
            return None
        self._first = step if self._in_a_row == 0 else self._first
        self._in_a_row += 1
        if finite and self._in_a_row < PATIENCE:
            return None
        return Divergence(step, self._first, loss, statistics.median(self._usual) if self._usual else None)
