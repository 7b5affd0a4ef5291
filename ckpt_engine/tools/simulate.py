"""A training loop on a virtual clock, to try policies on.

The cadence is the one that trains: it is driven as an adapter drives it, and learns what a run would let it learn. What
happens to the simulated run is known exactly, so that what the cadence believes, and what a run records of itself
(`writer.run_records`), can be compared with the truth. docs/frequency.md shows how to try a policy of one's own.

The simulation goes from event to event: the cadence says up to which boundary it has nothing to decide
(`Cadence.quiet`), and steps up to there are taken at once. All times are multiples of `GRID_SECONDS`, so that sums have
no rounding and the result is that of the same run step by step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from ckpt_engine.frequency.cadence import Cadence
from ckpt_engine.frequency.failures import Failures
from ckpt_engine.frequency.measure import WARM_UP_STEPS
from ckpt_engine.frequency.policy import Costs, FrequencySettings
from ckpt_engine.frequency.triggers import SnapshotTimer
from ckpt_engine.observe.clock import Clock
from ckpt_engine.observe.events import CLOSED, GONE, MACHINE, PROCESS, SITE, AttemptsFound, EventSink, FanOutSink
from ckpt_engine.writer.attempts import BEAT_SECONDS, MOST, Attempt

GRID_SECONDS = 2.0**-20
# What one more life costs to simulate, in boundaries.
LIFE_BOUNDARIES = 25
# Somebody's policy: from what a snapshot costs and how many failures there are per second to seconds between two.
Rule = Callable[[Costs, float], float]


@dataclass
class VirtualClock:
    """A clock that only moves when it is set."""

    BEGIN = 1000.0
    now: float = BEGIN

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1.7e9 + self.now


class Ruled:
    """Takes a snapshot as soon as the interval that a rule gives is over.

    Args:
        seconds: the interval, counted from the end of the snapshot before.
    """

    def __init__(self, seconds: float, clock: Clock, _sink: EventSink) -> None:
        self._seconds, self._now = seconds, clock.monotonic
        self.start(0)

    def start(self, _step: int, /) -> None:
        self._due = self._now() + self._seconds

    def boundary(self, _step: int, /) -> str | None:
        return "interval" if self._now() >= self._due else None

    def taken(self, step: int, _stall: float, _wait: float = 0.0, /) -> None:
        self.start(step)

    def skipped(self, _step: int, _reason: str, /) -> None:
        """It stays due."""

    def committed(self, _step: int, _latency: float, _written: float, _busy: float | None = None, /) -> None:
        """The interval does not depend on it."""

    def failed(self, _step: int, /) -> None:
        """The next one comes at the usual interval."""

    @property
    def quiet(self) -> tuple[float, float]:
        return math.inf, self._due


class Point(NamedTuple):
    """What a snapshot holds: a step, when it was taken, and the seconds of useful work in it."""

    step: int
    instant: float
    useful: float


@dataclass
class FurtherTier:
    """The copies in one further tier: the newest snapshot, one at a time.

    Args:
        seconds: to copy one snapshot there.
        every: at least between two; 0.0: whenever the tier is ready.
    """

    seconds: float
    every: float = 0.0
    newest: Point = field(default=Point(0, 0.0, 0.0))
    copied: int = 0
    coming: tuple[Point, float] | None = None
    waiting: Point | None = None
    due: float = -math.inf

    def committed(self, point: Point, now: float) -> None:
        """The tier before has one more snapshot."""
        self.look(now)
        self.waiting = point
        self._begin(now)

    def look(self, now: float) -> None:
        """What has arrived by now."""
        while self.coming is not None and self.coming[1] <= now:
            self.newest, done = self.coming
            self.copied += 1
            self.coming = None
            self._begin(done)
        self._begin(now)

    def lose(self, now: float) -> None:
        """The copy that is under way breaks off."""
        self.look(now)
        self.coming = self.waiting = None

    def _begin(self, now: float) -> None:
        if self.coming is None and self.waiting is not None and now >= self.due:
            self.coming, self.waiting = (self.waiting, now + self.seconds), None
            self.due = now + self.every


@dataclass
class Training:
    """One life of a training process with one writer that persists one snapshot at a time.

    A snapshot that is due while every slot is busy is skipped and asked for again.

    Args:
        stall, persist: of one snapshot.
        slowdown: factor on step times while a persist is active.
        memory_stall: of a snapshot that stays in memory, where `settings` want some.
        nbytes: that a snapshot writes.
        rhythm: None: the cadence of this project; a `Cadence` of somebody else's is treated as that.
        step, useful: done so far, and the seconds of useful work in them: at first what it resumes from.
        arrived: hears of each snapshot that is durable on the nearest tier, and when.
        most: boundaries that are looked at; it ends early after those.
        sink: gets what the cadence says.
    """

    settings: FrequencySettings
    step_seconds: float = 1.0
    stall: float = 0.7
    persist: float = 14.0
    slowdown: float = 1.0
    memory_stall: float = 0.05
    nbytes: int = 10**9
    rhythm: Callable[[Clock, EventSink], SnapshotTimer] | None = None
    clock: VirtualClock = field(default_factory=VirtualClock)
    step: int = 0
    useful: float = 0.0
    arrived: Callable[[Point, float], None] = lambda _point, _now: None
    most: float = math.inf
    sink: EventSink = field(default_factory=FanOutSink)

    def __post_init__(self) -> None:
        ours = partial(Cadence, self.settings)
        self.policy: SnapshotTimer = (self.rhythm or ours)(self.clock, self.sink)
        self.step_seconds, self.stall, self.persist, self.memory_stall = map(
            _snapped, (self.step_seconds, self.stall, self.persist, self.memory_stall)
        )
        # Snapshot, begin and end of the persist.
        self.queue: deque[tuple[Point, float, float]] = deque()
        self.stalled_seconds = 0.0
        self.in_memory: Point | None = None
        self.snapshots = self.looked = 0
        self.policy.start(self.step)

    @property
    def learns(self) -> bool:
        """What drives is a cadence: it takes snapshots into memory too, and has a memory of earlier lives."""
        return isinstance(self.policy, Cadence)

    @property
    def cadence(self) -> Cadence:
        """What drives, where that is a cadence."""
        assert isinstance(self.policy, Cadence)
        return self.policy

    @property
    def here(self) -> Point:
        """What a snapshot now would hold."""
        return Point(self.step, self.clock.now, self.useful)

    def live(self, until: float, last_step: float = math.inf) -> Training:
        """Up to the last boundary before that time of the clock, or to that of a step."""
        has_memory = self.settings.memory is not None and self.learns
        while self.step < last_step and self.clock.now < until and self.looked < self.most:
            count = self._leap(last_step, until)
            if self.clock.now + count * self._each > until:
                count = max(1, min(count - 1, int((until - self.clock.now) / self._each)))
                if self.clock.now + count * self._each > until:
                    break
            self.looked += 1
            self._train(count)
            self._drain()
            reason = self.policy.boundary(self.step)
            if reason is not None:
                self._snapshot(reason)
            elif has_memory and self.cadence.memory_due(self.step):
                self._into_memory()
        return self

    def die(self, at: float) -> Training:
        """A failure in the middle of the next step."""
        self.clock.now = max(self.clock.now, at)
        self._drain()
        return self

    # ---- time

    @property
    def _each(self) -> float:
        """What a step takes now, as long as nothing happens."""
        return _snapped(self.step_seconds * max(1.0, self.slowdown)) if self.queue else self.step_seconds

    def _leap(self, last_step: float, end: float) -> int:
        """How many steps end before anything happens, the last of them at the latest when something does."""
        if self.looked < WARM_UP_STEPS:
            return 1
        quiet_step, quiet_time = self.policy.quiet
        limit = min(quiet_time, end)
        if self.queue:
            # the step in which a persist ends is partly slow
            limit = min(limit, self.queue[0][2] - (self._each if self.slowdown > 1.0 else 0.0))
        fit = max(0.0, limit - self.clock.now) / self._each + 1.0 - GRID_SECONDS
        return max(1, int(min(quiet_step - self.step, last_step - self.step, fit, 1e9)))

    def _train(self, count: int) -> None:
        clean = count * self.step_seconds
        end = self.clock.now + count * self._each if count > 1 else _snapped(self._end_of_step(clean))
        self._trained(count, clean, end)

    def _trained(self, count: int, clean: float, end: float) -> None:
        self.useful += clean
        self.clock.now = end
        self.step += count

    def _end_of_step(self, clean: float) -> float:
        end, left = self.clock.now, clean
        if self.slowdown > 1.0:
            for _, _, done in self.queue:  # slowed down as long as a persist is active
                if done > end:
                    slow = min(left * self.slowdown, done - end)
                    end += slow
                    left -= slow / self.slowdown
        return end + left

    # ---- snapshots

    def _drain(self) -> None:
        while self.queue and self.queue[0][2] <= self.clock.now:
            self._persisted(*self.queue.popleft())

    def _persisted(self, point: Point, begin: float, end: float) -> None:
        self.policy.committed(point.step, end - point.instant, self.nbytes, end - begin)
        self.arrived(point, end)

    def _snapshot(self, _reason: str) -> None:
        if len(self.queue) >= self.settings.slots:
            self.policy.skipped(self.step, "busy")
        else:
            self._take()

    def _take(self, wait: float = 0.0) -> None:
        self.in_memory = point = self.here
        begin = max(point.instant + self.stall, self.queue[-1][2] if self.queue else point.instant)
        self.queue.append((point, begin, begin + self.persist))
        self.clock.now += self.stall
        self.stalled_seconds += self.stall + wait
        self.snapshots += 1
        self.policy.taken(self.step, self.stall, wait)

    def _into_memory(self) -> None:
        self.in_memory = self.here
        self.clock.now += self.memory_stall
        self.stalled_seconds += self.memory_stall
        self.cadence.held(self.step, self.memory_stall)
        self.cadence.memory_over(self.step)


def _snapped(seconds: float) -> float:
    return round(seconds / GRID_SECONDS) * GRID_SECONDS


@dataclass(frozen=True)
class Restart:
    """What a restart takes, in seconds.

    Args:
        down: until the process starts, by class of failure.
        startup: from there until training begins, `restore` not included.
        restore: to load the snapshot.
    """

    down: Mapping[str, float]
    startup: float
    restore: float


@dataclass
class SimulatedJob:
    """A job that fails and is restarted until its time is over.

    After a failure of the process the newest snapshot counts, because the writer lives on; after one of the machine the
    newest that is durable; after one of the nearest tier the newest in a further one, where there is any.

    Args:
        failures: when.
        seconds: how long the job lasts, failures included; less than that is left where `most` ends it.
        restart: what follows a failure.
        training: options of `Training`, those that this class gives excepted.
        tiers: beyond the nearest durable one; each job has its own.
        rhythm: of each life; None: the cadence of this project, which takes over what the life before had learned.
        most: boundaries that are looked at, failures and lives (`LIFE_BOUNDARIES` each), until it ends.
    """

    failures: Failures
    seconds: float
    restart: Restart
    training: Mapping[str, Any]
    tiers: Sequence[FurtherTier] = ()
    rhythm: Callable[[Clock, EventSink], SnapshotTimer] | None = None
    most: float = math.inf

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        # What training resumes from.
        self.base = Point(0, self.clock.BEGIN, 0.0)
        self.durable = self.base
        self.tiers = [replace(tier) for tier in self.tiers]
        # What the writers record, oldest first.
        self.rows: list[Attempt] = []
        # Of each failure the class, and the useful seconds that it has cost.
        self.lost: list[tuple[str, float]] = []
        # When a failure was over, and what was useful until then.
        self.cycles: list[tuple[float, float]] = []
        self.taken = self.written = self.reached = self.looked = 0
        self.stalled = self.slowed = 0.0
        self._state: Mapping[str, Any] | None = None

    @property
    def goodput(self) -> float:
        """Useful work by time."""
        return self.base.useful / self.seconds

    def run(self) -> SimulatedJob:
        end, failed = self.clock.BEGIN + self.seconds, self.clock.BEGIN
        while self.clock.now < end and self.looked < self.most:
            gap, kind = next(self.failures)
            failed += max(gap, GRID_SECONDS)
            self.looked += 1
            if failed <= self.clock.now:  # it meets the restart, which begins again
                self.clock.now = failed + self.restart.down[kind]
                continue
            if self._live(min(failed, end), kind if failed < end else ""):
                break
            self.clock.now = _snapped(failed + self.restart.down[kind])
            self.cycles.append((self.clock.now, self.base.useful))
        self.seconds = min(self.seconds, self.clock.now - self.clock.BEGIN)
        return self

    def _live(self, death: float, kind: str) -> bool:
        """One life, ended by a failure of that class, or ("") by the end of the job; whether that has come."""
        began, restore = self.clock.now, self.restart.restore if self.base.step else 0.0
        ready = _snapped(began + self.restart.startup + restore)
        times = {"startup": self.restart.startup, "restore": restore}
        if ready >= death:
            self._record(began, death, kind, {"startup": death - began})
            self.clock.now = death
            return not kind
        self.clock.now = ready
        training = self._begin(
            rhythm=self.rhythm,
            clock=self.clock,
            step=self.base.step,
            useful=self.base.useful,
            arrived=self._arrived,
            most=self.most - self.looked,
        )
        if training.learns:
            rows = self.rows[-MOST:]
            lasted, failures = tuple(one.seconds for one in rows), tuple(one.failure for one in rows)
            training.cadence.emit(AttemptsFound(lasted, failures, ready - began))
            if self._state is not None:
                training.cadence.restore(self._state)
            training.cadence.start(self.base.step)
        # What a lost machine has recorded last is as old as the newest heartbeat.
        known = began + (death - began) // BEAT_SECONDS * BEAT_SECONDS if kind in (MACHINE, SITE) else death
        training.live(known, self.reached)
        again = self.clock.now - ready - training.stalled_seconds
        training.live(known)
        trained = self.clock.now - ready - training.stalled_seconds
        times |= {"training": trained - again, "replay": again, "stall": training.stalled_seconds}
        times |= training.cadence.measured if training.learns else {}
        reached = training.step
        training.live(death)
        self.slowed += self.clock.now - ready - training.stalled_seconds - (training.useful - self.base.useful)
        if training.looked >= training.most:
            known, death, kind = self.clock.now, self.clock.now, ""
        training.die(death)
        self._record(began, known if kind in (MACHINE, SITE) else death, kind, times, reached)
        self.reached = max(self.reached, reached)
        self.taken, self.written = (
            self.taken + training.snapshots,
            self.written + training.snapshots - len(training.queue),
        )
        self.stalled += training.stalled_seconds
        if training.learns:
            self._state = training.cadence.state()
        self._go_back(training, kind, death)
        self.looked += training.looked + LIFE_BOUNDARIES
        return not kind

    def _begin(self, **how: Any) -> Training:
        return Training(**self.training, **how)

    def _arrived(self, point: Point, now: float) -> None:
        self.durable = point
        for tier in self.tiers[:1]:
            tier.committed(point, now)

    def _go_back(self, training: Training, kind: str, death: float) -> None:
        if kind == PROCESS:
            left = [point for point, _, _ in training.queue]
            self.base = max([self.base, self.durable, *left, training.in_memory or self.base], key=lambda one: one.step)
            if left or self.base.step > self.durable.step:
                self._arrived(self.base, death)  # the writer makes it durable
        elif kind == MACHINE or (kind == SITE and not self.tiers):
            self.base = self.durable
        elif kind == SITE:
            for tier in self.tiers:
                tier.lose(death)
            self.base = self.durable = max((tier.newest for tier in self.tiers), key=lambda one: one.step)
        else:
            self.base = training.here
            return
        self.lost.append((kind, training.here.useful - self.base.useful))

    def _record(self, began: float, last: float, kind: str, times: Mapping[str, float], step: int = -1) -> None:
        end, at = CLOSED if kind == "" else GONE if kind == PROCESS else None, began - self.clock.BEGIN
        self.rows.append(Attempt("", "", at, last - began, end, started=at, step=step, times=dict(times)))
