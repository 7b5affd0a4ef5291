"""When a run takes its snapshots, asked at every boundary."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ckpt_engine.frequency.failures import Evidence, FailureBelief, prior_of
from ckpt_engine.frequency.learned import Learned, TakenSnapshot
from ckpt_engine.frequency.measure import CLEAN_WINDOW, ENOUGH_STEPS, CostMeter, StepTimes, measured
from ckpt_engine.frequency.policy import (
    AdaptivePolicy,
    Costs,
    FarCosts,
    FrequencyPolicy,
    FrequencySettings,
    MemoryRhythm,
)
from ckpt_engine.frequency.triggers import (
    ASSUMED_STALL_SECONDS,
    INTERVAL,
    REVIEW_STEPS,
    Account,
    AdaptiveTrigger,
    FixedTriggers,
    MemoryTrigger,
    Moment,
)
from ckpt_engine.observe.clock import Clock
from ckpt_engine.observe.events import (
    UNKNOWN,
    AttemptsFound,
    Event,
    EventSink,
    IntervalChanged,
    Notice,
    SnapshotCommitted,
    SnapshotFailed,
    SnapshotReplicated,
    SnapshotSkipped,
)
from ckpt_engine.observe.run_times import MEASURED, hook_time

WARM_UP_STEPS = 2
RETRY_SECONDS = 10.0
_MOST_IN_FLIGHT = 64
_NOT_STARTED = 1 << 62
"""No step follows on it: the first boundary begins."""


class Cadence:
    """Decides at each boundary whether a snapshot is due, and learns from what each one costs.

    Everything is called on the training thread. Call order, per training step:

        cadence.emit(event) / committed / failed      for what the writer reported since the last boundary
        reason = cadence.boundary(step)               at the snapshot instant
        if reason: save, then cadence.taken(step, stall) - or cadence.skipped(step, "busy") if no slot is free
        cadence.fence(seconds)                        after the fence, before the state is mutated

    With a memory tier also, where none was taken: `if cadence.memory_due(step)`, save it into memory and call `held`;
    then, taken or not, `memory_over`.

    plus `exclude(seconds)` for time that is not training (validation) and `validation_ended()`. A due snapshot that
    is not taken stays due: `boundary` returns its reason again until `taken` is called.

    Args:
        settings: what the user asked for.
        clock: the source of durations.
        sink: gets `IntervalChanged`, `SnapshotSkipped` (once per due snapshot) and `Notice`.
        ranks: that train together: what fails the job grows with them.
    """

    policy_of: Callable[[FrequencySettings], FrequencyPolicy] = AdaptivePolicy
    """What decides from costs and failure rates; made again where the settings change."""
    idle_seconds = 0.0
    """How long ranks have waited for each other, see `ranks.world.Waits`."""

    def __init__(self, settings: FrequencySettings, clock: Clock, sink: EventSink, ranks: int = 1) -> None:
        self._settings = settings
        self._now: Callable[[], float] = clock.monotonic
        self._sink = sink
        self._policy = self.policy_of(settings)
        self.adaptive = AdaptiveTrigger(settings)
        self._memory = MemoryTrigger(settings.memory or MemoryRhythm())
        self._far: FarCosts | None = None
        self._ranks = ranks
        self._evidence = Evidence(prior_of(settings.mtbf_seconds, ranks))
        self._began = self._now()
        self._background_seconds = 0.0
        self._meter = CostMeter()
        self._steps = StepTimes()
        self._account = Account()
        self._step_seconds = 0.0
        self._decided: object = None
        self.overtaken = 0
        """Snapshots that were not taken, because the next one was due before a slot was free."""
        self._begin(0, self._began)
        self._next = _NOT_STARTED

    def _begin(self, step: int, now: float) -> None:
        self._steps = StepTimes(self._steps.prior, WARM_UP_STEPS)
        self._account = Account(self._account.earlier)
        self._fixed = FixedTriggers(self._settings, step=step, now=now)
        self.adaptive.restart(step)
        self._memory.restart(step, now)
        self._in_flight: deque[TakenSnapshot] = deque(maxlen=_MOST_IN_FLIGHT)
        self._settled: list[TakenSnapshot] = []
        self._pending: str | None = None
        self._obstacle: str | None = None
        self._held_back = self._disturbed = False
        self._mark = self._taken_time = self._durable_instant = now
        self._paused = self._taken_trained = 0.0
        self._hooked = hook_time.seconds
        self._failures_in_a_row = 0
        self._retry_time = -math.inf
        self._next = step + 1
        self._durable_step = self._quiet_step = step
        self._wake_step: float = -1
        self._wake_time = math.inf
        self._memory_review = step + WARM_UP_STEPS + ENOUGH_STEPS

    # ------------------------------------------------------------------ the step

    def start(self, step: int) -> None:
        """Training starts or resumes at `step` (all of whose work is safe); the time base starts here.

        Optional: the first call of `boundary` does it too, and then returns None.
        """
        self._begin(step, self._now())

    def assume(self, prior: FailureBelief) -> None:
        """What is believed of failures before there is evidence; else the settings say that."""
        self._evidence = replace(self._evidence, prior=prior)

    def retune(self, settings: FrequencySettings) -> None:
        """Other settings from the next boundary on. What was measured stays; what was due is not any more."""
        if settings.mtbf_seconds != self._settings.mtbf_seconds:
            self.assume(prior_of(settings.mtbf_seconds, self._ranks))
        self._settings = settings
        now, step = self._now(), self._next - 1
        self._fixed = FixedTriggers(settings, step=step, now=now)
        self._policy = self.policy_of(settings)
        self.adaptive = AdaptiveTrigger(settings)
        self.adaptive.restart(step)
        self._pending = None
        self._wake_step = -1

    def boundary(self, step: int) -> str | None:
        """The reason of the snapshot that is due now, or None.

        Args:
            step: number of the training step just completed. Repeating a number (gradient accumulation) measures
                nothing; a jump counts as so many equal steps; going back starts the measurement again.
        """
        now = self._now()
        count = step + 1 - self._next
        if count < 1:
            return self._not_ahead(step, now)
        hooks = hook_time.seconds - self._hooked
        self._hooked += hooks
        self._account.hook_seconds += hooks
        seconds = now - self._mark - self._paused - hooks
        if seconds < 0.0:
            seconds = 0.0
        self._mark = now
        self._paused = 0.0
        self._next = step + 1
        self._account.training_seconds += seconds
        for _ in range(1 if count == 1 else min(count, CLEAN_WINDOW)):
            add = self._steps.add_disturbed if self._disturbed else self._steps.add_clean
            add(seconds / count)
        if step < self._wake_step and now < self._wake_time:
            return None
        return self._wake(step, now)

    def memory_due(self, step: int) -> bool:
        """Whether a snapshot that only stays in memory is due; ask after `boundary`, where no durable one was taken."""
        if self._settings.memory is None:
            return False
        if step >= self._memory_review:
            self._decide(step)
        return self._memory.due(step, self._now(), self._account, self._settings.budget, self._step_seconds)

    def memory_over(self, step: int) -> None:
        """The snapshot that `memory_due` has asked for at `step` was taken, or cannot be."""

    def background(self, seconds: float) -> None:
        """Work for snapshots that no snapshot is charged for took `seconds` of training in all, until now."""
        self._account.slowdown_seconds += seconds - self._background_seconds
        self._background_seconds = seconds

    def exclude(self, seconds: float) -> None:
        """`seconds` since the last boundary were not training: validation, logging of the user, a debugger."""
        self._paused += measured(seconds)

    def validation_ended(self) -> None:
        """A validation ended; the snapshot it may trigger is due at the next boundary."""
        self._fixed.validation_ended()
        self._wake_step = -1

    def ended(self, step: int) -> str | None:
        """The reason of the snapshot due because training ends at `step`, if that work is in no snapshot yet."""
        safe = max((snapshot.step for snapshot in self._in_flight), default=self._durable_step)
        return self._fixed.at_end(step, safe) or (self._pending if step > safe else None)

    # ------------------------------------------------------------------ what became of a snapshot

    def taken(self, step: int, stall_seconds: float, wait_seconds: float = 0.0) -> None:
        """A snapshot was taken at `step`, whatever asked for it.

        Args:
            stall_seconds: how long it blocked training, `wait_seconds` not included.
            wait_seconds: how long training waited for a free slot before (0 where snapshots are skipped instead).
        """
        now = self._now()
        stall, wait = measured(stall_seconds), measured(wait_seconds)
        self._paused += stall + wait
        self._account.paused_seconds += stall + wait
        self._held_back |= wait > 0.0
        self.adaptive.window_began(0 if self._disturbed else step - self._quiet_step)
        self._in_flight.append(TakenSnapshot(step, now - stall, stall))
        self._disturbed = True
        self._pending = self._obstacle = None
        self._retry_time = -math.inf
        self._taken_time, self._taken_trained = now, self._account.training_seconds
        self._wake_step = -1
        self._memory.newer(step, now, self._taken_trained)

    def held(self, step: int, stall_seconds: float) -> None:
        """A snapshot that only stays in memory was taken at `step`; it blocked training for `stall_seconds`."""
        stall = measured(stall_seconds)
        self._paused += stall
        self._account.paused_seconds += stall
        self._memory.took(step, self._now(), self._account.training_seconds, stall)

    def fence(self, seconds: float) -> None:
        """Training waited `seconds` for staging to finish; part of the newest snapshot's stall."""
        seconds = measured(seconds)
        self._paused += seconds
        self._account.paused_seconds += seconds
        if not self._memory.fenced(seconds) and self._in_flight:
            self._in_flight[-1].stall_seconds += seconds

    def skipped(self, step: int, reason: str) -> None:
        """The due snapshot could not be taken at this boundary (`busy`, `accumulating`, ...); it stays due.

        It is offered again at the next boundary, after an `error` ten seconds later: trying costs a stall.
        """
        if reason == "busy":
            self._held_back = True
        elif reason == "error":
            self._retry_time = self._now() + RETRY_SECONDS
        earlier, self._obstacle = self._obstacle, reason
        if earlier is None:
            self._sink.emit(SnapshotSkipped(step=step, reason=reason))

    def committed(
        self, step: int, latency_seconds: float, written_bytes: float, busy_seconds: float | None = None
    ) -> None:
        """The snapshot taken at `step` is durable on the nearest durable tier.

        Args:
            latency_seconds: from the snapshot instant.
            busy_seconds: how long it occupied the writer; None: all of the latency.
        """
        latency = measured(latency_seconds)
        snapshot = next((one for one in self._in_flight if one.step == step), None)
        instant = snapshot.instant if snapshot else self._now() - latency
        self._failures_in_a_row = 0
        self._durable_step = max(self._durable_step, step)
        self._durable_instant = max(self._durable_instant, instant)
        busy = latency if busy_seconds is None else measured(busy_seconds)
        self._settle(snapshot, latency, busy, measured(written_bytes))

    def failed(self, step: int) -> None:
        """The snapshot taken at `step` will not become durable. The next one comes at the usual interval."""
        snapshot = next((one for one in self._in_flight if one.step == step), None)
        self._failures_in_a_row += 1
        self._settle(snapshot, None, 0.0, 0.0)

    def emit(self, event: Event) -> None:
        """Takes the writer's events, so that a cadence can be one of the sinks; other kinds are ignored."""
        if isinstance(event, SnapshotCommitted):
            self.committed(event.step, event.latency_seconds, event.written_bytes, event.write_seconds)
        elif isinstance(event, SnapshotFailed):
            self.failed(event.step)
        elif isinstance(event, AttemptsFound):
            self._evidence = replace(self._evidence, lasted=event.lasted, failures=event.failures)
            self._began = self._now() - event.seconds
        elif isinstance(event, SnapshotReplicated):
            self._far = FarCosts(event.sent_bytes, event.copy_seconds, event.latency_seconds)

    def announce(self, nbytes: int) -> None:
        """The size of the state, so that the first snapshot waits until the budget has earned its likely stall."""
        self.adaptive.announce(nbytes)
        self._memory.announce(nbytes)

    @property
    def interval_steps(self) -> int | None:
        """The interval in force; None before the first snapshot was measured, or where there is none in steps."""
        if self._settings.overhead is None:
            return self._settings.every_n_steps
        return self.adaptive.decision.interval_steps if self.adaptive.decision else None

    @property
    def why(self) -> str:
        """One line that explains the interval."""
        if self._settings.overhead is None:
            return self._fixed.describe()
        return self.adaptive.decision.why if self.adaptive.decision else self._settings.aim

    def pace(self) -> dict[str, Any]:
        """The interval in force and why, and how far apart copies to a further tier should be, as JSON; any thread."""
        far = math.inf if self.adaptive.decision is None else self.adaptive.decision.far_seconds
        far_seconds = far if far < math.inf else None
        return {"interval_steps": self.interval_steps, "why": self.why, "far_seconds": far_seconds}

    @property
    def overhead_fraction(self) -> float:
        """(stalls + fences + waits + slowdown + hooks) / training time without them, earlier attempts included."""
        return self._account.overhead_fraction

    @property
    def measured(self) -> Mapping[str, float]:
        """See `run_times.MEASURED`. Cheap: what a step takes is that of the newest decision."""
        (slowdown, error), costs = self._meter.slowdown_of_all, self._meter.costs(self._step_seconds)
        memory = 0.0 if self._settings.memory is None else self._memory.cost_seconds
        values = (slowdown + self._background_seconds, error, costs.step_seconds, costs.stall_seconds)
        each = (costs.slowdown_seconds, costs.latency_seconds, memory, costs.written_bytes / 1e6, self.idle_seconds)
        steps = self._fixed.wake_step - self._next + 1
        due = min(self._wake_time - self._mark, steps * costs.step_seconds if costs.step_seconds > 0.0 else math.inf)
        shares = self.overhead_fraction, 0.0 if self._settings.overhead is None else self._settings.budget
        return dict(zip(MEASURED, (*values, *each, *shares, due if due < math.inf else 0.0), strict=True))

    @property
    def quiet(self) -> tuple[float, float]:
        """The step and the time before which nothing is due if nothing is reported until then."""
        if self._settings.memory is None:
            return self._wake_step, self._wake_time
        step, time = self._memory.quiet(self._step_seconds)
        return min(self._wake_step, self._memory_review, step), min(self._wake_time, time)

    def age_of_last_durable(self) -> float:
        """Seconds since the instant of the newest durable snapshot, or since `start`: the work at risk."""
        return self._now() - self._durable_instant

    def state(self) -> dict[str, Any]:
        """What was learned, as JSON; store it with each snapshot (never needed to rebuild the training state)."""
        step_seconds = self._steps.step_seconds() if self._steps.known else None
        believed, before = self._evidence.after(self._now() - self._began), self._evidence.base
        totals = self._account.totals
        return Learned(believed, self._meter, step_seconds, self.interval_steps, totals, before).to_json()

    def restore(self, state: Mapping[str, Any], *, failure: str = UNKNOWN) -> None:
        """Starts from what an earlier run of this training had learned. Call before `start`.

        A state this version cannot read is reported as a `Notice` and ignored: it only costs a little learning. What
        the nearest tier knows of earlier attempts is more than what a snapshot can. Only where that tier knows of none,
        because it was lost itself, the belief of the snapshot counts, and later attempts there add to it.

        Args:
            failure: what has ended the earlier run, as far as the snapshot tells; "": nothing, it ended normally.
        """
        try:
            learned = Learned.from_json(state)
        except (KeyError, TypeError, ValueError, OverflowError) as err:
            self._sink.emit(Notice("INFO", f"what the earlier run learned about snapshot costs is not usable: {err}"))
            return
        remembered = learned.failures.failed(failure) if failure else learned.failures
        self._evidence = replace(self._evidence, remembered=remembered, before=learned.before)
        self._meter = learned.meter
        self._account.earlier = learned.account
        self._steps = StepTimes(learned.step_seconds)

    def _not_ahead(self, step: int, now: float) -> str | None:
        """Of `boundary` at the first step, the same one once more, or an earlier one."""
        if step < self._next - 1:
            self._begin(step, now)
            return None
        return self._wake(step, now) if self._pending or self._fixed.validation_due else None

    def _settle(self, snapshot: TakenSnapshot | None, latency: float | None, busy: float, written: float) -> None:
        """Notes the end of a snapshot; it is learned from at the next boundary, when that step is measured too."""
        if snapshot is None or any(one is snapshot for one in self._settled):
            return
        snapshot.latency_seconds, snapshot.busy_seconds, snapshot.written_bytes = latency, busy, written
        self._settled.append(snapshot)
        self._wake_step = -1

    def _wake(self, step: int, now: float) -> str | None:
        """The slow path of `boundary`: something may be due, or was learned."""
        if self._settled:
            self._learn(step)
            if not self._in_flight:
                self._disturbed = False
                self._quiet_step = step
        fired = self._fixed.fire(step, now)
        self._wake_step, self._wake_time = self._fixed.wake_step, self._fixed.wake_time
        self.overtaken += bool(fired and self._pending and self._obstacle == "busy")
        if self._pending is None:
            self._pending = fired or (INTERVAL if self._interval_due(step, now) else None)
        if self._pending is None:
            return None
        if now < self._retry_time:
            self._wake_time = min(self._wake_time, self._retry_time)
            return None
        self._wake_step = -1
        return self._pending

    def _learn(self, step: int) -> None:
        for settled in self._settled:
            self._in_flight.remove(settled)
            over = math.inf if settled.latency_seconds is None else settled.instant + settled.latency_seconds
            slowdown = self._steps.take_slowdown(0.0 if self._in_flight else max(0.0, self._mark - over))
            self._account.slowdown_seconds += self._meter.add_cost(settled.stall_seconds, slowdown)
            if settled.latency_seconds is not None:
                self._meter.add_durable(settled.latency_seconds, settled.busy_seconds, settled.written_bytes)
            self.adaptive.uneven = self._steps.uneven
            self.adaptive.calibrating = not self._steps.enough_for(self._settings.budget)
        self._settled.clear()
        if self._held_back or self._basis() != self._decided:  # what time alone changes is for the next review
            self._decide(step)
        self._held_back = False

    def _basis(self) -> tuple[Costs, float | None, FarCosts | None]:
        """What a decision follows from besides failures: costs of a snapshot, of one in memory, of a further copy."""
        self._step_seconds = self._steps.step_seconds()
        costs = self._meter.costs(self._step_seconds, self._account.hook_share)
        memory_seconds = None if self._settings.memory is None else self._memory.cost_seconds
        if memory_seconds is not None and not self._meter.known:
            costs = replace(costs, stall_seconds=memory_seconds + ASSUMED_STALL_SECONDS)
        return costs, memory_seconds, self._far

    def _decide(self, step: int) -> None:
        self._memory_review = step + (REVIEW_STEPS if self._steps.known else 1)
        if not self._steps.known:
            return
        self._decided = costs, memory_seconds, far = self._basis()
        rates = self._evidence.rates(self._now() - self._began)
        wanted = self._policy.decide(costs, rates, memory_seconds, far)
        self._memory.interval_seconds, self._memory.limit_seconds = wanted.memory_seconds, wanted.memory_limit_seconds
        if self._settings.overhead is None or not self._meter.known:
            return
        before = self.adaptive.decision
        after = self.adaptive.settle(step, wanted, held_back=self._held_back)
        falls_short = not after.bounds.feasible and (before is None or before.bounds.feasible)
        if before is None or after.interval_steps != before.interval_steps:
            why = after.reasons if falls_short else after.why
            self._sink.emit(IntervalChanged(step, after.interval_steps, why, after.gain, after.bounds.binding))
        if falls_short:
            self._sink.emit(Notice("WARNING", after.shortfall))

    def _interval_due(self, step: int, now: float) -> bool:
        """Whether the adaptive trigger fires; if not, it is asked again at the moment it names."""
        if self._settings.overhead is None:
            return False
        if step >= self.adaptive.review_step or self.adaptive.decision is None:
            self._decide(step)
        if self.adaptive.decision is None and (self._in_flight or not self._steps.known):
            self._wake_step = min(self._wake_step, step + 1)
            return False
        quiet = 0 if self._disturbed else step - self._quiet_step
        safe = max([self._durable_instant, *(one.instant for one in self._in_flight)])
        trained = self._account.training_seconds - self._taken_trained
        moment = Moment(step, now, self._taken_time, trained, safe, self._failures_in_a_row, quiet)
        answer = self.adaptive.ask(moment, self._account)
        self._wake_step = min(self._wake_step, answer.again_step)
        self._wake_time = min(self._wake_time, answer.again_time)
        return answer.due
