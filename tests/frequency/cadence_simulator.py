"""A discrete-event simulation of a training loop with a writer, driven through `Cadence` as an adapter drives it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt_engine.frequency.cadence import Cadence
from ckpt_engine.frequency.policy import FrequencySettings
from ckpt_engine.observe.events import AttemptsFound, Event, IntervalChanged


@dataclass
class FakeClock:
    """A clock that only moves when told to."""

    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1.7e9 + self.now


NOT_LASTED = AttemptsFound((), ())
"""Told at each step: an attempt that has just begun, so that what is assumed of failures is what is believed."""


@dataclass
class Recorder:
    """An event sink that keeps everything."""

    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def intervals(self) -> list[int]:
        return [event.interval_steps for event in self.events if isinstance(event, IntervalChanged)]


@dataclass(frozen=True)
class Taken:
    """One snapshot of the simulation.

    `true_overhead` is the share of the window before it (from the previous snapshot's end of stall to this one's) that
    was not clean training, computed from what the simulation did and not from what the cadence believes.
    """

    step: int
    instant: float
    reason: str
    interval_steps: int | None
    true_overhead: float
    wait_seconds: float


@dataclass
class Training:
    """Training with one writer that persists one snapshot at a time.

    Args:
        waits: what happens when a snapshot is due and every slot is busy: training waits (as CheckFreq does), or the
            snapshot is skipped and asked for again (as this project does).
        stall, persist: seconds, as functions of the time since the start.
        slowdown: factor on step times while a persist is active.
        jitter: standard deviation of the logarithm of step times.
        slow: a factor on the time of each step, given its number: what makes it slow has nothing to do with snapshots.
        certain: no evidence corrects what is assumed of failures.
        fails: whether the snapshot of this number (from 0) fails at the end of its persist.
    """

    settings: FrequencySettings
    step_seconds: Callable[[float], float] = lambda _: 1.0
    stall: Callable[[float], float] = lambda _: 0.7
    persist: Callable[[float], float] = lambda _: 14.0
    slowdown: float = 1.0
    waits: bool = False
    jitter: float = 0.0
    slow: Callable[[int, random.Random], float] = lambda _step, _random: 1.0
    certain: bool = True
    fails: Callable[[int], bool] = lambda _: False
    seed: int = 0
    nbytes: int = 10**9

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.origin = self.clock.now
        self.sink = Recorder()
        self.cadence = Cadence(self.settings, self.clock, self.sink)
        self.cadence.start(0)
        self.random = random.Random(self.seed)
        self.step = 0
        self.safe_instant = self.drained = self.clock.now
        self.area = 0.0
        self.worst_age = 0.0
        self.taken: list[Taken] = []
        self.queue: deque[tuple[int, float, float, float, bool]] = deque()
        """Step, instant, begin and end of the persist, whether it fails."""
        self.clean_seconds = 0.0
        self.window_clean = 0.0
        self.window_start = self.clock.now

    @property
    def elapsed(self) -> float:
        return self.clock.now - self.origin

    @property
    def true_overhead(self) -> float:
        return self.elapsed / self.clean_seconds - 1.0

    def goodput(self, mtbf_seconds: float) -> float:
        """Share of the time that is useful work, where failures at that rate each lose what no snapshot protects.

        To first order: clean time, less the mean age of the newest durable snapshot times the failure rate.
        """
        self._age(self.clock.now)
        return (self.clean_seconds - self.area / mtbf_seconds) / self.elapsed

    def _age(self, until: float) -> None:
        """Add up the age of the newest durable snapshot over time."""
        begin, end = self.drained - self.safe_instant, until - self.safe_instant
        self.area += (end**2 - begin**2) / 2.0
        self.worst_age = max(self.worst_age, end)
        self.drained = until

    def run(self, steps: int) -> Training:
        for _ in range(steps):
            self._train_one_step()
            self._drain()
            if self.certain:
                self.cadence.emit(NOT_LASTED)
            reason = self.cadence.boundary(self.step)
            if reason is not None:
                self._snapshot(reason)
        return self

    def run_seconds(self, seconds: float) -> Training:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.run(1)
        return self

    def _train_one_step(self) -> None:
        clean = self.step_seconds(self.elapsed) * self.random.lognormvariate(-(self.jitter**2) / 2, self.jitter)
        clean *= self.slow(self.step, self.random)
        end, left = self.clock.now, clean
        for _, _, _, done, _ in list(self.queue):  # slowed down as long as a persist is active
            if done > end and self.slowdown > 1.0:
                slow = min(left * self.slowdown, done - end)
                end += slow
                left -= slow / self.slowdown
        self.clock.now = end + left
        self.clean_seconds += clean
        self.window_clean += clean
        self.step += 1

    def _drain(self) -> None:
        while self.queue and self.queue[0][3] <= self.clock.now:
            step, instant, begin, end, fails = self.queue.popleft()
            if fails:
                self.cadence.failed(step)
                continue
            self._age(end)
            self.safe_instant = instant
            self.cadence.committed(step, end - instant, self.nbytes, end - begin)

    def _snapshot(self, reason: str) -> None:
        wait = 0.0
        if len(self.queue) >= self.settings.slots:
            if not self.waits:
                self.cadence.skipped(self.step, "busy")
                return
            wait = self.queue[0][3] - self.clock.now
            self.clock.now = self.queue[0][3]
            self._drain()
        instant = self.clock.now
        stall = self.stall(self.elapsed)
        begin = max(instant + stall, self.queue[-1][3] if self.queue else instant)
        persist = self.persist(self.elapsed)
        self.queue.append((self.step, instant, begin, begin + persist, self.fails(len(self.taken))))
        self.clock.now += stall
        self.cadence.taken(self.step, stall, wait)
        window = self.clock.now - self.window_start
        overhead = window / self.window_clean - 1.0
        interval = self.cadence.interval_steps
        self.taken.append(Taken(self.step, instant, reason, interval, overhead, wait))
        self.window_start, self.window_clean = self.clock.now, 0.0
