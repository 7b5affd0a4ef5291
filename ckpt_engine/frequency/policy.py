"""The frequency policy: from measured costs and a failure rate to an interval that explains itself.

Every rule here is a pure function of values. All bounds are in training steps:

    k_budget        ceil(o / (p Ti))                 o: stall + slowdown per snapshot, p: budget, Ti: clean step time
    k_backpressure  ceil(max(L / slots, B) / Ti)     L: snapshot instant to durable, B: time the writer needs for one
    k_io            ceil(written bytes / (bandwidth Ti))
    k_failure       round(τ*(λ, o) / Ti)             τ*: `policy.optimal`
    k_rpo           floor((RPO - L) / Ti)
    k               clip(k_failure, max(1, k_budget, k_backpressure, k_io), k_rpo)

The expected loss is convex in the interval, so the optimum under bounds is the clip. Where the lower bound exceeds
k_rpo the lower bound stays and the decision says that the RPO is infeasible: training is never stopped to meet it.

The optimal checkpoint interval for failures at a constant rate.

Symbols of the literature, in seconds: `cost` (δ) blocks training at each checkpoint, `mtbf` (M) is the mean time
between failures, R is detection, restart and load.

Source: Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 2006.

The frequency settings of a run, as one validated value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from ckpt_engine.errors import ConfigError
from ckpt_engine.observe.units import duration, share

MAX_INTERVAL_STEPS = 10**9
HYSTERESIS = 0.10

# Measured seconds divided by measured seconds must not cost a whole step because 0.7 / 0.05 is not 14 in binary.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Costs:
    """What one snapshot costs, as measured.

    Args:
        step_seconds: one clean training step (Ti).
        stall_seconds: training blocked per snapshot: capture, eager staging, fence (To). Waiting for a free slot is
            not in it: the back-pressure bound answers that.
        slowdown_seconds: how much longer the steps next to the snapshot were (Tx).
        latency_seconds: snapshot instant to durable, at the high end of the recent ones without the highest (L).
        busy_seconds: time the writer was occupied by one snapshot, at the high end; equals the latency where nothing
            queues.
        written_bytes: bytes one snapshot writes.
        worst_latency_seconds: the longest of the recent latencies; a promise about lost work counts with it.
    """

    step_seconds: float
    stall_seconds: float = 0.0
    slowdown_seconds: float = 0.0
    latency_seconds: float = 0.0
    busy_seconds: float = 0.0
    written_bytes: float = 0.0
    worst_latency_seconds: float = 0.0

    @property
    def promised_latency_seconds(self) -> float:
        """Snapshot instant to durable, as a promise about lost work counts it."""
        return max(_seconds(self.latency_seconds), _seconds(self.worst_latency_seconds))

    @property
    def cost_seconds(self) -> float:
        """Training time one snapshot takes away (o)."""
        return _seconds(self.stall_seconds) + _seconds(self.slowdown_seconds)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The five bounds in steps; `rpo` is 0 where the latency exceeds the RPO, `MAX_INTERVAL_STEPS` without one."""

    budget: int
    backpressure: int
    io: int
    failure: int
    rpo: int

    @property
    def lower(self) -> int:
        return max(1, self.budget, self.backpressure, self.io)

    @property
    def unbudgeted(self) -> int:
        """What the interval would be at least if snapshots cost training nothing."""
        return max(1, self.backpressure, self.io, min(self.failure, self.rpo))

    @property
    def feasible(self) -> bool:
        """False: budget, back-pressure or bandwidth forbid snapshots as frequent as the RPO needs."""
        return self.lower <= self.rpo

    @property
    def target(self) -> int:
        """The clip of `failure` to the other bounds."""
        return max(self.lower, min(self.failure, self.rpo))

    @property
    def binding(self) -> str:
        """The constraint that determines `target`, in the words of the settings."""
        target = self.target
        if target == self.failure:
            return "failure rate"
        if target < self.failure and self.feasible:
            return "max_lost_work"
        named = (("budget", self.budget), ("back-pressure", self.backpressure), ("bandwidth", self.io))
        return next((name for name, steps in named if steps == target), "step time")


