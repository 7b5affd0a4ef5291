"""The triggers: when a snapshot is due.

Each trigger is a pure value that says when it fires next; `FixedTriggers` combines those a run has and remembers what
has fired. The adaptive trigger follows the decision in force and the overhead account; `cadence.Cadence` asks both. No
clock: steps, times and costs arrive as values.

The account has what snapshots have cost so far, against what the budget has earned. The interval keeps the *expected*
cost within the budget; the account keeps the sum. Rounding, hysteresis, a first snapshot of unknown cost and one-off
stalls all end up there and are paid back by waiting longer.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple, Protocol

from ckpt_engine.frequency.measure import ENOUGH_STEPS, WARM_UP_STEPS, RobustBaseline
from ckpt_engine.frequency.policy import Decision, FrequencySettings, MemoryRhythm, left_for_snapshots, settle
from ckpt_engine.observe.units import duration

# Values of `SnapshotInfo.reason`; the order is the order in which triggers due at the same boundary are asked.
VALIDATION: Final = "validation"
EVERY_N_STEPS: Final = "every_n_steps"
AT_STEPS: Final = "at_steps"
EVERY_SECONDS: Final = "every_seconds"
INTERVAL: Final = "interval"
RESUME: Final = "resume"
END: Final = "end"
MEMORY: Final = "memory"
"""Of snapshots that only stay in memory; they become durable if the trainer dies."""
# A decision is made again after so many steps, or after that share of the interval where that is longer.
REVIEW_STEPS = 256
REVIEW_SHARE = 0.5
# Assumed for the first snapshot only, whose cost is not measured yet.
ASSUMED_STALL_SECONDS = 0.02
ASSUMED_BYTES_PER_SECOND = 4e9
FIRST_WITHIN_SECONDS = 600.0
# Training whose budget may be saved up: a tenth of the six hours over which the budget counts as kept.
CREDIT_SECONDS = 2160.0
CREDIT_SHARE = 0.1
# How far the account may stretch an interval to get out of debt, where the debt is as large as that.
HOLD_FACTOR = 2.0
# Over how much of itself an interval is spread where steps are uneven: the loss is 1 % of what it costs.
SPREAD = 0.5
# Clean steps a window must leave behind the persist while the clean step time is not known well enough, or after so
# many windows without any: what snapshots cost does not show in steps that are all disturbed.
CALIBRATION_STEPS = 3
CALIBRATION_SHARE = 0.1
# How far waiting for them may stretch an interval.
CALIBRATION_FACTOR = 2.0
CALIBRATE_AFTER_WINDOWS = 16


class SnapshotTimer(Protocol):
    """What decides when snapshots are taken; `Cadence` is one, and says more of these methods. Times are in seconds."""

    @property
    def quiet(self) -> tuple[float, float]:
        """The step and the monotonic time before which nothing is due if nothing is reported until then."""

    def start(self, step: int, /) -> None:
        """Training starts or resumes at `step`."""

    def boundary(self, step: int, /) -> str | None:
        """The reason of the snapshot that is due after `step`; None: none is."""

    def taken(self, step: int, stall: float, wait: float = 0.0, /) -> None:
        """A snapshot of `step` was taken: it blocked training, after a wait for a free slot."""

    def skipped(self, step: int, reason: str, /) -> None:
        """The snapshot that was due at `step` could not be taken, for a reason such as `busy`."""

    def committed(self, step: int, latency: float, written: float, busy: float | None = None, /) -> None:
        """The snapshot of `step` is durable, so many bytes of it were written, and the writer was busy so long."""

    def failed(self, step: int, /) -> None:
        """The snapshot of `step` will not become durable."""


class FixedTriggers:
    """The fixed triggers of one run and what has fired so far.

    Snapshots taken for other reasons do not move them. Firing is remembered once: what is not taken at its boundary
    (busy slot, forbidden boundary) is the caller's to retry.

    Args:
        step: the step training starts or resumes at.
        now: monotonic seconds.
    """

    def __init__(self, settings: FrequencySettings, *, step: int, now: float) -> None:
        self._settings = settings
        self.validation_due = False
        self.wake_step, self.wake_time = self._next_step(step), self._next_time(now)

    def _next_step(self, step: int) -> float:
        """The next multiple or listed step after `step`, so that a resumed run keeps the grid of the first one."""
        steps = self._settings.every_n_steps
        listed = [one for one in self._settings.at_steps if one > step]
        return min([*listed, (step // steps + 1) * steps if steps else math.inf])

    def _next_time(self, fired: float) -> float:
        return fired + (self._settings.every_seconds or math.inf)

    def validation_ended(self) -> None:
        """A validation ended; matters only where it is a trigger."""
        self.validation_due = self._settings.on_validation_end

    def fire(self, step: int, now: float) -> str | None:
        """The reason of the first trigger due at this boundary; all that are due count as fired."""
        reason = None
        if now >= self.wake_time:
            self.wake_time, reason = self._next_time(now), EVERY_SECONDS
        if step >= self.wake_step:
            reason = AT_STEPS if self.wake_step in self._settings.at_steps else EVERY_N_STEPS
            self.wake_step = self._next_step(step)
        if self.validation_due:
            self.validation_due, reason = False, VALIDATION
        return reason

    def at_end(self, step: int, taken_step: int) -> str | None:
        """`end` if training ends at `step` with work the snapshot at `taken_step` does not hold."""
        return END if self._settings.at_end and step > taken_step else None

    def describe(self) -> str:
        """The fixed triggers in one line."""
        settings, steps = self._settings, self._settings.every_n_steps
        rows = (
            (steps is not None, "every step" if steps == 1 else f"every {steps} steps"),
            (settings.every_seconds is not None, f"every {duration(settings.every_seconds or 0.0)}"),
            (settings.at_steps, f"at steps {', '.join(map(str, settings.at_steps))}"),
            (settings.on_validation_end, "after each validation"),
            (settings.at_end, "at the end"),
        )
        return " and ".join(", ".join(text for fires, text in rows if fires).rsplit(", ", 1)) or "never"


class Moment(NamedTuple):
    """A boundary.

    Args:
        taken_time: that of the newest snapshot.
        trained_seconds: time of the steps since then, pauses not included.
        safe_time: instant of the newest snapshot that is durable or on its way.
        failures: snapshots that failed since the newest durable one.
        quiet_steps: clean steps since the last snapshot was settled; 0 while one is in flight.
    """

    step: int
    now: float
    taken_time: float
    trained_seconds: float
    safe_time: float
    failures: int
    quiet_steps: int


class TriggerAnswer(NamedTuple):
    """Due now, or ask again at a step or a time, whichever comes first."""

    due: bool
    again_step: float = math.inf
    again_time: float = math.inf


class AdaptiveTrigger:
    """Keeps the decision in force and applies it."""

    def __init__(self, settings: FrequencySettings) -> None:
        self._budget = settings.budget
        self._first_within = min(FIRST_WITHIN_SECONDS, *(limit / 2.0 for limit in settings.limits.values()), math.inf)
        self._assumed_seconds = ASSUMED_STALL_SECONDS
        self.decision: Decision | None = None
        self.review_step = 0
        self.calibrating = False
        self.uneven = False
        """Some steps are slow or quick for reasons of their own, perhaps at regular distances: see `_spread`."""
        self._windows = self._windows_without_quiet = 0

    def restart(self, step: int) -> None:
        """Measuring starts again at `step`; the decision stays."""
        self.review_step = step + REVIEW_STEPS

    def announce(self, nbytes: int) -> None:
        """The size of the state, for an assumption about the stall of the first snapshot."""
        self._assumed_seconds = max(ASSUMED_STALL_SECONDS, nbytes / ASSUMED_BYTES_PER_SECOND)

    def window_began(self, quiet_steps: int) -> None:
        """A snapshot was taken after `quiet_steps` clean steps."""
        self._windows += 1
        self._windows_without_quiet = 0 if quiet_steps >= CALIBRATION_STEPS else self._windows_without_quiet + 1

    def settle(self, step: int, wanted: Decision, *, held_back: bool) -> Decision:
        """`wanted` with hysteresis, which is in force from now on."""
        current = self.decision.interval_steps if self.decision else None
        self.decision = settle(current, wanted, held_back=held_back)
        self.review_step = step + max(REVIEW_STEPS, int(REVIEW_SHARE * self.decision.interval_steps))
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
        since, lower = moment.trained_seconds + each / 2.0, decision.bounds.lower
        every = max(float(lower), decision.interval_steps * self._spread()) * each
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
        if decision.limit_seconds < math.inf:
            hold = max(decision.interval_steps, decision.bounds.rpo)
        wait = max(missing, calibration)
        if wait == 0 or since >= hold * each or overdue:
            return TriggerAnswer(due=True)
        again = min(self.review_step, step + wait)
        return TriggerAnswer(due=False, again_step=again, again_time=min(deadline, now + hold * each - since))

    def _spread(self) -> float:
        """A factor on the interval, around 1: what comes at regular distances must not meet each snapshot, or none.

        Multiples of the golden ratio fill a range more evenly than chance does (Weyl 1916).
        """
        return 1.0 + SPREAD * (self._windows * 0.6180339887498949 % 1.0 - 0.5) if self.uneven else 1.0

    def _deadline(self, decision: Decision, moment: Moment) -> float:
        """When a snapshot is due whatever the interval: time counts, validation is work to lose too.

        A snapshot may fail: there is time for a second one where budget and writer leave it.
        """
        limit = decision.limit_seconds
        if math.isinf(limit):
            return math.inf
        needed = decision.costs.promised_latency_seconds + decision.costs.step_seconds
        twice = limit - 2.0 * needed
        fits = twice >= decision.bounds.lower * decision.costs.step_seconds
        return moment.safe_time + max(twice if fits else limit - needed, 0.0)

    def _debt(self, decision: Decision, account: Account) -> tuple[int, float]:
        """Steps until the account can pay for a snapshot (to half a step), and how much it owes: 0.0 to 1.0."""
        earned = self._budget * decision.costs.step_seconds
        cost = decision.costs.cost_seconds - earned / 2.0
        owes = account.owes(self._budget, cost)
        if owes <= 0.0:
            return 0, 0.0
        most = math.ceil(HOLD_FACTOR * decision.interval_steps)
        missing = cost - account.credit(self._budget, math.inf)
        return math.ceil(min(missing / earned, most)) if earned > 0.0 else most, owes

    def _steps_to_calibrate(self, every: int, quiet_steps: int) -> int:
        if not (self.calibrating or self._windows_without_quiet >= CALIBRATE_AFTER_WINDOWS):
            return 0
        return max(0, max(CALIBRATION_STEPS, math.ceil(CALIBRATION_SHARE * every)) - quiet_steps)

    def _ask_first(self, moment: Moment, account: Account) -> TriggerAnswer:
        """The first one comes as soon as the budget has earned its likely stall: it shows what one costs."""
        missing = self._assumed_seconds - account.credit(self._budget, math.inf)
        left = min(missing / self._budget, moment.taken_time + self._first_within - moment.now)
        return TriggerAnswer(due=True) if left <= 0.0 else TriggerAnswer(due=False, again_time=moment.now + left)


class Account:
    """Seconds of training and of overhead since training started, up to the newest boundary.

    Args:
        earlier: clean training, overhead of snapshots and time of hooks in earlier attempts of this run.

    Attributes:
        training_seconds: time of all steps, pauses (stall, fence, wait) not included; written by the training thread
            at every step.
        paused_seconds: stalls, fences and waits for a slot.
        slowdown_seconds: how much longer disturbed steps were, as `CostMeter` believes it of each snapshot.
        hook_seconds: what the engine's hooks took at each step, whether a snapshot followed or not.
        background_seconds: what work for snapshots took that no snapshot is charged for; `slowdown_seconds` has it.
        next_step: the one under way.
        marked: when it began, at the newest boundary.
        excluded_seconds: of the time since then that is not training.
        hooked: what hooks had taken until then, since the process began.
    """

    def __init__(self, earlier: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> None:
        self.earlier = earlier
        self.background_seconds = 0.0
        self.restart(0, 0.0, 0.0)

    def restart(self, step: int, now: float, hooked: float) -> None:
        """Training starts or resumes at `step`: nothing is spent."""
        self.training_seconds = self.paused_seconds = self.slowdown_seconds = self.hook_seconds = 0.0
        self.next_step, self.marked, self.hooked, self.excluded_seconds = step + 1, now, hooked, 0.0
        self._credit: float | None = None
        self._clean = 0.0
        self._spent = 0.0

    def pause(self, seconds: float) -> None:
        """Snapshots have blocked the step under way for so long."""
        self.excluded_seconds += seconds
        self.paused_seconds += seconds

    @property
    def spent_seconds(self) -> float:
        return self.paused_seconds + self.slowdown_seconds

    @property
    def totals(self) -> tuple[float, float, float]:
        """Seconds of clean training, of snapshots and of hooks in the whole run."""
        clean, spent, hooks = self.earlier
        clean += self.training_seconds - self.slowdown_seconds
        return clean, spent + self.spent_seconds, hooks + self.hook_seconds

    @property
    def overhead_fraction(self) -> float:
        """(stalls + fences + waits + slowdown + hooks) / training time without them; 0.0 before training."""
        clean, spent, hooks = self.totals
        return (spent + hooks) / clean if clean > 0.0 else 0.0

    @property
    def hook_share(self) -> float:
        """What the hooks of this process take of training."""
        return self.hook_seconds / (self.training_seconds or math.inf)

    def credit(self, budget: float, most_seconds: float) -> float:
        """Seconds of overhead that may be spent now; negative is debt.

        Credit beyond `most_seconds` is lost: what was not needed for hours must not be spent in a minute.
        """
        if self._credit is None:
            clean, spent, _ = self.earlier
            most = budget * CREDIT_SECONDS
            self._credit = max(-most, min(budget * clean - spent, most))
        clean, spent = self.training_seconds - self.slowdown_seconds, self.spent_seconds
        self._credit += left_for_snapshots(budget, self.hook_share) * (clean - self._clean) - (spent - self._spent)
        self._credit = min(self._credit, most_seconds)
        self._clean, self._spent = clean, spent
        return self._credit

    def owes(self, budget: float, cost_seconds: float) -> float:
        """How deep in debt it is before a snapshot of that cost is paid for: 0.0 (not) to 1.0.

        What may be saved up may also be owed: one expensive snapshot is paid back over the hours in which the budget
        has to be kept. A run that has just begun owes more for the same.
        """
        saved = budget * min(CREDIT_SECONDS, CREDIT_SHARE * (self.earlier[0] + self.training_seconds))
        missing = cost_seconds - self.credit(budget, max(2.0 * cost_seconds, saved))
        if missing <= 0.0:
            return 0.0
        return min(1.0, missing / saved) if saved > 0.0 else 1.0


class MemoryTrigger:
    """When a snapshot in memory is due, and what those cost. No clock: times and steps arrive as values.

    A fixed rhythm goes by steps or seconds; without one the interval of the levels' common optimum counts, from the
    newest snapshot of either kind: the writer keeps whatever is newest. The first one plans and touches what the
    others find ready: it is paid for like any, but it is the second that says what one costs.

    Attributes:
        interval_seconds: the interval in force, in seconds of training; infinite: none is due.
        limit_seconds: the most work that a failure may cost which leaves memory alive.
        review_step: when to decide again, where no durable snapshot has led to it before.
    """

    def __init__(self, rhythm: MemoryRhythm) -> None:
        self._rhythm = rhythm
        self._cost, self._first = RobustBaseline(ASSUMED_STALL_SECONDS), True
        self.interval_seconds = self.limit_seconds = math.inf
        self.restart(0, 0.0)

    def restart(self, step: int, now: float) -> None:
        """Training starts or resumes at `step`; what one costs stays known."""
        self.review_step = step + WARM_UP_STEPS + ENOUGH_STEPS
        self._open_seconds: float | None = None
        self._step, self._time, self._trained = step, now, 0.0

    def announce(self, nbytes: int) -> None:
        """The size of the state, for an assumption about the stall of the first one."""
        if self._first:
            self._cost = RobustBaseline(max(ASSUMED_STALL_SECONDS, nbytes / ASSUMED_BYTES_PER_SECOND))

    @property
    def cost_seconds(self) -> float:
        """What one costs: stall and fence."""
        return self._cost.value

    def due(self, step: int, now: float, account: Account, budget: float, step_seconds: float) -> bool:
        """Whether one is due at this boundary.

        Args:
            account: of all snapshots: the first one waits until it has earned its likely cost, and a debt stretches the
                interval, to twice at most.
            budget: of all of them.
            step_seconds: what a step takes; intervals count to half of it, limits ahead to the next one.
        """
        self._settle()
        if step <= self._step:
            return False
        if self._rhythm.fixed:
            due_step, due_time = self.quiet(step_seconds)
            return step >= due_step or now >= due_time
        if now - self._time + step_seconds + self.cost_seconds > self.limit_seconds:
            return True
        since = account.training_seconds - self._trained + step_seconds / 2.0
        if since < self.interval_seconds:
            return False
        if self._first:
            return account.credit(budget, math.inf) >= self.cost_seconds
        return since >= self.interval_seconds * (1.0 + (HOLD_FACTOR - 1.0) * account.owes(budget, self.cost_seconds))

    def quiet(self, step_seconds: float) -> tuple[float, float]:
        """The step and the time before which none is due, where only training comes in between."""
        if (steps := self._rhythm.every_n_steps) is not None:
            return (self._step // steps + 1) * steps, math.inf
        if self._rhythm.every_seconds is not None:
            return math.inf, self._time + self._rhythm.every_seconds
        due = min(self.interval_seconds - step_seconds / 2.0, self.limit_seconds - step_seconds - self.cost_seconds)
        return math.inf, self._time + due

    def newer(self, step: int, now: float, trained_seconds: float) -> None:
        """A snapshot of either kind was taken at `step`, after so much training."""
        self._settle()
        self._step, self._time, self._trained = step, now, trained_seconds

    def took(self, step: int, now: float, trained_seconds: float, stall_seconds: float) -> None:
        """One was taken into memory."""
        self.newer(step, now, trained_seconds)
        self._open_seconds = stall_seconds

    def fenced(self, seconds: float) -> bool:
        """Training waited for a copy; False if it was none of these."""
        if self._open_seconds is None:
            return False
        self._open_seconds += seconds
        return True

    def _settle(self) -> None:
        """What one cost is known once its fence is over: at the next boundary."""
        if self._open_seconds is not None:
            if self._first:
                self._cost, self._first = RobustBaseline(min(self._open_seconds, self._cost.value)), False
            else:
                self._cost.add(self._open_seconds)
            self._open_seconds = None
