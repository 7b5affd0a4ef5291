"""The triggers: when a snapshot is due, by fixed rules, under the decision in force, and within the overhead account.

Each trigger is a pure value that says when it fires next; `FixedTriggers` combines those a run has and remembers what
has fired. The adaptive trigger follows the decision in force and the overhead account; `cadence.Cadence` asks both. No
clock: steps, times and costs arrive as values.

The account has what snapshots have cost so far, against what the budget has earned. The interval keeps the *expected*
cost within the budget; the account keeps the sum. Rounding, hysteresis, a first snapshot of unknown cost and one-off
stalls all end up there and are paid back by waiting longer.

Two levels of snapshots under one budget: how it is divided, and when one that stays in memory is due.

A snapshot in memory survives the trainer, a durable one survives the machine. Per second of training, process failures
come at rate λm and lose on average half a memory interval τm, machine failures come at rate λd and lose half a durable
interval τd. Snapshots of level i cost Ci seconds of training, so that level takes the share bi = Ci / τi of it. Divide
the budget B such that the expected loss is least:

    minimise  λm τm / 2 + λd τd / 2   over τm, τd   with   Cm / τm + Cd / τd = B

Setting the derivative of the Lagrangian to zero, λi / 2 = μ Ci / τi² for both levels, gives τi ∝ sqrt(Ci / λi), that is
bi = Ci / τi ∝ sqrt(Ci λi), and as the shares add up to B:

    bi = B sqrt(Ci λi) / Σj sqrt(Cj λj)

A level is not taken more often than its own optimum, sqrt(2 Ci / λi) apart, whatever the budget: on a machine that
fails once in a month, one percent is far more than snapshots in memory are worth.

It is the first order of Young and Daly for two levels: a durable snapshot is one in memory too, which is neglected, and
failures during a snapshot or a restart are. Where a level cannot use up its part (not more than one snapshot per
step; a writer that needs its time) the loss is convex, so that the optimum is at the bound and the rest is the other's.

About three of four failures need only a process restart (DLRover's Flash Checkpoint), hence λm : λd = 3 : 1. The result
depends on the square root of the ratio only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from ckpt_engine.frequency.measure import Usual
from ckpt_engine.frequency.policy import (
    AdaptivePolicy,
    Costs,
    Decision,
    FrequencySettings,
    MemoryRhythm,
    optimal,
    settle,
)
from ckpt_engine.observe.units import duration

# Values of `SnapshotInfo.reason`; the order is the order in which triggers due at the same boundary are asked.
VALIDATION: Final = "validation"
EVERY_N_STEPS: Final = "every_n_steps"
EVERY_SECONDS: Final = "every_seconds"
INTERVAL: Final = "interval"
END: Final = "end"
MEMORY: Final = "memory"
"""Of snapshots that only stay in memory; they become durable if the trainer dies."""


@dataclass(frozen=True, slots=True)
class EveryNSteps:
    """Fires at the multiples of `steps`, so that a resumed run keeps the grid of the first one."""

    steps: int

    def next_step(self, step: int) -> int:
        """The first step after `step` at which it fires."""
        return (step // self.steps + 1) * self.steps


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Fires `seconds` after it fired last, at the first boundary from then on."""

    seconds: float

    def next_time(self, fired: float) -> float:
        """The earliest time of the next firing; `fired` is when it fired last, or when training started."""
        return fired + self.seconds