@dataclass(frozen=True, slots=True)
class Decision:
    """An interval and everything it was derived from.

    Args:
        interval_steps: the interval in force; `bounds.target` unless hysteresis holds it elsewhere.
    """

    interval_steps: int
    bounds: Bounds
    costs: Costs
    settings: FrequencySettings
    failures_per_second: float

    @property
    def why(self) -> str:
        """One line for people: `reasons`, and `shortfall` if there is one."""
        return f"{self.reasons}; {self.shortfall}" if self.shortfall else self.reasons

    @property
    def shortfall(self) -> str:
        """What cannot be had: an RPO that budget, back-pressure or bandwidth forbid. Empty: all can."""
        if self.bounds.feasible or self.settings.max_lost_work_seconds is None:
            return ""
        needed = f"every {self.bounds.rpo} steps" if self.bounds.rpo >= 1 else "a faster persist"
        return f"RPO infeasible: max_lost_work {duration(self.settings.max_lost_work_seconds)} would need {needed}"

    @property
    def reasons(self) -> str:
        """One line for people: the interval, the measurements, the binding constraint."""
        costs, bounds = self.costs, self.bounds
        stall, slowdown = _seconds(costs.stall_seconds), _seconds(costs.slowdown_seconds)
        every = "every step" if self.interval_steps == 1 else f"every {self.interval_steps} steps"
        mtbf = 1.0 / self.failures_per_second if self.failures_per_second > 0.0 else math.inf
        rate = f"1/{duration(mtbf)}" if math.isfinite(mtbf) else "0"
        parts = [
            f"stall {duration(stall)} + slowdown {duration(slowdown)} against budget {share(_budget(self.settings))}",
            f"persist {duration(_seconds(costs.latency_seconds))}",
            f"failure rate {rate}",
            f"set by {bounds.binding}",
        ]
        return f"{every}: " + "; ".join(parts)


@dataclass(frozen=True, slots=True)
class AdaptivePolicy:
    """The policy of this module. `settings.overhead` of None counts as the default budget."""

    settings: FrequencySettings

    def decide(self, costs: Costs, failures_per_second: float) -> Decision:
        """The interval that these measurements call for, hysteresis not yet applied."""
        settings, step = self.settings, costs.step_seconds
        latency, cost = _seconds(costs.latency_seconds), costs.cost_seconds
        busy = max(latency / settings.slots, _seconds(costs.busy_seconds))
        rate = failures_per_second if failures_per_second >= 0.0 else 0.0
        best = optimal(cost, 1.0 / rate if rate > 0.0 else math.inf)
        bounds = Bounds(
            budget=_steps_up(cost, _budget(settings) * step),
            backpressure=_steps_up(busy, step),
            io=_io_steps(settings.bandwidth_bytes_per_second, costs.written_bytes, step),
            failure=round(_quotient(best, step)),
            rpo=_rpo_steps(settings.max_lost_work_seconds, costs.promised_latency_seconds, step),
        )
        return Decision(bounds.target, bounds, costs, settings, rate)


def settle(current_steps: int | None, wanted: Decision, *, held_back: bool) -> Decision:
    """The decision in force after hysteresis: a change within 10 % is not applied, any other at once.

    What is measured is robust, so that a change of the target is one of the world. Two exceptions, both needed to keep
    a promise: an interval that back-pressure has already overrun is raised by any amount, and one that breaks a
    feasible RPO is lowered to it.

    Args:
        current_steps: the interval in force; None: there is none, `wanted` is taken as it is.
        held_back: a snapshot met a busy slot since the last decision.
    """
    target = wanted.bounds.target
    if current_steps is None:
        return wanted
    stays = abs(target - current_steps) <= HYSTERESIS * current_steps and not (held_back and target > current_steps)
    steps = current_steps if stays else target
    if wanted.bounds.feasible:
        steps = min(steps, wanted.bounds.rpo)
    return replace(wanted, interval_steps=max(1, steps))


def _budget(settings: FrequencySettings) -> float:
    return settings.overhead if settings.overhead is not None else DEFAULT_OVERHEAD


def _seconds(value: float) -> float:
    """A measurement as a bound can use it: negative and NaN are no evidence of a cost."""
    return value if value > 0.0 else 0.0


def _steps_up(amount: float, per_step: float) -> int:
    """How many whole steps it takes to afford `amount`: 0 to MAX_INTERVAL_STEPS, whatever the input."""
    return math.ceil(_quotient(amount, per_step) * (1.0 - _ROUNDING))


def _quotient(amount: float, per_step: float) -> float:
    """`amount / per_step` within 0 and MAX_INTERVAL_STEPS; a step time that is no measurement affords nothing."""
    if not amount > 0.0 or per_step == math.inf:
        return 0.0
    if not per_step > 0.0 or amount >= per_step * MAX_INTERVAL_STEPS:
        return float(MAX_INTERVAL_STEPS)
    return amount / per_step


def _io_steps(bandwidth: float | None, written: float, step: float) -> int:
    return 0 if bandwidth is None else _steps_up(written, bandwidth * step)


