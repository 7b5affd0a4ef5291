"""A policy that learns, for `ckpt plan --compare learned_policy:Learned`: a measured negative result.

The cadence stays, with its robust costs, bounds and account. What it believes of failures and stalls is replaced:

- failures: a Gamma belief about the rate for each range of the time since a process started, because failures come in
  bursts; with few failures it is the usual rate;
- stalls: a Markov chain over their sizes, with a Dirichlet belief about each row, says what the next one costs;
- the plan: the optimum for the rate that is expected now. It may spend more than the budget for a while, where that is
  saved while failures are rare.

`Sampled` draws the rates from the belief instead of taking its mean (Thompson 1933). docs/frequency.md has what became
of both, `python -m benchmarks study learned` measures it.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from ckpt_engine.frequency.cadence import Cadence
from ckpt_engine.frequency.policy import AdaptivePolicy, Costs, Decision, FarCosts, FrequencySettings
from ckpt_engine.observe.clock import Clock
from ckpt_engine.observe.events import AttemptsFound, Event, EventSink

AGES = (240.0, 960.0, 3840.0, 15360.0, 61440.0)
"""Seconds since the start of a process: between two of them the rate counts as constant."""
SMOOTH = 8.0
"""Failures that the usual rate weighs in each range."""
MOST_OF_BUDGET = 4.0


class Hazard:
    """How often a process fails, by its age."""

    def __init__(self, found: AttemptsFound) -> None:
        """From all attempts of the run, oldest first."""
        self.failed = [0.0] * (len(AGES) + 1)
        self.lived = [0.0] * (len(AGES) + 1)
        for seconds, failure in zip(found.lasted, found.failures, strict=True):
            edges = (0.0, *AGES, math.inf)
            for at, (begin, end) in enumerate(pairwise(edges)):
                self.lived[at] += max(0.0, min(seconds, end) - begin)
            self.failed[bisect_right(AGES, seconds)] += failure != ""

    def belief(self, at: int) -> tuple[float, float]:
        """Shape and scale of the factor on the usual rate in one range; its mean is their product."""
        events, seconds = sum(self.failed), sum(self.lived)
        usual = events / seconds if seconds else 0.0
        return SMOOTH + self.failed[at], 1.0 / (SMOOTH + usual * self.lived[at])

    def factor(self, age: float, draw: random.Random | None = None) -> float:
        """By how much the rate at that age differs from the usual one."""
        shape, scale = self.belief(bisect_right(AGES, age))
        return shape * scale if draw is None else draw.gammavariate(shape, scale)


class Stalls:
    """What the next snapshot costs, given what the newest did."""

    def __init__(self) -> None:
        self._sums: defaultdict[int, float] = defaultdict(float)
        self._counts: Counter[int] = Counter()
        self._next: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._newest: int | None = None

    def learn(self, seconds: float) -> None:
        """One more."""
        size = math.floor(math.log2(max(seconds, 1e-6)))
        self._sums[size] += seconds
        self._counts[size] += 1
        if self._newest is not None:
            self._next[self._newest][size] += 1
        self._newest = size

    def expected(self) -> float | None:
        """The mean of the next one; None before the first."""
        if self._newest is None:
            return None
        row, many = self._next[self._newest], self._counts.total()
        share = {size: (row[size] + count / many) / (row.total() + 1.0) for size, count in self._counts.items()}
        return sum(part * self._sums[size] / self._counts[size] for size, part in share.items())


@dataclass
class Planner:
    """A `FrequencyPolicy`."""

    settings: FrequencySettings
    learned: Learned

    def decide(
        self,
        costs: Costs,
        rates: Mapping[str, float],
        memory_seconds: float | None = None,
        far: FarCosts | None = None,
        /,
    ) -> Decision:
        """What `AdaptivePolicy` decides for the rate and the stall that are expected now."""
        hazard, stall = self.learned.hazard, self.learned.stalls.expected()
        if stall is not None:
            costs = replace(costs, stall_seconds=stall)
        factor = hazard.factor(self.learned.age, self.learned.draw)
        rates = {one: rate * factor for one, rate in rates.items()}
        wider = replace(
            self.settings, overhead=self.settings.budget * self._share(costs.cost_seconds, sum(rates.values()))
        )
        made = AdaptivePolicy(wider).decide(costs, rates, memory_seconds, far)
        return replace(made, settings=self.settings)

    def _share(self, cost: float, usual: float) -> float:
        """How much more than the budget may be spent at times, so that all ages together keep it."""
        hazard = self.learned.hazard
        lived = sum(hazard.lived)
        if not lived or cost <= 0.0:
            return 1.0
        wanted = [math.sqrt(cost * usual * math.prod(hazard.belief(at)) / 2.0) for at in range(len(AGES) + 1)]
        for share in (MOST_OF_BUDGET, 2.0):
            most = share * self.settings.budget
            if (
                sum(part * min(most, one) for part, one in zip(hazard.lived, wanted, strict=True))
                <= lived * self.settings.budget
            ):
                return min(share, 1.0 / self.settings.budget)
        return 1.0


class Learned(Cadence):
    """The cadence of this project with that planner."""

    draw: random.Random | None = None

    def __init__(self, settings: FrequencySettings, clock: Clock, sink: EventSink) -> None:
        self.hazard, self.stalls = Hazard(AttemptsFound((), ())), Stalls()
        self._clock, self._began = clock, clock.monotonic()
        self.policy_of = lambda wanted: Planner(wanted, self)
        super().__init__(settings, clock, sink)

    @property
    def age(self) -> float:
        """Seconds since the process started."""
        return self._clock.monotonic() - self._began

    def emit(self, event: Event) -> None:
        super().emit(event)
        if isinstance(event, AttemptsFound):
            self.hazard = Hazard(event)
            self._began = self._clock.monotonic() - event.seconds

    def taken(self, step: int, stall: float, wait: float = 0.0) -> None:
        super().taken(step, stall, wait)
        self.stalls.learn(stall)


class Sampled(Learned):
    """The same, with rates that are drawn from the belief."""

    def __init__(self, settings: FrequencySettings, clock: Clock, sink: EventSink) -> None:
        super().__init__(settings, clock, sink)
        self.draw = random.Random(clock.monotonic())
