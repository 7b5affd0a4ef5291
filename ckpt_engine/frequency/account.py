"""The overhead account: what snapshots have cost so far, against what the budget has earned.

The interval keeps the *expected* cost within the budget; the account keeps the sum. Rounding, hysteresis, a first
snapshot of unknown cost and one-off stalls all end up here and are paid back by waiting longer.
"""

from __future__ import annotations


class Account:
    """Seconds of training and of overhead since training started.

    Attributes:
        training_seconds: time of all steps, pauses (stall, fence, wait) not included; written by the training thread
            at every step.
        paused_seconds: stalls, fences and waits for a slot.
        slowdown_seconds: how much longer disturbed steps were, as `CostMeter` believes it of each snapshot.
        elsewhere_seconds: overhead that another account pays; only `overhead_fraction` counts it.
    """

    __slots__ = (
        "_clean",
        "_credit",
        "_spent",
        "elsewhere_seconds",
        "paused_seconds",
        "slowdown_seconds",
        "training_seconds",
    )

    def __init__(self) -> None:
        self.training_seconds = 0.0
        self.paused_seconds = 0.0
        self.slowdown_seconds = 0.0
        self.elsewhere_seconds = 0.0
        self._credit = 0.0
        self._clean = 0.0
        self._spent = 0.0

    @property
    def spent_seconds(self) -> float:
        return self.paused_seconds + self.slowdown_seconds

    @property
    def overhead_fraction(self) -> float:
        """(stalls + fences + waits + slowdown) / training time without them; 0.0 before training."""
        clean = self.training_seconds - self.slowdown_seconds
        return (self.spent_seconds + self.elsewhere_seconds) / clean if clean > 0.0 else 0.0

    def credit(self, budget: float, most_seconds: float) -> float:
        """Seconds of overhead that may be spent now; negative is debt.

        Credit beyond `most_seconds` is lost: what was not needed for hours must not be spent in a minute.
        """
        clean, spent = self.training_seconds - self.slowdown_seconds, self.spent_seconds
        self._credit += budget * (clean - self._clean) - (spent - self._spent)
        self._credit = min(self._credit, most_seconds)
        self._clean, self._spent = clean, spent
        return self._credit
