"""Worlds whose rates no rule can know beforehand, and an oracle that knows them: the most that learning could win."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ckpt_engine.frequency.cadence import Cadence
from ckpt_engine.frequency.failures import SHARES, Failures
from ckpt_engine.frequency.policy import AdaptivePolicy, Costs, Decision, FarCosts, FrequencySettings
from ckpt_engine.observe.clock import Clock
from ckpt_engine.observe.events import EventSink
from ckpt_engine.tools.simulate import Restart, SimulatedJob
from tests.frequency.rig import IrregularTraining
from tests.frequency.scenarios import BACK, BUDGET, DAY, HOUR

STEP_SECONDS, STALL, PERSIST = 5.0, 1.0, 15.0
MEAN_MTBF = 3 * HOUR
SLOWDOWN = 1.05
LOOK_SECONDS = 10.0
SIX_HOURS_MOST = 1.25 * BUDGET
"""Overhead in any six hours that the project promises at most."""

Rate = Callable[[float, float], float]
"""Failures per second, given the seconds since the job began and since the last failure."""


@dataclass(frozen=True, slots=True)
class HiddenRate:
    """A rate, and how often it is what.

    Args:
        rate: what is true now.
        most: no rate is higher.
        usual: shares of the time and the rates in them, for an oracle that shares out its budget.
    """

    rate: Rate
    most: float
    usual: tuple[tuple[float, float], ...]


def by_hour(factor: float) -> HiddenRate:
    """From 9 to 17 o'clock failures are `factor` times as frequent as in the other sixteen hours."""
    low = 3.0 / (MEAN_MTBF * (2.0 + factor))
    return HiddenRate(
        lambda now, _: low * factor if 9 * HOUR <= now % DAY < 17 * HOUR else low,
        low * factor,
        ((2 / 3, low), (1 / 3, low * factor)),
    )


def by_age(shape: float) -> HiddenRate:
    """An allocation is the more likely to be taken the older it is (Weibull)."""
    scale = MEAN_MTBF / math.gamma(1.0 + 1.0 / shape)

    def rate(since: float) -> float:
        return shape / scale * (max(since, 1.0) / scale) ** (shape - 1.0)

    oldest = 3.0 * scale
    ages = [oldest * (one + 0.5) / 100 for one in range(100)]
    alive = [math.exp(-((age / scale) ** shape)) for age in ages]
    usual = tuple((part / sum(alive), rate(age)) for age, part in zip(ages, alive, strict=True))
    return HiddenRate(lambda _, since: rate(min(since, oldest)), rate(oldest), usual)


def bad_machines(seed: int) -> HiddenRate:
    """Twice a week a machine is bad for half a day: then a failure an hour, otherwise one in two days."""
    rng = random.Random(seed)
    begins = [0.0]
    while begins[-1] < 400 * DAY:
        begins.append(begins[-1] + DAY / 2 + rng.expovariate(1.0 / (3 * DAY)))
    bad, good = 1.0 / HOUR, 1.0 / (2 * DAY)

    def rate(now: float, _: float) -> float:
        return bad if any(0.0 <= now - begin < DAY / 2 for begin in begins[1:]) else good

    return HiddenRate(rate, bad, ((1 / 7, bad), (6 / 7, good)))


class Truth:
    """Failures at a hidden rate, and what the rate is now."""

    def __init__(self, hidden: HiddenRate, seed: int) -> None:
        self.hidden, self._random = hidden, random.Random(seed)
        self._last = 0.0

    def failures(self) -> Failures:
        """By thinning (Lewis and Shedler 1979)."""
        now, kinds, weights = 0.0, list(SHARES), list(SHARES.values())
        while True:
            now += self._random.expovariate(self.hidden.most)
            if self._random.random() * self.hidden.most < self.hidden.rate(now, now - self._last):
                gap = now - self._last
                yield gap, self._random.choices(kinds, weights)[0]
                self._last = now

    def at(self, seconds: float) -> float:
        """Failures per second, so many seconds after the job began, where there is no failure until then."""
        return self.hidden.rate(seconds, seconds - self._last)


