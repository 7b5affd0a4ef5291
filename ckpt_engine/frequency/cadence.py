"""When a run takes its snapshots, asked at every boundary."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ckpt_engine.frequency.due_snapshot import DueSnapshot
from ckpt_engine.frequency.failures import Evidence, FailureBelief, prior_of
from ckpt_engine.frequency.learned import Learned
from ckpt_engine.frequency.measure import CLEAN_WINDOW, WARM_UP_STEPS, StepTimes, measured
from ckpt_engine.frequency.planner import IntervalPlanner
from ckpt_engine.frequency.policy import AdaptivePolicy, FarCosts, FrequencyPolicy, FrequencySettings, MemoryRhythm
from ckpt_engine.frequency.triggers import (
    INTERVAL,
    REVIEW_STEPS,
    Account,
    AdaptiveTrigger,
    FixedTriggers,
    MemoryTrigger,
    Moment,
)
from ckpt_engine.frequency.under_way import SnapshotsUnderWay
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

    def __init__(self, settings: FrequencySettings, clock: Clock, sink: EventSink, ranks: int = 1) -> None:
        self._settings = settings
        self._now: Callable[[], float] = clock.monotonic
        self._sink = sink
        self.adaptive = AdaptiveTrigger(settings)
        self._memory = MemoryTrigger(settings.memory or MemoryRhythm())
        self._due = DueSnapshot()
        now = self._now()
        evidence = Evidence(prior_of(settings.mtbf_seconds, ranks), began=now)
        self._planner = IntervalPlanner(self.policy_of(settings), evidence, ranks)
        self._steps = StepTimes()
        self._account = Account()
        self._begin(0, now)
        self._account.next_step = _NOT_STARTED

    def _begin(self, step: int, now: float) -> None:
        self._steps = StepTimes(self._steps.prior, WARM_UP_STEPS)
        self._account.restart(step, now, hook_time.seconds)
        self._fixed = FixedTriggers(self._settings, step=step, now=now)
        self.adaptive.restart(step)
        self._memory.restart(step, now)
        self._snapshots = SnapshotsUnderWay(step, now)
        self._due = DueSnapshot(self._due.overtaken)

    # ------------------------------------------------------------------ the step

    def start(self, step: int) -> None:
        """Training starts or resumes at `step` (all of whose work is safe); the time base starts here.

        Optional: the first call of `boundary` does it too, and then returns None.
        """
        self._begin(step, self._now())

    def assume(self, prior: FailureBelief) -> None:
        """What is believed of failures before there is evidence; else the settings say that."""
        self._planner.evidence = replace(self._planner.evidence, prior=prior)

    def retune(self, settings: FrequencySettings) -> None:
        """Other settings from the next boundary on. What was measured stays; what was due is not any more."""
        if settings.mtbf_seconds != self._settings.mtbf_seconds:
            self.assume(prior_of(settings.mtbf_seconds, self._planner.ranks))
        self._settings = settings
        now, step = self._now(), self._account.next_step - 1
        self._fixed = FixedTriggers(settings, step=step, now=now)
        self._planner.policy = self.policy_of(settings)
        self.adaptive = AdaptiveTrigger(settings)
        self.adaptive.restart(step)
        self._due.reason = None
        self._due.look_now()

    def boundary(self, step: int) -> str | None:
        """The reason of the snapshot that is due now, or None.

        Args:
            step: number of the training step just completed. Repeating a number (gradient accumulation) measures
                nothing; a jump counts as so many equal steps; going back starts the measurement again.
        """
        now, account, due = self._now(), self._account, self._due
        count = step + 1 - account.next_step
        if count < 1:
            return self._not_ahead(step, now)
        # Here and in `background`, at each step, a method of the account would be one more call.
        hooks = hook_time.seconds - account.hooked
        account.hooked += hooks
        account.hook_seconds += hooks
        seconds = now - account.marked - account.excluded_seconds - hooks
        if seconds < 0.0:
            seconds = 0.0
        account.marked = now
        account.excluded_seconds = 0.0
        account.next_step = step + 1
        account.training_seconds += seconds
        for _ in (0,) if count == 1 else range(min(count, CLEAN_WINDOW)):
            add = self._steps.add_disturbed if self._snapshots.in_flight else self._steps.add_clean
            add(seconds / count)
        if step < due.look_step and now < due.look_time:
            return None
        return self._wake(step, now)

    def memory_due(self, step: int) -> bool:
        """Whether a snapshot that only stays in memory is due; ask after `boundary`, where no durable one was taken."""
        if self._settings.memory is None:
            return False
        if step >= self._memory.review_step:
            self._decide(step)
        return self._memory.due(step, self._now(), self._account, self._settings.budget, self._planner.step_seconds)

    def memory_over(self, step: int) -> None:
        """The snapshot that `memory_due` has asked for at `step` was taken, or cannot be."""

    def background(self, seconds: float) -> None:
        """Work for snapshots that no snapshot is charged for took `seconds` of training in all, until now."""
        self._account.slowdown_seconds += seconds - self._account.background_seconds
        self._account.background_seconds = seconds

    def exclude(self, seconds: float) -> None:
        """`seconds` since the last boundary were not training: validation, logging of the user, a debugger."""
        self._account.excluded_seconds += measured(seconds)

    def validation_ended(self) -> None:
        """A validation ended; the snapshot it may trigger is due at the next boundary."""
        self._fixed.validation_ended()
        self._due.look_now()

    def ended(self, step: int) -> str | None:
        """The reason of the snapshot due because training ends at `step`, if that work is in no snapshot yet."""
        safe = self._snapshots.safe_step
        return self._fixed.at_end(step, safe) or (self._due.reason if step > safe else None)

    # ------------------------------------------------------------------ what became of a snapshot

    def taken(self, step: int, stall_seconds: float, wait_seconds: float = 0.0) -> None:
        """A snapshot was taken at `step`, whatever asked for it.

        Args:
            stall_seconds: how long it blocked training, `wait_seconds` not included.
            wait_seconds: how long training waited for a free slot before (0 where snapshots are skipped instead).
        """
        now = self._now()
        stall, wait = measured(stall_seconds), measured(wait_seconds)
        self._account.pause(stall + wait)
        self._due.taken(waited=wait > 0.0)
        self.adaptive.window_began(self._snapshots.quiet_steps(step))
        self._snapshots.take(step, now, stall, self._account.training_seconds)
        self._memory.newer(step, now, self._account.training_seconds)

    def held(self, step: int, stall_seconds: float) -> None:
        """A snapshot that only stays in memory was taken at `step`; it blocked training for `stall_seconds`."""
        stall = measured(stall_seconds)
        self._account.pause(stall)
        self._memory.took(step, self._now(), self._account.training_seconds, stall)

    def fence(self, seconds: float) -> None:
        """Training waited `seconds` for staging to finish; part of the newest snapshot's stall."""
        seconds = measured(seconds)
        self._account.pause(seconds)
        if not self._memory.fenced(seconds) and self._snapshots.in_flight:
            self._snapshots.in_flight[-1].stall_seconds += seconds

    def skipped(self, step: int, reason: str) -> None:
        """The due snapshot could not be taken at this boundary (`busy`, `accumulating`, ...); it stays due.

        It is offered again at the next boundary, after an `error` ten seconds later: trying costs a stall.
        """
        if self._due.skipped(reason, self._now()):
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
        busy = latency if busy_seconds is None else measured(busy_seconds)
        self._snapshots.commit(step, self._now(), latency, busy, measured(written_bytes))
        self._due.look_now()

    def failed(self, step: int) -> None:
        """The snapshot taken at `step` will not become durable. The next one comes at the usual interval."""
        self._snapshots.fail(step)
        self._due.look_now()

    def emit(self, event: Event) -> None:
        """Takes the writer's events, so that a cadence can be one of the sinks; other kinds are ignored."""
        if isinstance(event, SnapshotCommitted):
            self.committed(event.step, event.latency_seconds, event.written_bytes, event.write_seconds)
        elif isinstance(event, SnapshotFailed):
            self.failed(event.step)
        elif isinstance(event, AttemptsFound):
            self._planner.evidence = replace(
                self._planner.evidence,
                lasted=event.lasted,
                failures=event.failures,
                began=self._now() - event.seconds,
            )
        elif isinstance(event, SnapshotReplicated):
            self._planner.far = FarCosts(event.sent_bytes, event.copy_seconds, event.latency_seconds)

    def announce(self, nbytes: int) -> None:
        """The size of the state, so that the first snapshot waits until the budget has earned its likely stall."""
        self.adaptive.announce(nbytes)
        self._memory.announce(nbytes)

    @property
    def overtaken(self) -> int:
        """Snapshots that were not taken, because the next one was due before a slot was free."""
        return self._due.overtaken

    @property
    def idle_seconds(self) -> float:
        """How long ranks have waited for each other, see `ranks.world.Waits`."""
        return 0.0

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
        meter = self._planner.meter
        (slowdown, error), costs = meter.slowdown_of_all, meter.costs(self._planner.step_seconds)
        memory = self._memory_seconds or 0.0
        values = (slowdown + self._account.background_seconds, error, costs.step_seconds, costs.stall_seconds)
        each = (costs.slowdown_seconds, costs.latency_seconds, memory, costs.written_bytes / 1e6, self.idle_seconds)
        steps = self._fixed.wake_step - self._account.next_step + 1
        due = min(
            self._due.look_time - self._account.marked,
            steps * costs.step_seconds if costs.step_seconds > 0.0 else math.inf,
        )
        shares = self.overhead_fraction, 0.0 if self._settings.overhead is None else self._settings.budget
        return dict(zip(MEASURED, (*values, *each, *shares, due if due < math.inf else 0.0), strict=True))

    @property
    def quiet(self) -> tuple[float, float]:
        """The step and the time before which nothing is due if nothing is reported until then."""
        if self._settings.memory is None:
            return self._due.look_step, self._due.look_time
        step, time = self._memory.quiet(self._planner.step_seconds)
        return min(self._due.look_step, self._memory.review_step, step), min(self._due.look_time, time)

    def age_of_last_durable(self) -> float:
        """Seconds since the instant of the newest durable snapshot, or since `start`: the work at risk."""
        return self._now() - self._snapshots.durable_instant

    def state(self) -> dict[str, Any]:
        """What was learned, as JSON; store it with each snapshot (never needed to rebuild the training state)."""
        step_seconds = self._steps.step_seconds() if self._steps.known else None
        believed, before = self._planner.evidence.at(self._now()), self._planner.evidence.base
        meter, totals = self._planner.meter, self._account.totals
        return Learned(believed, meter, step_seconds, self.interval_steps, totals, before).to_json()

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
        self._planner.evidence = replace(self._planner.evidence, remembered=remembered, before=learned.before)
        self._planner.meter = learned.meter
        self._account.earlier = learned.account
        self._steps = StepTimes(learned.step_seconds)

    def _not_ahead(self, step: int, now: float) -> str | None:
        """Of `boundary` at the first step, the same one once more, or an earlier one."""
        if step < self._account.next_step - 1:
            self._begin(step, now)
            return None
        return self._wake(step, now) if self._due.reason or self._fixed.validation_due else None

    def _wake(self, step: int, now: float) -> str | None:
        """The slow path of `boundary`: something may be due, or was learned."""
        if self._snapshots.settled:
            self._learn(step)
        self._due.fired(self._fixed.fire(step, now))
        self._due.look_step, self._due.look_time = self._fixed.wake_step, self._fixed.wake_time
        if self._due.reason is None and self._interval_due(step, now):
            self._due.reason = INTERVAL
        return self._due.offer(now)

    def _learn(self, step: int) -> None:
        meter, snapshots = self._planner.meter, self._snapshots
        for settled in snapshots.learn(step):
            over = math.inf if settled.latency_seconds is None else settled.instant + settled.latency_seconds
            late = 0.0 if snapshots.in_flight else max(0.0, self._account.marked - over)
            slowdown = self._steps.take_slowdown(late)
            self._account.slowdown_seconds += meter.add_cost(settled.stall_seconds, slowdown)
            if settled.latency_seconds is not None:
                meter.add_durable(settled.latency_seconds, settled.busy_seconds, settled.written_bytes)
            self.adaptive.uneven = self._steps.uneven
            self.adaptive.calibrating = not self._steps.enough_for(self._settings.budget)
        if self._due.held_back or self._planner.is_outdated(self._steps, self._account, self._memory_seconds):
            self._decide(step)
        self._due.held_back = False

    @property
    def _memory_seconds(self) -> float | None:
        """What a snapshot costs that stays in memory; None: there are none."""
        return None if self._settings.memory is None else self._memory.cost_seconds

    def _decide(self, step: int) -> None:
        self._memory.review_step = step + (REVIEW_STEPS if self._steps.known else 1)
        if not self._steps.known:
            return
        wanted = self._planner.decide(self._now(), self._steps, self._account, self._memory_seconds)
        self._memory.interval_seconds, self._memory.limit_seconds = wanted.memory_seconds, wanted.memory_limit_seconds
        if self._settings.overhead is None or not self._planner.meter.known:
            return
        before = self.adaptive.decision
        after = self.adaptive.settle(step, wanted, held_back=self._due.held_back)
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
        snapshots, account = self._snapshots, self._account
        if self.adaptive.decision is None and (snapshots.in_flight or not self._steps.known):
            self._due.look_by(step + 1, math.inf)
            return False
        trained, quiet = account.training_seconds - snapshots.taken_trained, snapshots.quiet_steps(step)
        moment = Moment(step, now, snapshots.taken_time, trained, snapshots.safe_time, snapshots.failures, quiet)
        answer = self.adaptive.ask(moment, account)
        self._due.look_by(answer.again_step, answer.again_time)
        return answer.due