class FixedTriggers:
    """The fixed triggers of one run and what has fired so far.

    Snapshots taken for other reasons do not move them. Firing is remembered once: what is not taken at its boundary
    (busy slot, forbidden boundary) is the caller's to retry.

    Args:
        step: the step training starts or resumes at.
        now: monotonic seconds.
    """

    __slots__ = ("_at_end", "_every_n", "_every_seconds", "_on_validation", "_validated", "wake_step", "wake_time")

    def __init__(self, settings: FrequencySettings, *, step: int, now: float) -> None:
        self._every_n = EveryNSteps(settings.every_n_steps) if settings.every_n_steps else None
        self._every_seconds = EverySeconds(settings.every_seconds) if settings.every_seconds else None
        self._on_validation = settings.on_validation_end
        self._at_end = settings.at_end
        self._validated = False
        self.wake_step: float = self._every_n.next_step(step) if self._every_n else math.inf
        self.wake_time: float = self._every_seconds.next_time(now) if self._every_seconds else math.inf

    def validation_ended(self) -> None:
        """A validation ended; matters only where it is a trigger."""
        self._validated = self._on_validation

    @property
    def validation_due(self) -> bool:
        return self._validated

    def fire(self, step: int, now: float) -> str | None:
        """The reason of the first trigger due at this boundary; all that are due count as fired."""
        reason = None
        if self._every_seconds is not None and now >= self.wake_time:
            self.wake_time = self._every_seconds.next_time(now)
            reason = EVERY_SECONDS
        if self._every_n is not None and step >= self.wake_step:
            self.wake_step = self._every_n.next_step(step)
            reason = EVERY_N_STEPS
        if self._validated:
            self._validated = False
            reason = VALIDATION
        return reason

    def at_end(self, step: int, taken_step: int) -> str | None:
        """`end` if training ends at `step` with work the snapshot at `taken_step` does not hold."""
        return END if self._at_end and step > taken_step else None

    def describe(self) -> str:
        """The fixed triggers in one line."""
        parts = []
        if self._every_n is not None:
            parts.append(f"every {self._every_n.steps} steps")
        if self._every_seconds is not None:
            parts.append(f"every {duration(self._every_seconds.seconds)}")
        if self._on_validation:
            parts.append("after each validation")
        if self._at_end:
            parts.append("at the end")
        return f"{', '.join(parts) or 'never'}: fixed"


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
class TriggerAnswer:
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

    def ask(self, moment: Moment, account: Account) -> TriggerAnswer:
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
            return TriggerAnswer(
                due=False, again_step=self.review_step, again_time=left if overdue else min(left, deadline)
            )
        missing, share = self._debt(decision, account)
        hold = decision.interval_steps * (1.0 + (HOLD_FACTOR - 1) * share)
        calibration = self._steps_to_calibrate(decision.interval_steps, moment.quiet_steps)
        if calibration:
            hold = max(hold, CALIBRATION_FACTOR * decision.interval_steps)
        if self._rpo is not None:
            hold = max(decision.interval_steps, decision.bounds.rpo)
        wait = max(missing, calibration)
        if wait == 0 or since >= hold * each or overdue:
            return TriggerAnswer(due=True)
        again = min(self.review_step, step + wait)
        return TriggerAnswer(due=False, again_step=again, again_time=min(deadline, now + hold * each - since))

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

    def _ask_first(self, moment: Moment, account: Account) -> TriggerAnswer:
        """The first one comes as soon as the budget has earned its likely stall: it shows what one costs."""
        within = FIRST_WITHIN_SECONDS if self._rpo is None else min(FIRST_WITHIN_SECONDS, self._rpo / 2.0)
        missing = self._assumed_seconds - account.credit(self._budget, math.inf)
        left = min(missing / self._budget, moment.taken_time + within - moment.now)
        return TriggerAnswer(due=True) if left <= 0.0 else TriggerAnswer(due=False, again_time=moment.now + left)


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


PROCESS_FAILURES = 0.75
"""Share of failures that leave the machine, and with it the writer process, alive."""
LEAST_RATIO = 0.01
"""Durable snapshots count as at least so expensive as this share of one in memory, whatever was measured."""


@dataclass(frozen=True, slots=True)
class SharedLevel:
    """One kind of snapshot.

    Args:
        cost_seconds: training time that one takes away.
        failures: how often a failure needs this kind; only the ratio between the levels matters.
        least_seconds: the shortest interval that is possible, or the one that is fixed; 0 where there is no bound.
    """

    cost_seconds: float
    failures: float
    least_seconds: float = 0.0

    @property
    def most(self) -> float:
        """The share of training time that snapshots at the shortest interval take."""
        if self.cost_seconds <= 0.0:
            return 0.0
        return self.cost_seconds / self.least_seconds if self.least_seconds > 0.0 else math.inf


def split(budget: float, memory: SharedLevel, durable: SharedLevel) -> tuple[float, float]:
    """What of `budget` (share of training time) is for snapshots in memory, and for durable ones.

    The sum is `budget`, less what neither level can use up.
    """
    weights = [math.sqrt(max(0.0, level.cost_seconds) * max(0.0, level.failures)) for level in (memory, durable)]
    total = sum(weights)
    if total <= 0.0:
        return min(memory.most, budget), min(durable.most, budget)
    first = budget * weights[0] / total
    if first > memory.most:
        return memory.most, min(durable.most, budget - memory.most)
    if budget - first > durable.most:
        return min(memory.most, budget - durable.most), durable.most
    return first, budget - first


