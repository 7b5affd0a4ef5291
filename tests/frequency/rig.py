"""A cadence to try out, and the simulator with all that a policy may meet: steps, stalls and persists as they are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt_engine.frequency.cadence import Cadence
from ckpt_engine.frequency.failures import FailureBelief, assumed_mtbf
from ckpt_engine.frequency.policy import FrequencySettings
from ckpt_engine.observe.events import MACHINE, PROCESS, Event, IntervalChanged
from ckpt_engine.tools.simulate import Point, SimulatedJob, Training, VirtualClock

# Seconds, or a function of the seconds since the start.
Amount = float | Callable[[float], float]


def certain(mtbf_seconds: float) -> FailureBelief:
    """Where a simulated run fails so often, and no evidence corrects that."""
    return FailureBelief.prior(mtbf_seconds, weight=1e9)


@dataclass
class Recorder:
    """An event sink that keeps everything."""

    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def intervals(self) -> list[int]:
        return [event.interval_steps for event in self.events if isinstance(event, IntervalChanged)]


class Rig:
    """A cadence, its clock and its events, with steps of one second."""

    def __init__(self, start: int | None = 0, **settings: object) -> None:
        self.clock, self.sink = VirtualClock(), Recorder()
        self.cadence = Cadence(FrequencySettings(**settings), self.clock, self.sink)  # type: ignore[arg-type]
        self.step = 0
        if isinstance(stated := settings.get("mtbf_seconds"), float):
            self.cadence.assume(certain(stated))
        if start is not None:
            self.step = start
            self.cadence.start(start)

    def go(self, steps: int = 1, seconds: float = 1.0) -> str | None:
        """Trains until the first due snapshot, at most `steps` steps."""
        for _ in range(steps):
            self.step += 1
            self.clock.now += seconds
            if (reason := self.cadence.boundary(self.step)) is not None:
                return reason
        return None

    def take(self, stall: float = 0.0, latency: float | None = None) -> None:
        """Takes a snapshot now; with a latency it is durable at once (it is learned from at the next boundary)."""
        self.clock.now += stall
        self.cadence.taken(self.step, stall)
        if latency is not None:
            self.cadence.committed(self.step, latency, 10**9)


class Taken(NamedTuple):
    """One snapshot of the simulation.

    `true_overhead` is the share of the window before it (from the previous snapshot's end of stall to this one's) that
    was not clean training, computed from what the simulation did and not from what the cadence believes.
    """

    step: int
    instant: float
    interval_steps: int | None
    true_overhead: float
    wait_seconds: float
    reason: str


@dataclass
class Age:
    """How old the newest snapshot of a kind is, from `instant` on, over time.

    Args:
        instant: of that snapshot.
        until: so far `area`, seconds times seconds, and the `worst` age are counted.
    """

    instant: float
    until: float
    area: float = 0.0
    worst: float = 0.0

    def count(self, until: float) -> None:
        """Time goes on."""
        begin, end = self.until - self.instant, until - self.instant
        self.area += (end**2 - begin**2) / 2.0
        self.worst = max(self.worst, end)
        self.until = until

    def renew(self, instant: float, now: float) -> None:
        """There is a newer one from now on."""
        self.count(now)
        self.instant = instant


@dataclass
class IrregularTraining(Training):
    """A training whose steps and snapshots are not all alike, or one step by step, with what is true of it.

    Args:
        step_seconds, stall, persist: may change with time.
        waits: what happens when a snapshot is due and every slot is busy: training waits (as CheckFreq does), or the
            snapshot is skipped and asked for again (as this project does).
        jitter: standard deviation of the logarithm of step times.
        slow: a factor on the time of each step, given its number: what makes it slow has nothing to do with snapshots.
        after: factors on the times of the steps that follow the one in which a persist has ended.
        certain: no evidence corrects what is assumed of failures.
        fails: whether the snapshot of this number (from 0) fails at the end of its persist.
        leaps: many steps at once, where nothing is irregular.
    """

    step_seconds: Amount = 1.0  # type: ignore[assignment]
    stall: Amount = 0.7  # type: ignore[assignment]
    persist: Amount = 14.0  # type: ignore[assignment]
    waits: bool = False
    jitter: float = 0.0
    slow: Callable[[int, random.Random], float] | None = None
    after: Sequence[float] = ()
    certain: bool = True
    fails: Callable[[int], bool] = lambda _: False
    seed: int = 0
    leaps: bool = True
    sink: Recorder = field(default_factory=Recorder)

    def __post_init__(self) -> None:
        self.amounts = self.step_seconds, self.stall, self.persist
        self.regular = not (self.jitter or self.slow or self.after or any(map(callable, self.amounts)))
        self.origin, memory_stall = self.clock.now, self.memory_stall
        self.step_seconds, self.stall, self.persist = (_at(one, 0.0) for one in self.amounts)
        super().__post_init__()
        if not self.regular:
            self.memory_stall = memory_stall
        if self.certain and self.learns:
            self.cadence.assume(certain(self.settings.mtbf_seconds or assumed_mtbf()))
        self.random = random.Random(self.seed)
        # The newest durable snapshot, and the newest of any kind.
        self.durable, self.newest = Age(self.clock.now, self.clock.now), Age(self.clock.now, self.clock.now)
        self.taken: list[Taken] = []
        self.failing: set[Point] = set()
        self.window_start, self.window_clean = self.clock.now, 0.0
        self.still_slow: list[float] = []

    @property
    def elapsed(self) -> float:
        return self.clock.now - self.origin

    @property
    def true_overhead(self) -> float:
        return self.elapsed / self.useful - 1.0

    def goodput(self, mtbf_seconds: float) -> float:
        """Share of the time that is useful work, where failures at that rate each lose what no snapshot protects.

        To first order: clean time, less the mean age of the newest durable snapshot times the failure rate.
        """
        self.durable.count(self.clock.now)
        return (self.useful - self.durable.area / mtbf_seconds) / self.elapsed

    def run(self, steps: int) -> IrregularTraining:
        self.live(math.inf, self.step + steps)
        return self

    def run_seconds(self, seconds: float) -> IrregularTraining:
        """Up to the first boundary at which so many seconds are over."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.run(1)
        return self

    def die(self, at: float) -> Training:
        super().die(at)
        for age in (self.durable, self.newest):
            age.count(self.clock.now)
        return self

    @property
    def _each(self) -> float:
        return super()._each if self.regular else 0.0

    def _leap(self, last_step: float, end: float) -> int:
        return super()._leap(last_step, end) if self.regular and self.leaps else 1

    def _train(self, count: int) -> None:
        if self.regular:
            super()._train(count)
            return
        clean = _at(self.amounts[0], self.elapsed) * self.random.lognormvariate(-(self.jitter**2) / 2, self.jitter)
        if self.slow is not None:
            clean *= self.slow(self.step, self.random)
        longer = clean * (self.still_slow.pop(0) - 1.0) if self.still_slow and not self.queue else 0.0
        self._trained(count, clean, self._end_of_step(clean) + longer)

    def _trained(self, count: int, clean: float, end: float) -> None:
        super()._trained(count, clean, end)
        self.window_clean += clean

    def _persisted(self, point: Point, begin: float, end: float) -> None:
        self.still_slow = list(self.after)
        if point in self.failing:
            self.policy.failed(point.step)
        else:
            self.durable.renew(point.instant, end)
            super()._persisted(point, begin, end)

    def _snapshot(self, reason: str) -> None:
        self.reason = reason
        if not self.waits or len(self.queue) < self.settings.slots:
            super()._snapshot(reason)
            return
        wait, self.clock.now = self.queue[0][2] - self.clock.now, self.queue[0][2]
        self._drain()
        self._take(wait)

    def _take(self, wait: float = 0.0) -> None:
        point = self.here
        if not self.regular:
            self.stall, self.persist = (_at(one, self.elapsed) for one in self.amounts[1:])
        super()._take(wait)
        if self.fails(len(self.taken)):
            self.failing.add(point)
        overhead = (self.clock.now - self.window_start) / self.window_clean - 1.0
        interval = self.cadence.interval_steps if self.learns else None
        self.taken.append(Taken(self.step, point.instant, interval, overhead, wait, self.reason))
        self.window_start, self.window_clean = self.clock.now, 0.0
        self.newest.renew(point.instant, point.instant)

    def _into_memory(self) -> None:
        self.newest.renew(self.clock.now, self.clock.now)
        super()._into_memory()


def _at(amount: Amount, elapsed: float) -> float:
    return amount(elapsed) if callable(amount) else amount


@dataclass
class IrregularJob(SimulatedJob):
    """A job whose lives are irregular, each by chance of its own.

    Args:
        seed: of this job's chance; failures have their own.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lives: list[IrregularTraining] = []

    def _begin(self, **how: Any) -> Training:
        self.lives.append(
            IrregularTraining(**{"certain": False, "seed": 1000 * self.seed + len(self.lives), **self.training}, **how)
        )
        return self.lives[-1]

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds times seconds of work that failures of a class would have cost."""
        return {
            PROCESS: sum(one.newest.area for one in self.lives),
            MACHINE: sum(one.durable.area for one in self.lives),
        }
