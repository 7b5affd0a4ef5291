"""Asks the policy how often to take snapshots."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ckpt_engine.frequency.failures import Evidence
from ckpt_engine.frequency.measure import CostMeter, StepTimes
from ckpt_engine.frequency.policy import Costs, Decision, FarCosts, FrequencyPolicy
from ckpt_engine.frequency.triggers import ASSUMED_STALL_SECONDS, Account

Basis = tuple[Costs, float | None, FarCosts | None]
"""What a decision follows from besides failures: costs of a snapshot, of one in memory, of a further copy."""


@dataclass(eq=False)
class IntervalPlanner:
    """Knows what a decision follows from, and whether that has changed since the last one.

    Args:
        policy: decides.
        evidence: of failures.
        ranks: that train together: what fails the job grows with them.
        meter: what snapshots cost.
        far: what the newest copy to a further tier has cost; None: none was made.
        step_seconds: what a step takes, as of the newest look.
    """

    policy: FrequencyPolicy
    evidence: Evidence
    ranks: int
    meter: CostMeter = field(default_factory=CostMeter)
    far: FarCosts | None = None
    step_seconds: float = 0.0
    _decided: Basis | None = None

    def is_outdated(self, steps: StepTimes, account: Account, memory_seconds: float | None) -> bool:
        """Whether something has changed besides failures; what time alone changes is for the next review."""
        return self._basis(steps, account, memory_seconds) != self._decided

    def decide(self, now: float, steps: StepTimes, account: Account, memory_seconds: float | None) -> Decision:
        """What the policy wants now.

        Args:
            memory_seconds: what a snapshot costs that stays in memory; None: there are none.
        """
        self._decided = costs, _, far = self._basis(steps, account, memory_seconds)
        return self.policy.decide(costs, self.evidence.rates(now), memory_seconds, far)

    def _basis(self, steps: StepTimes, account: Account, memory_seconds: float | None) -> Basis:
        self.step_seconds = steps.step_seconds()
        costs = self.meter.costs(self.step_seconds, account.hook_share)
        if memory_seconds is not None and not self.meter.known:
            costs = replace(costs, stall_seconds=memory_seconds + ASSUMED_STALL_SECONDS)
        return costs, memory_seconds, self.far
