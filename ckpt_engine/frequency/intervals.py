"""How far apart snapshots are best, for all levels.

Symbols of the literature, in seconds: `cost` (δ, o) blocks training at each snapshot, `mtbf` (M) is the mean time
between failures, τ the interval, L the time until a snapshot is safe, R detection, restart and load. Source for one
level: Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 2006; for several:
Benoit et al., "Towards optimal multi-level checkpointing", 2017.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

# Measured seconds divided by measured seconds must not differ because 0.7 / 0.05 is not 14 in binary.
_ROUNDING = 1e-9
_CLOSE = 1e-5
BYTE_PRICE = 1e-11
"""Seconds of training that a written byte is worth: 1 TB wears a drive made for one write a day by what 10 s of eight
GPUs cost."""
_LEAST_RATIO = 0.01
"""A level counts as at least so much dearer than the one before it, as a share of its cost, whatever was measured."""


def optimal(cost: float, mtbf: float) -> float:
    """The exact optimum of the exponential model, M (1 + W0(-exp(-1 - δ/M))); it does not depend on R.

    Defined for every cost ≥ 0 and mtbf ≥ 0, infinite ones included: 0 where checkpoints are free or failures
    permanent, at most `mtbf`, and infinite where failures never happen and checkpoints cost something.
    """
    if cost <= 0.0 or mtbf <= 0.0:
        return 0.0
    if math.isinf(mtbf):
        return math.inf
    ratio = cost / mtbf
    p = math.sqrt(-2.0 * math.expm1(-ratio))
    share = p - p * p / 3.0 + 11.0 / 72.0 * p**3
    if ratio < 1e-6:  # 1 + W0 cancels next to the branch point; this series of it (Corless et al. 1996, 4.22) does not
        return mtbf * share
    for _ in range(50):  # Newton's method for 1 - share = exp(-share - ratio)
        rest = math.exp(-share - ratio)
        change = (1.0 - share - rest) / (1.0 - rest)
        share += change
        if abs(change) <= 1e-15:
            break
    return mtbf * min(share, 1.0)


@dataclass(frozen=True, slots=True)
class SnapshotLevel:
    """How far snapshots come: host memory, the nearest durable tier, a further one. All numbers are not negative.

    Args:
        survives: classes of failures after which its snapshots are still there.
        cost_seconds: training time that a snapshot takes which comes so far, what nearer levels take included.
        price_seconds: training time that its bytes are worth, nearer levels included; no budget pays for it.
        latency_seconds: snapshot instant until it is there (L).
        restore_seconds: what it takes to train on from there (R).
        least_seconds: the shortest interval that is possible: a step, back-pressure, bandwidth.
        fixed_seconds: the interval that the user has fixed; None: it is derived.
    """

    survives: frozenset[str]
    cost_seconds: float
    price_seconds: float = 0.0
    latency_seconds: float = 0.0
    restore_seconds: float = 0.0
    least_seconds: float = 0.0
    fixed_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class JointIntervals:
    """The intervals of all levels, in the order in which they were given.

    Args:
        seconds: infinite: the level takes no snapshots of its own. A snapshot of one level is one of all nearer levels
            too, so that those of their own come in between.
        unbudgeted_seconds: the optimum without any bound.
        budget_seconds: the shortest that the budget leaves to each, all others as they are; infinite: none.
        goes_back_to: the number of the level that each class goes back to.
        failures_per_second: of the classes that go back to that level.
        waste: the share of training time that snapshots, their bytes, lost work and restores take together.
        budget_worth: by how much the waste falls with the budget (nu): so much per unit of more budget; 0.0 where the
            budget does not decide.
        broken: classes whose limit on lost work cannot be kept.
    """

    seconds: tuple[float, ...]
    unbudgeted_seconds: tuple[float, ...]
    budget_seconds: tuple[float, ...]
    goes_back_to: Mapping[str, int]
    failures_per_second: tuple[float, ...]
    waste: float
    budget_worth: float
    broken: frozenset[str]


def best_intervals(
    levels: Sequence[SnapshotLevel],
    rates: Mapping[str, float],
    budget: float,
    lost_work: Mapping[str, float] | None = None,
) -> JointIntervals:
    """The intervals of all levels that waste the least training time together.

        minimise    sum_l (o_l + price_l) / tau_l + sum_c lambda_c min_{l survives c} (tau_l / 2 + L_l + R_l)
        subject to  sum_l o_l / tau_l <= budget,  tau_l >= least_l,  tau_l + L_l <= lost_work_c

    where o_l and price_l are what a level adds to the nearest one before it that is in use (Benoit et al. 2017). For a
    given assignment of classes to levels the optimum is tau_l = sqrt(2 ((1 + nu) o_l + price_l) / Lambda_l) within its
    bounds, times the correction of the exact model for one level (`optimal`), with nu >= 0 the multiplier of the
    budget, found by bisection. There are few classes and levels: all assignments are compared.

    Args:
        levels: nearest first, at least one. A class that none survives counts for the last one.
        rates: failures per second of each class.
        budget: share of training time for all of them, above 0. What is fixed comes first, and leaves the others half
            of it at least. A limit on lost work that the budget forbids is broken by as little as it allows.
        lost_work: the most seconds that a failure of a class may cost; classes without a limit are absent.

    Returns:
        intervals that keep the budget, but for what is fixed, and each limit that is not in `broken`.
    """
    limits = {} if lost_work is None else lost_work
    able = {
        one: [number for number, level in enumerate(levels) if one in level.survives] or [len(levels) - 1]
        for one in rates
    }
    found = [
        _Assignment(levels, rates, limits, able, dict(zip(able, chosen, strict=True))).solve(budget)
        for chosen in itertools.product(*able.values())
    ]
    return min(found, key=lambda one: (len(one.broken), one.waste))


@dataclass(frozen=True, slots=True)
class _Part:
    """What one level adds to the ones before it.

    Args:
        best: the unbudgeted optimum.
        least, most: its bounds; `most` is infinite without a limit on lost work.
    """

    cost: float
    price: float
    best: float
    least: float
    most: float

    def at(self, multiplier: float) -> float:
        """The interval where the budget has that multiplier."""
        both = self.cost + self.price
        grown = self.best * math.sqrt(1.0 + multiplier * self.cost / both) if both > 0.0 else self.best
        grown = self.most if grown > self.most else grown
        return grown if grown > self.least else self.least


def _share(cost: float, seconds: float) -> float:
    """What one costs, of the time between two; given that share instead, the time."""
    if cost <= 0.0:
        return 0.0
    return cost / seconds if seconds > 0.0 else math.inf


@dataclass(frozen=True, slots=True)
class _Assignment:
    """Each class of failures goes back to one level."""

    levels: Sequence[SnapshotLevel]
    rates: Mapping[str, float]
    limits: Mapping[str, float]
    able: Mapping[str, Sequence[int]]
    chosen: Mapping[str, int]

    def solve(self, budget: float) -> JointIntervals:
        """The optimum of this assignment."""
        parts = self._parts()
        unbudgeted = {number: part.best for number, part in parts.items()}
        free = {number: part for number, part in parts.items() if self.levels[number].fixed_seconds is None}
        taken = sum(_share(part.cost, part.least) for number, part in parts.items() if number not in free)
        left = max(budget - taken, budget / 2.0)
        needed = sum(_share(part.cost, part.most) for part in free.values())
        if needed > left:  # the limits on lost work need more than the budget: what has none comes last
            wide = {number: part.most * (needed / left) for number, part in free.items()}
            free = {number: replace(part, best=wide[number], most=wide[number]) for number, part in free.items()}
        parts |= free
        multiplier = _multiplier(list(free.values()), left)
        seconds = self._in_order(parts, multiplier)
        spent = {number: _share(part.cost, seconds[number]) for number, part in parts.items()}
        waste = sum(spent.values())
        leaves = {number: left + taken - (waste - own) for number, own in spent.items()}
        waste += sum(_share(part.price, seconds[number]) for number, part in parts.items())
        lost, broken = self._lost(seconds)
        return JointIntervals(
            seconds=seconds,
            unbudgeted_seconds=tuple(unbudgeted.get(number, math.inf) for number in range(len(seconds))),
            budget_seconds=tuple(
                _share(parts[number].cost, leaves[number]) if number in leaves else math.inf
                for number in range(len(seconds))
            ),
            goes_back_to=self.chosen,
            failures_per_second=tuple(self._failures(number) for number in range(len(self.levels))),
            waste=waste + lost,
            budget_worth=multiplier,
            broken=broken,
        )

    def _parts(self) -> dict[int, _Part]:
        """By number, of the levels that are in use: some class goes back to them, or the user has fixed them."""
        parts, cost, price = {}, 0.0, 0.0
        for number, level in enumerate(self.levels):
            fixed = level.fixed_seconds
            if fixed is None and number not in self.chosen.values():
                continue
            own = max(level.cost_seconds - cost, _LEAST_RATIO * cost)
            worth = max(level.price_seconds - price, 0.0)
            cost, price = cost + own, price + worth
            if fixed is not None:
                parts[number] = _Part(own, worth, fixed, fixed, fixed)
                continue
            rate = self._failures(number)
            best = optimal(own + worth, 1.0 / rate if rate > 0.0 else math.inf)
            limit = min([self.limits.get(one, math.inf) for one, at in self.chosen.items() if at == number])
            most = max(level.least_seconds, limit - level.latency_seconds)
            parts[number] = _Part(own, worth, best, level.least_seconds, most)
        return parts

    def _failures(self, number: int) -> float:
        return sum(self.rates[one] for one, at in self.chosen.items() if at == number)

    def _in_order(self, parts: Mapping[int, _Part], multiplier: float) -> tuple[float, ...]:
        """The intervals, none shorter than that of the level before it: what comes far has passed there."""
        seconds, before = [math.inf] * len(self.levels), 0.0
        for number in sorted(parts):
            fixed = self.levels[number].fixed_seconds
            seconds[number] = before = fixed or max(before, parts[number].at(multiplier))
        return tuple(seconds)

    def _lost(self, seconds: Sequence[float]) -> tuple[float, frozenset[str]]:
        """The share of time that is lost or restored, and the classes whose limit is not kept."""
        share, broken = 0.0, set()
        for one, rate in self.rates.items():
            at = [(min(seconds[number:]), self.levels[number]) for number in self.able[one]]
            if rate > 0.0:
                lost = [every / 2.0 + level.latency_seconds + level.restore_seconds for every, level in at]
                share += rate * min(lost)
            if one in self.limits:
                worst = min([every + level.latency_seconds for every, level in at])
                if worst * (1.0 - _ROUNDING) > self.limits[one]:
                    broken.add(one)
        return share, frozenset(broken)


def _multiplier(parts: Sequence[_Part], budget: float) -> float:
    """The multiplier of the budget with which these levels keep it, by bisection; 0.0 where they do anyway."""

    def spent(multiplier: float) -> float:
        return sum([_share(part.cost, part.at(multiplier)) for part in parts])

    if spent(0.0) <= budget * (1.0 + _ROUNDING):
        return 0.0
    low, high = 0.0, 1.0
    while spent(high) > budget * (1.0 + _ROUNDING) and high < 1e300:
        low, high = high, 4.0 * high
    while high - low > _CLOSE * high:
        middle = (low + high) / 2.0
        low, high = (middle, high) if spent(middle) > budget else (low, middle)
    return high