def _rpo_steps(rpo: float | None, latency: float, step: float) -> int:
    if rpo is None:
        return MAX_INTERVAL_STEPS
    return min(MAX_INTERVAL_STEPS, math.floor(_quotient(rpo - latency, step) * (1.0 + _ROUNDING)))


_BRANCH_POINT = -1.0 / math.e


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
    if ratio < 1e-6:
        # 1 + W0 cancels next to the branch point; its series does not.
        p = math.sqrt(-2.0 * math.expm1(-ratio))
        return mtbf * (p - p * p / 3.0 + 11.0 / 72.0 * p**3)
    return mtbf * (1.0 + lambert_w0(-math.exp(-1.0 - ratio)))


def lambert_w0(z: float) -> float:
    """The principal branch of Lambert's W (w e^w = z) for real z ≥ -1/e, by Halley's iteration.

    Source: Corless et al., "On the Lambert W function", 1996, equation 5.9 and the branch point series 4.22.

    Raises:
        ValueError: z below -1/e.
    """
    if z < _BRANCH_POINT:
        if z < _BRANCH_POINT * (1.0 + 1e-15):
            raise ValueError(f"lambert_w0 is real from -1/e on, not at {z!r}")
        return -1.0
    if math.isinf(z):
        return math.inf
    if z < -0.25:
        p = math.sqrt(max(0.0, 2.0 * (1.0 + math.e * z)))
        w = -1.0 + p - p * p / 3.0 + 11.0 / 72.0 * p**3
    elif z < 3.0:
        w = math.log1p(z) * 0.75
    else:
        w = math.log(z) - math.log(math.log(z))
    for _ in range(50):
        exp_w = math.exp(w)
        error = w * exp_w - z
        slope = exp_w * (w + 1.0)
        if error == 0.0 or slope == 0.0:
            break
        change = error / (slope - (w + 2.0) * error / (2.0 * w + 2.0))
        w -= change
        if abs(change) <= 1e-15 * (1.0 + abs(w)):
            break
    return w