class MemoryTrigger:
    """When a snapshot in memory is due, and what those cost. No clock: times and steps arrive as values.

    Without a fixed rhythm one is taken as soon as its own account has earned one (to half a step). Both rhythms count
    from the newest snapshot of either kind, because the writer keeps whatever is newest. The first one plans and
    touches what the others find ready: it is paid for like any, but it is the second that says what one costs.

    Args:
        budget: of both levels together, as a share of training time.
    """

    __slots__ = ("_account", "_budget", "_cost", "_first", "_open_seconds", "_rhythm", "_step", "_time", "share")

    def __init__(self, rhythm: MemoryRhythm, budget: float) -> None:
        self._rhythm = rhythm
        self._budget = budget
        self._cost, self._first = Usual(ASSUMED_STALL_SECONDS), True
        self.share = budget
        self.divide(0.0, self.cost_seconds, 0.0)
        self.restart(0, 0.0)

    def restart(self, step: int, now: float) -> None:
        """Training starts or goes on at `step`; what one costs stays known."""
        self._account = Account()
        self._open_seconds: float | None = None
        self._step, self._time = step, now

    def retune(self, budget: float) -> None:
        """Another budget from now on; what one costs stays known."""
        self._budget = budget
        self.divide(0.0, self.cost_seconds, 0.0)

    def announce(self, nbytes: int) -> None:
        """The size of the state, for an assumption about the stall of the first one."""
        if self._first:
            self._cost = Usual(max(ASSUMED_STALL_SECONDS, nbytes / ASSUMED_BYTES_PER_SECOND))

    @property
    def cost_seconds(self) -> float:
        """What one costs: stall and fence."""
        return self._cost.value

    @property
    def covered(self) -> float:
        """The share of failures that do not need a durable snapshot."""
        return 0.0 if self._first else PROCESS_FAILURES

    def divide(
        self,
        step_seconds: float,
        durable_cost_seconds: float,
        durable_least_seconds: float,
        failures_per_second: float = math.inf,
    ) -> float:
        """Divide the budget by what is known now; the part of the durable snapshots, which is never 0.

        A fixed rhythm takes what it takes. The durable ones get the rest, and at least their part of the optimum: what
        the user fixed for memory must not keep a run from becoming durable.

        Args:
            durable_least_seconds: the shortest interval that is wanted or possible, whatever the budget.
            failures_per_second: of all kinds; infinite: unknown, so that only the budget limits snapshots in memory.
        """
        least = self._rhythm.least_seconds(step_seconds)
        if not self._rhythm.fixed and failures_per_second < math.inf:
            rate = failures_per_second * PROCESS_FAILURES
            least = max(least, optimal(self.cost_seconds, 1.0 / rate if rate > 0.0 else math.inf))
        memory = SharedLevel(self.cost_seconds, PROCESS_FAILURES, least)
        cost = max(durable_cost_seconds, LEAST_RATIO * self.cost_seconds)
        self.share, part = split(self._budget, memory, SharedLevel(cost, 1.0 - PROCESS_FAILURES, durable_least_seconds))
        return max(part, self._budget - (memory.most if self._rhythm.fixed else self.share))

    def share_out(
        self, settings: FrequencySettings, costs: Costs, decision: Decision | None, failures_per_second: float
    ) -> float:
        """Divide the budget by what durable snapshots cost now; their part of it.

        Args:
            decision: on their interval so far; None: it is fixed, or nothing was decided.
        """
        fixed = settings.every_seconds or (settings.every_n_steps or 1) * costs.step_seconds
        least = decision.bounds.unbudgeted * costs.step_seconds if decision is not None else fixed
        return self.divide(costs.step_seconds, costs.cost_seconds, least, failures_per_second)

    def due(self, step: int, now: float, training_seconds: float) -> bool:
        """Whether one is due at this boundary.

        Args:
            training_seconds: time of all steps since the start, pauses not included.
        """
        self._settle()
        rhythm = self._rhythm
        if step <= self._step:
            return False
        if rhythm.every_n_steps is not None:
            return step // rhythm.every_n_steps > self._step // rhythm.every_n_steps
        if rhythm.every_seconds is not None:
            return now - self._time >= rhythm.every_seconds
        earned = self.share * (training_seconds - self._account.training_seconds)
        self._account.training_seconds = training_seconds
        cost = self.cost_seconds
        return self._account.credit(self.share, 2.0 * cost) >= cost - earned / 2.0

    def newer(self, step: int, now: float) -> None:
        """A snapshot of either kind was taken at `step`."""
        self._settle()
        self._step, self._time = step, now

    def took(self, step: int, now: float, stall_seconds: float) -> None:
        """One was taken into memory."""
        self.newer(step, now)
        self._open_seconds = stall_seconds
        self._account.paused_seconds += stall_seconds

    def fenced(self, seconds: float) -> bool:
        """Training waited for a copy; False if it was none of these."""
        if self._open_seconds is None:
            return False
        self._open_seconds += seconds
        self._account.paused_seconds += seconds
        return True

    def _settle(self) -> None:
        """What one cost is known once its fence is over: at the next boundary."""
        if self._open_seconds is not None:
            if self._first:
                self._cost, self._first = Usual(min(self._open_seconds, self._cost.value)), False
            else:
                self._cost.add(self._open_seconds)
            self._open_seconds = None
