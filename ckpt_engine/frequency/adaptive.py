"""The adaptive trigger: when the next snapshot is due under the decision in force and the overhead account.

No clock: steps, times and costs arrive as values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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


# Clean steps a window must leave behind the persist while the clean step time is not known well enough, or after so
# many windows without any: what snapshots cost cannot be told from steps that are all disturbed.
CALIBRATION_STEPS = 3
CALIBRATION_SHARE = 0.1
CALIBRATE_AFTER_WINDOWS = 16


@dataclass(frozen=True, slots=True)
class Moment:
    """A boundary.

    Args:
        taken_step, taken_time: those of the newest snapshot.
        quiet_steps: clean steps since the last snapshot was settled; 0 while one is in flight.
    """

    step: int
    now: float
    taken_step: int
    taken_time: float
    quiet_steps: int


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
        "_settings",
        "_windows_without_quiet",
        "calibrating",
        "decision",
        "review_step",
    )

    def __init__(self, settings: FrequencySettings, policy: FrequencyPolicy | None = None) -> None:
        assert settings.overhead is not None
        self._settings = settings if policy is None else None
        self._policy: FrequencyPolicy = policy or AdaptivePolicy(settings)
        self._budget = settings.overhead
        self._rpo = settings.max_lost_work_seconds
        self._assumed_seconds = ASSUMED_STALL_SECONDS
        self._clean_windows = 0
        self.decision: Decision | None = None
        self.review_step = 0
        self.calibrating = False
        self._windows_without_quiet = 0

    def restart(self, step: int) -> None:
        """Measuring starts again at `step`; the decision stays."""
        self._clean_windows = 0
        self.review_step = step + REVIEW_STEPS

    def rebudget(self, budget: float) -> None:
        """Decide and pay by another budget from now on; a policy of the caller's keeps its own."""
        self._budget = budget
        if self._settings is not None:
            self._policy = AdaptivePolicy(replace(self._settings, overhead=budget))

    def announce(self, nbytes: int) -> None:
        """The size of the state, for an assumption about the stall of the first snapshot."""
        self._assumed_seconds = max(ASSUMED_STALL_SECONDS, nbytes / ASSUMED_BYTES_PER_SECOND)

    def window_began(self, quiet_steps: int) -> None:
        """A snapshot was taken after `quiet_steps` clean steps."""
        self._windows_without_quiet = 0 if quiet_steps >= CALIBRATION_STEPS else self._windows_without_quiet + 1

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

    def ask(self, moment: Moment, account: Account) -> Answer:
        """Whether a snapshot is due."""
        decision, step, now = self.decision, moment.step, moment.now
        if decision is None:
            return self._ask_first(moment, account)
        since, every, lower = step - moment.taken_step, decision.interval_steps, decision.bounds.lower
        deadline = math.inf
        if self._rpo is not None:
            # Time counts, not only steps: validation between two snapshots is lost work too.
            deadline = moment.taken_time + self._rpo - decision.costs.latency_seconds - decision.costs.step_seconds
        overdue = now >= deadline
        if since < every and not (overdue and since >= lower):
            return Answer(
                due=False,
                again_step=min(self.review_step, moment.taken_step + (lower if overdue else every)),
                again_time=math.inf if overdue else deadline,
            )
        hold = HOLD_FACTOR * every if self._rpo is None else max(every, decision.bounds.rpo)
        wait = max(self._steps_in_debt(decision, account), self._steps_to_calibrate(every, moment.quiet_steps))
        if wait == 0 or since >= hold or overdue:
            return Answer(due=True)
        again = min(self.review_step, step + wait, moment.taken_step + hold)
        return Answer(due=False, again_step=again, again_time=deadline)

    def _steps_in_debt(self, decision: Decision, account: Account) -> int:
        """Steps until the account can pay for a snapshot (to half a step)."""
        cost, earned = decision.costs.cost_seconds, self._budget * decision.costs.step_seconds
        missing = cost - account.credit(self._budget, 2.0 * cost) - earned / 2.0
        most = HOLD_FACTOR * decision.interval_steps
        if missing <= 0.0:
            return 0
        return math.ceil(min(missing / earned, most)) if earned > 0.0 else most

    def _steps_to_calibrate(self, every: int, quiet_steps: int) -> int:
        if not (self.calibrating or self._windows_without_quiet >= CALIBRATE_AFTER_WINDOWS):
            return 0
        return max(0, max(CALIBRATION_STEPS, math.ceil(CALIBRATION_SHARE * every)) - quiet_steps)

    def _ask_first(self, moment: Moment, account: Account) -> Answer:
        """The first one comes as soon as the budget has earned its likely stall: it shows what one costs."""
        within = FIRST_WITHIN_SECONDS if self._rpo is None else min(FIRST_WITHIN_SECONDS, self._rpo / 2.0)
        missing = self._assumed_seconds - account.credit(self._budget, math.inf)
        left = min(missing / self._budget, moment.taken_time + within - moment.now)
        return Answer(due=True) if left <= 0.0 else Answer(due=False, again_time=moment.now + left)