BYTE_PRICE = 1e-11
"""Seconds of training that a written byte is worth: 1 TB wears a drive made for one write a day by what 10 s of eight
GPUs cost."""
_LEAST_RATIO = 0.01
"""A level counts as at least so much dearer than the one before it, as a share of its cost, whatever was measured."""


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
        unbudgeted_seconds: what they would be with an unlimited budget.
        failures_per_second: of the classes that go back to that level.
        waste: the share of training time that snapshots, their bytes, lost work and restores take together.
        budget_worth: by how much the waste falls with the budget (nu): so much per unit of more budget; 0.0 where the
            budget does not decide.
        broken: classes whose limit on lost work cannot be kept.
    """

    seconds: tuple[float, ...]
    unbudgeted_seconds: tuple[float, ...]
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
        return max(self.least, min(grown, self.most))

    def spent(self, seconds: float) -> float:
        """The share of training time that it takes at an interval."""
        if self.cost <= 0.0:
            return 0.0
        return self.cost / seconds if seconds > 0.0 else math.inf


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
        free = {number: part for number, part in parts.items() if self.levels[number].fixed_seconds is None}
        taken = sum(part.spent(part.least) for number, part in parts.items() if number not in free)
        left = max(budget - taken, budget / 2.0)
        needed = sum(part.spent(part.most) for part in free.values())
        if needed > left:  # the limits on lost work need more than the budget: what has none comes last
            wide = {number: part.most * (needed / left) for number, part in free.items()}
            free = {number: replace(part, best=wide[number], most=wide[number]) for number, part in free.items()}
        parts |= free
        multiplier = _multiplier(list(free.values()), left)
        seconds = self._in_order(parts, multiplier)
        waste = sum(part.spent(seconds[number]) for number, part in parts.items())
        waste += sum(part.price / seconds[number] for number, part in parts.items() if part.price > 0.0)
        lost, broken = self._lost(seconds)
        return JointIntervals(
            seconds=seconds,
            unbudgeted_seconds=self._in_order(parts, 0.0),
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
                share += rate * min(every / 2.0 + level.latency_seconds + level.restore_seconds for every, level in at)
            worst = min(every + level.latency_seconds for every, level in at)
            if worst * (1.0 - _ROUNDING) > self.limits.get(one, math.inf):
                broken.add(one)
        return share, frozenset(broken)


def _multiplier(parts: Sequence[_Part], budget: float) -> float:
    """The multiplier of the budget with which these levels keep it, by bisection; 0.0 where they do anyway."""

    def spent(multiplier: float) -> float:
        return sum(part.spent(part.at(multiplier)) for part in parts)

    if spent(0.0) <= budget * (1.0 + _ROUNDING):
        return 0.0
    low, high = 0.0, 1.0
    while spent(high) > budget * (1.0 + _ROUNDING) and high < 1e300:
        low, high = high, 4.0 * high
    while high - low > _ROUNDING * high:
        middle = (low + high) / 2.0
        low, high = (middle, high) if spent(middle) > budget else (low, middle)
    return high


DEFAULT_OVERHEAD = 0.01


@dataclass(frozen=True, slots=True)
class MemoryRhythm:
    """When snapshots are taken into memory: at fixed distances, or as often as the budget allows (both None)."""

    every_n_steps: int | None = None
    every_seconds: float | None = None

    @property
    def fixed(self) -> bool:
        return self.every_n_steps is not None or self.every_seconds is not None

    def least_seconds(self, step_seconds: float) -> float:
        """The shortest interval, for steps of that length."""
        if self.every_seconds is not None:
            return max(self.every_seconds, step_seconds)
        return (self.every_n_steps or 1) * step_seconds


@dataclass(frozen=True, slots=True)
class FrequencySettings:
    """When snapshots are taken. Several triggers coexist; the fixed ones are never adapted.

    Args:
        overhead: budget of the adaptive trigger, as a fraction of clean training time (0.01 is 1 %). None: no adaptive
            trigger, only the fixed ones.
        max_lost_work_seconds: RPO; upper bound of the adaptive interval plus persist time. None: no bound.
        mtbf_seconds: mean time between failures. None: learned online (`mtbf: auto`).
        every_n_steps: fixed trigger at every step number divisible by it.
        every_seconds: fixed trigger at this wall-clock distance.
        on_validation_end: fixed trigger at the first boundary after a validation.
        at_end: fixed trigger when training ends with work that is not in a snapshot.
        slots: arena slots, i.e. snapshots that can be in flight at the same time.
        bandwidth_bytes_per_second: what snapshots may write on average. None: no bound.
        memory: when snapshots are taken that only stay in memory. None: never.

    Raises:
        ConfigError: a value out of range; the message names the field.
    """

    overhead: float | None = DEFAULT_OVERHEAD
    max_lost_work_seconds: float | None = None
    mtbf_seconds: float | None = None
    every_n_steps: int | None = None
    every_seconds: float | None = None
    on_validation_end: bool = False
    at_end: bool = True
    slots: int = 1
    bandwidth_bytes_per_second: float | None = None
    memory: MemoryRhythm | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or isinstance(value, bool | MemoryRhythm):
                continue
            whole = field.name in ("every_n_steps", "slots")
            if not isinstance(value, int if whole else (int, float)) or not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{field.name} must be a positive {'integer' if whole else 'number'}, not {value!r}")
        if self.overhead is not None and self.overhead > 1:
            raise ConfigError(f"overhead is a fraction of training time between 0 and 1, not {self.overhead!r}")

    @property
    def budget(self) -> float:
        """The share of training time that snapshots of all kinds may cost."""
        return DEFAULT_OVERHEAD if self.overhead is None else self.overhead

    @classmethod
    def from_options(
        cls,
        *,
        overhead: float | None = None,
        max_lost_work_seconds: float | None = None,
        mtbf_seconds: float | None = None,
        every_n_steps: int | None = None,
        every_seconds: float | None = None,
        on_validation_end: bool = False,
        at_end: bool = True,
        slots: int = 1,
        bandwidth_bytes_per_second: float | None = None,
        memory: tuple[int | None, float | None] | None = None,
    ) -> FrequencySettings:
        """The settings a user means who gave only some of the options (None: not given).

        A fixed interval (`every_n_steps`, `every_seconds`) without an `overhead` or a `max_lost_work` switches the
        adaptive trigger off; everything else leaves it on, with the default budget where none was given. `memory` is
        the rhythm of the memory tier in steps and seconds.
        """
        fixed = every_n_steps is not None or every_seconds is not None
        if overhead is None and not (fixed and max_lost_work_seconds is None):
            overhead = DEFAULT_OVERHEAD
        return cls(
            overhead=overhead,
            max_lost_work_seconds=max_lost_work_seconds,
            mtbf_seconds=mtbf_seconds,
            every_n_steps=every_n_steps,
            every_seconds=every_seconds,
            on_validation_end=on_validation_end,
            at_end=at_end,
            slots=slots,
            bandwidth_bytes_per_second=bandwidth_bytes_per_second,
            memory=None if memory is None else MemoryRhythm(*memory),
        )