@dataclass(frozen=True, slots=True)
class OraclePlanner:
    """A `FrequencyPolicy` that knows the rate of failures and the cost of a snapshot, now and later.

    Snapshots as dense as `sqrt(rate / (2 cost))` are best, at an overhead of `sqrt(cost rate / 2)`. Where that is more
    than the budget on average, all overheads shrink by the same factor: no other plan loses less work for the same
    overhead. Between two snapshots the integral of the density is 1.

    Args:
        now: seconds since the job began.
        rate: failures per second at a time.
        cost: seconds of stall and of slowdown of a snapshot at a time.
        wanted: overhead of the best plan without a budget, on average.
        most: no snapshots are so dense that their overhead is more; the promise about any six hours.
    """

    settings: FrequencySettings
    now: Callable[[], float]
    rate: Callable[[float], float]
    cost: Callable[[float], tuple[float, float]]
    wanted: float
    most: float

    def decide(
        self,
        costs: Costs,
        rates: Mapping[str, float],
        memory_seconds: float | None = None,
        far: FarCosts | None = None,
        /,
    ) -> Decision:
        """What is best from now on."""
        now, passed, part = self.now(), 0.0, 0.0
        while part < 1.0 and passed < DAY:
            ahead = LOOK_SECONDS if passed < HOUR else 10 * LOOK_SECONDS
            density = self._overhead(now + passed) / sum(self.cost(now + passed))
            part, passed = part + density * ahead, passed + ahead
        stall, slowed = self.cost(now)
        interval = passed / max(part, 1e-9) if part < 1.0 else passed - (part - 1.0) / density
        overhead = min(0.5, (stall + slowed) / interval)
        true = replace(costs, stall_seconds=stall, slowdown_seconds=slowed)
        often = {one: share * 1e3 for one, share in SHARES.items()}  # so that the overhead decides
        wanted = replace(self.settings, overhead=overhead)
        return replace(AdaptivePolicy(wanted).decide(true, often, memory_seconds, far), settings=self.settings)

    def _overhead(self, at: float) -> float:
        best = math.sqrt(sum(self.cost(at)) * self.rate(at) / 2.0)
        return min(self.most, best * min(1.0, self.settings.budget / self.wanted))


class Oracle(Cadence):
    """The cadence of this project with that planner."""

    def __init__(
        self,
        planner: Callable[[FrequencySettings, Clock], OraclePlanner],
        settings: FrequencySettings,
        clock: Clock,
        sink: EventSink,
    ) -> None:
        self.policy_of = lambda wanted: planner(wanted, clock)
        super().__init__(settings, clock, sink)


Policy = Callable[[FrequencySettings], Any]
"""Makes what a simulation takes as its rhythm; None: the cadence of this project."""


def job(hidden: Callable[[int], HiddenRate], days: float, policy: Policy | float, seed: int) -> float:
    """The share of useful work of a whole job; a number as policy: an oracle that never spends more."""
    truth = Truth(hidden(seed), seed)
    settings = FrequencySettings(overhead=BUDGET)
    training = {"settings": settings, "step_seconds": STEP_SECONDS, "stall": STALL, "persist": PERSIST}
    made = SimulatedJob(truth.failures(), days * DAY, Restart(BACK, 30.0, 30.0), training)
    if callable(policy):
        made.rhythm = policy(settings)
        return made.run().goodput
    most = policy
    wanted = sum(part * math.sqrt(STALL * rate / 2.0) for part, rate in truth.hidden.usual)

    def planner(asked: FrequencySettings, clock: Clock) -> OraclePlanner:
        return OraclePlanner(
            asked, lambda: clock.monotonic() - made.clock.BEGIN, truth.at, lambda _: (STALL, 0.0), wanted, most
        )

    made.rhythm = partial(Oracle, planner, settings)
    return made.run().goodput


def slow_nights(factor: float, days: float, policy: Policy | float, seed: int) -> float:
    """A store that takes `factor` times as long for eight hours of each day, and slows training while it is written."""
    settings = FrequencySettings(overhead=BUDGET, mtbf_seconds=MEAN_MTBF)

    def persist(elapsed: float) -> float:
        return PERSIST * (factor if elapsed % DAY >= 16 * HOUR else 1.0)

    def cost(elapsed: float) -> tuple[float, float]:
        return STALL, persist(elapsed) * (SLOWDOWN - 1.0)

    most = 1.0 if callable(policy) else policy
    wanted = sum(part * math.sqrt(sum(cost(at)) / MEAN_MTBF / 2.0) for part, at in ((2 / 3, 0.0), (1 / 3, 17 * HOUR)))
    origin: list[float] = []

    def planner(asked: FrequencySettings, clock: Clock) -> OraclePlanner:
        origin.append(clock.monotonic())
        return OraclePlanner(
            asked, lambda: clock.monotonic() - origin[0], lambda _: 1.0 / MEAN_MTBF, cost, wanted, most
        )

    rhythm = policy(settings) if callable(policy) else partial(Oracle, planner, settings)
    training = IrregularTraining(
        settings,
        step_seconds=STEP_SECONDS,
        stall=STALL,
        persist=persist,
        slowdown=SLOWDOWN,
        jitter=0.05,
        seed=seed,
        rhythm=rhythm,
    )
    return training.run_seconds(days * DAY).goodput(MEAN_MTBF)


WORLDS: Mapping[str, Callable[[float, Policy | float, int], float]] = {
    "failures 4 times as frequent by day": partial(job, lambda _: by_hour(4.0)),
    "failures 16 times as frequent by day": partial(job, lambda _: by_hour(16.0)),
    "old allocations are taken (Weibull 3)": partial(job, lambda _: by_age(3.0)),
    "a machine is bad for half a day": partial(job, bad_machines),
    "a store 4 times as slow at night": partial(slow_nights, 4.0),
    "a store 16 times as slow at night": partial(slow_nights, 16.0),
}
"""Useful work, given days, policy and seed."""
