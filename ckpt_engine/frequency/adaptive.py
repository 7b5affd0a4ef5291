"""The adaptive trigger: when the next snapshot is due under the decision in force and the overhead account.

No clock: steps, times and costs arrive as values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ckpt_engine.frequency.account import Account
from ckpt_engine.frequency.controller import AdaptivePolicy, Costs, Decision, settle
from ckpt_engine.frequency.settings import FrequencySettings

REVIEW_STEPS = 256
# Assumed for the first snapshot only, whose cost nobody has measured yet.
ASSUMED_STALL_SECONDS = 0.02
ASSUMED_BYTES_PER_SECOND = 4e9
FIRST_WITHIN_SECONDS = 600.0
# Training whose budget may be saved up: a tenth of the six hours over which the budget counts as kept.
CREDIT_SECONDS = 2160.0
CREDIT_SHARE = 0.1
# How far the account may stretch an interval to get out of debt, where the debt is as large as that.
HOLD_FACTOR = 2.0


# Clean steps a window must leave behind the persist while the clean step time is not known well enough, or after so
# many windows without any: what snapshots cost cannot be told from steps that are all disturbed.
CALIBRATION_STEPS = 3
CALIBRATION_SHARE = 0.1
# How far waiting for them may stretch an interval.
CALIBRATION_FACTOR = 2.0
CALIBRATE_AFTER_WINDOWS = 16


@dataclass(frozen=True, slots=True)
class Moment:
    """A boundary.

    Args:
        taken_step, taken_time: those of the newest snapshot.
        trained_seconds: time of the steps since then, pauses not included.
        safe_time: instant of the newest snapshot that is durable or on its way.
        failures: snapshots that failed since the newest durable one.
        quiet_steps: clean steps since the last snapshot was settled; 0 while one is in flight.
    """

    step: int
    now: float
    taken_step: int
    taken_time: float
    trained_seconds: float
    safe_time: float
    failures: int
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
    """

    __slots__ = (
        "_assumed_seconds",
        "_budget",
        "_policy",
        "_rpo",
        "_windows_without_quiet",
        "calibrating",
        "decision",
        "review_step",
    )

    def __init__(self, settings: FrequencySettings) -> None:
        assert settings.overhead is not None
        self._policy = AdaptivePolicy(settings)
        self._budget = settings.overhead
        self._rpo = settings.max_lost_work_seconds
        self._assumed_seconds = ASSUMED_STALL_SECONDS
        self.decision: Decision | None = None
        self.review_step = 0
        self.calibrating = False
        self._windows_without_quiet = 0

    def restart(self, step: int) -> None:
        """Measuring starts again at `step`; the decision stays."""
        self.review_step = step + REVIEW_STEPS

    def rebudget(self, budget: float) -> None:
        """Decide and pay by another budget from now on."""
        self._budget = budget
        self._policy = AdaptivePolicy(replace(self._policy.settings, overhead=budget))

    def announce(self, nbytes: int) -> None:
        """The size of the state, for an assumption about the stall of the first snapshot."""
        self._assumed_seconds = max(ASSUMED_STALL_SECONDS, nbytes / ASSUMED_BYTES_PER_SECOND)

    def window_began(self, quiet_steps: int) -> None:
        """A snapshot was taken after `quiet_steps` clean steps."""
        self._windows_without_quiet = 0 if quiet_steps >= CALIBRATION_STEPS else self._windows_without_quiet + 1

    def decide(self, step: int, costs: Costs, failures_per_second: float, *, held_back: bool) -> Decision:
        """Decides again, with hysteresis; the result is in force from now on."""
        self.review_step = step + REVIEW_STEPS
        wanted = self._policy.decide(costs, failures_per_second)
        current = self.decision.interval_steps if self.decision else None
        self.decision = settle(current, wanted, held_back=held_back)
        return self.decision

    def ask(self, moment: Moment, account: Account) -> Answer:
        """Whether a snapshot is due.

        The interval counts as the seconds its steps take on average: where steps are irregular, work at risk grows with
        time and not with their number.
        """
        decision, step, now = self.decision, moment.step, moment.now
        if decision is None:
            return self._ask_first(moment, account)
        each = decision.costs.step_seconds
        # To half a step, so that equal steps give exactly the interval.
        since, every, lower = moment.trained_seconds + each / 2.0, decision.interval_steps * each, decision.bounds.lower
        deadline = self._deadline(decision, moment)
        overdue = now >= deadline
        if overdue:
            every = 0.0 if moment.failures == 1 else lower * each
        if since < every:
            left = now + every - since
            return Answer(due=False, again_step=self.review_step, again_time=left if overdue else min(left, deadline))
        missing, share = self._debt(decision, account)
        hold = decision.interval_steps * (1.0 + (HOLD_FACTOR - 1) * share)
        calibration = self._steps_to_calibrate(decision.interval_steps, moment.quiet_steps)
        if calibration:
            hold = max(hold, CALIBRATION_FACTOR * decision.interval_steps)
        if self._rpo is not None:
            hold = max(decision.interval_steps, decision.bounds.rpo)
        wait = max(missing, calibration)
        if wait == 0 or since >= hold * each or overdue:
            return Answer(due=True)
        again = min(self.review_step, step + wait)
        return Answer(due=False, again_step=again, again_time=min(deadline, now + hold * each - since))

    def _deadline(self, decision: Decision, moment: Moment) -> float:
        """When a snapshot is due whatever the interval: time counts, validation is work to lose too.

        A snapshot may fail: there is time for a second one where budget and writer leave it.
        """
        if self._rpo is None:
            return math.inf
        needed = decision.costs.promised_latency_seconds + decision.costs.step_seconds
        twice = self._rpo - 2.0 * needed
        fits = twice >= decision.bounds.lower * decision.costs.step_seconds
        return moment.safe_time + max(twice if fits else self._rpo - needed, 0.0)

    def _debt(self, decision: Decision, account: Account) -> tuple[int, float]:
        """Steps until the account can pay for a snapshot (to half a step), and how much it owes: 0.0 to 1.0.

        What may be saved up may also be owed: one expensive snapshot is paid back over the hours in which the budget
        has to be kept. A run that has just begun owes more for the same.
        """
        cost, earned = decision.costs.cost_seconds, self._budget * decision.costs.step_seconds
        saved = self._budget * min(CREDIT_SECONDS, CREDIT_SHARE * account.training_seconds)
        missing = cost - account.credit(self._budget, max(2.0 * cost, saved)) - earned / 2.0
        most = math.ceil(HOLD_FACTOR * decision.interval_steps)
        if missing <= 0.0:
            return 0, 0.0
        steps = math.ceil(min(missing / earned, most)) if earned > 0.0 else most
        return steps, min(1.0, missing / saved) if saved > 0.0 else 1.0

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
