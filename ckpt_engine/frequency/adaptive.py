"""The adaptive trigger: when the next snapshot is due under the decision in force and the overhead account.

No clock: steps, times and costs arrive as values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckpt_engine.frequency.account import Account
from ckpt_engine.frequency.controller import AdaptivePolicy, Costs, Decision, FrequencyPolicy, settle
from ckpt_engine.frequency.settings import FrequencySettings

REVIEW_STEPS = 256
# Assumed for the first snapshot only, whose cost nobody has measured yet.
ASSUMED_STALL_SECONDS = 0.02
ASSUMED_BYTES_PER_SECOND = 4e9
FIRST_WITHIN_SECONDS = 600.0
# How far the account may stretch an interval to get out of debt.
HOLD_FACTOR = 2


@dataclass(frozen=True, slots=True)
class Answer:
    """Due now, or ask again at a step or a time, whichever comes first."""

    due: bool
    again_step: float = math.inf
    again_time: float = math.inf


class AdaptiveTrigger:
    """Keeps the decision in force and applies it.

    Args:
        settings: `overhead` is not None.
        policy: None for the policy of `controller`.
    """

    __slots__ = (
        "_assumed_seconds",
        "_budget",
        "_clean_windows",
        "_policy",
        "_rpo",
        "decision",
        "review_step",
    )

    def __init__(self, settings: FrequencySettings, policy: FrequencyPolicy | None = None) -> None:
        assert settings.overhead is not None
        self._policy: FrequencyPolicy = policy or AdaptivePolicy(settings)
        self._budget = settings.overhead
        self._rpo = settings.max_lost_work_seconds
        self._assumed_seconds = ASSUMED_STALL_SECONDS
        self._clean_windows = 0
        self.decision: Decision | None = None
        self.review_step = 0

    def restart(self, step: int) -> None:
        """Measuring starts again at `step`; the decision stays."""
        self._clean_windows = 0
        self.review_step = step + REVIEW_STEPS

    def announce(self, nbytes: int) -> None:
        """The size of the state, for an assumption about the stall of the first snapshot."""
        self._assumed_seconds = max(ASSUMED_STALL_SECONDS, nbytes / ASSUMED_BYTES_PER_SECOND)

    def window_ended(self, cost_seconds: float, *, held_back: bool) -> None:
        """A snapshot was settled that cost `cost_seconds`; clean if its interval pays for it and nothing waited."""
        if self.decision is None:
            return
        earned = self._budget * self.decision.interval_steps * self.decision.costs.step_seconds
        self._clean_windows = self._clean_windows + 1 if cost_seconds <= earned and not held_back else 0

    def decide(self, step: int, costs: Costs, failures_per_second: float, *, held_back: bool) -> Decision:
        """Decides again, with hysteresis; the result is in force from now on."""
        self.review_step = step + REVIEW_STEPS
        wanted = self._policy.decide(costs, failures_per_second)
        current = self.decision.interval_steps if self.decision else None
        decision = settle(current, wanted, clean_windows=self._clean_windows, held_back=held_back)
        if decision.interval_steps != current:
            self._clean_windows = 0
        self.decision = decision
        return decision

    def ask(self, step: int, now: float, *, taken_step: int, taken_time: float, account: Account) -> Answer:
        """Whether a snapshot is due at `step`, the newest one having been taken at `taken_step`."""
        decision = self.decision
        if decision is None:
            return self._ask_first(now, taken_time, account)
        since, every, lower = step - taken_step, decision.interval_steps, decision.bounds.lower
        deadline = math.inf
        if self._rpo is not None:
            # Time counts, not only steps: validation between two snapshots is lost work too.
            deadline = taken_time + self._rpo - decision.costs.latency_seconds - decision.costs.step_seconds
        overdue = now >= deadline
        if since < every and not (overdue and since >= lower):
            return Answer(
                due=False,
                again_step=min(self.review_step, taken_step + (lower if overdue else every)),
                again_time=math.inf if overdue else deadline,
            )
        cost, earned = decision.costs.cost_seconds, self._budget * decision.costs.step_seconds
        missing = cost - account.credit(self._budget, 2.0 * cost) - earned / 2.0
        hold = HOLD_FACTOR * every if self._rpo is None else max(every, decision.bounds.rpo)
        if missing <= 0.0 or since >= hold or overdue:
            return Answer(due=True)
        wait = math.ceil(min(missing / earned, hold)) if earned > 0.0 else hold
        again = min(self.review_step, step + max(1, wait), taken_step + hold)
        return Answer(due=False, again_step=again, again_time=deadline)

    def _ask_first(self, now: float, taken_time: float, account: Account) -> Answer:
        """The first one comes as soon as the budget has earned its likely stall: it shows what one costs."""
        within = FIRST_WITHIN_SECONDS if self._rpo is None else min(FIRST_WITHIN_SECONDS, self._rpo / 2.0)
        missing = self._assumed_seconds - account.credit(self._budget, math.inf)
        left = min(missing / self._budget, taken_time + within - now)
        return Answer(due=True) if left <= 0.0 else Answer(due=False, again_time=now + left)
