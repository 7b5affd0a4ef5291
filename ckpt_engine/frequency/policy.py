"""The frequency policy: from measured costs and a failure rate to an interval that explains itself.

Every rule here is a pure function of values. All bounds are in training steps:

    k_budget        ceil(o / (p Ti))                 o: stall + slowdown per snapshot, p: budget, Ti: clean step time
    k_backpressure  ceil(max(L / slots, B) / Ti)     L: snapshot instant to durable, B: time the writer needs for one
    k_io            ceil(written bytes / (bandwidth Ti))
    k_failure       round(τ*(λ, o) / Ti)             τ*: `intervals.best_intervals`
    k_rpo           floor((RPO - L) / Ti)
    k               clip(k_failure, max(1, k_budget, k_backpressure, k_io), k_rpo)

The expected loss is convex in the interval, so the optimum under bounds is the clip. Where the lower bound exceeds
k_rpo the lower bound stays and the decision says that the RPO is infeasible: training is never stopped to meet it.

The frequency settings of a run, as one value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Protocol, Self

from ckpt_engine.frequency.intervals import BYTE_PRICE, JointIntervals, SnapshotLevel, best_intervals
from ckpt_engine.observe.events import MACHINE, PROCESS, SITE
from ckpt_engine.observe.units import duration, share

if TYPE_CHECKING:
    from ckpt_engine.config import Config

MAX_INTERVAL_STEPS = 10**9
HYSTERESIS = 0.10
_WORTH_SAYING = 5e-4

# Measured seconds divided by measured seconds must not cost a whole step because 0.7 / 0.05 is not 14 in binary.
_ROUNDING = 1e-9
DEFAULT_OVERHEAD = 0.01


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
        hook_share: what the engine's hooks take of training at each step, whether a snapshot follows or not.
    """

    step_seconds: float
    stall_seconds: float = 0.0
    slowdown_seconds: float = 0.0
    latency_seconds: float = 0.0
    busy_seconds: float = 0.0
    written_bytes: float = 0.0
    worst_latency_seconds: float = 0.0
    hook_share: float = 0.0

    @property
    def promised_latency_seconds(self) -> float:
        """Snapshot instant to durable, as a promise about lost work counts it."""
        return max(_seconds(self.latency_seconds), _seconds(self.worst_latency_seconds))

    @property
    def cost_seconds(self) -> float:
        """Training time one snapshot takes away (o)."""
        return _seconds(self.stall_seconds) + _seconds(self.slowdown_seconds)


@dataclass(frozen=True, slots=True)
class FarCosts:
    """What the newest copy to a further tier has cost.

    Args:
        latency_seconds: from the snapshot's instant until it was there.
    """

    sent_bytes: float
    copy_seconds: float
    latency_seconds: float


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
        failures_per_second: that go back to a durable snapshot.
        limit_seconds: the least of their limits on lost work; infinite without one.
        gain_of: computes `gain`, once it is asked for.
        memory_seconds: the interval between snapshots of any kind where some only stay in memory; infinite: none do.
        memory_limit_seconds: as `limit_seconds`, of the failures that go back to memory.
        far_seconds: the interval of the copies to a further tier; infinite where there is none.
    """

    interval_steps: int
    bounds: Bounds
    costs: Costs
    settings: FrequencySettings
    failures_per_second: float
    limit_seconds: float = math.inf
    gain_of: Callable[[], float] = field(default=float, compare=False, repr=False)
    memory_seconds: float = math.inf
    memory_limit_seconds: float = math.inf
    far_seconds: float = math.inf

    @property
    def gain(self) -> float:
        """What one more percent of budget would add to the share of useful work."""
        return self.gain_of()

    @property
    def why(self) -> str:
        """One line for people: `reasons`, and `shortfall` if there is one."""
        return f"{self.reasons}; {self.shortfall}" if self.shortfall else self.reasons

    @property
    def shortfall(self) -> str:
        """What cannot be had: an RPO that budget, back-pressure or bandwidth forbid. Empty: all can."""
        if self.bounds.feasible or math.isinf(self.limit_seconds):
            return ""
        needed = f"every {self.bounds.rpo} steps" if self.bounds.rpo >= 1 else "a faster persist"
        return f"RPO infeasible: max_lost_work {duration(self.limit_seconds)} would need {needed}"

    @property
    def reasons(self) -> str:
        """One line for people: the interval, the measurements, the binding constraint, and what would help."""
        costs, bounds = self.costs, self.bounds
        stall, slowdown = _seconds(costs.stall_seconds), _seconds(costs.slowdown_seconds)
        every = "every step" if self.interval_steps == 1 else f"every {self.interval_steps} steps"
        mtbf = 1.0 / self.failures_per_second if self.failures_per_second > 0.0 else math.inf
        rate = f"1/{duration(mtbf)}" if math.isfinite(mtbf) else "0"
        parts = [
            f"stall {duration(stall)} + slowdown {duration(slowdown)} against budget {share(self.settings.budget)}",
            f"persist {duration(_seconds(costs.latency_seconds))}",
            f"failure rate {rate}",
            f"set by {bounds.binding}",
        ]
        if self.gain >= _WORTH_SAYING:
            parts.append(f"1 % more budget = {share(self.gain)} more useful work")
        return f"{every}: " + "; ".join(parts)


class FrequencyPolicy(Protocol):
    """What a cadence asks for its intervals; `AdaptivePolicy` is one."""

    def decide(
        self,
        costs: Costs,
        rates: Mapping[str, float],
        memory_seconds: float | None = None,
        far: FarCosts | None = None,
        /,
    ) -> Decision:
        """The interval that these measurements call for: see `AdaptivePolicy.decide`."""


@dataclass(frozen=True, slots=True)
class AdaptivePolicy:
    """The policy of this module. `settings.overhead` of None counts as the default budget."""

    settings: FrequencySettings

    def levels(
        self, costs: Costs, memory_seconds: float | None = None, far: FarCosts | None = None
    ) -> list[SnapshotLevel]:
        """The levels of a run whose durable snapshots cost that much.

        Args:
            memory_seconds: what one costs that only stays in memory; None: there are none.
            far: what a copy to a further tier costs; None: there is none, or nothing was copied yet.
        """
        step, price = _finite(costs.step_seconds), _finite(BYTE_PRICE * costs.written_bytes)
        settings, near = self.settings, frozenset({PROCESS, MACHINE})
        chosen = settings.every_seconds or (settings.every_n_steps or 1) * step
        fixed = chosen if settings.overhead is None else None
        limit = settings.bandwidth_bytes_per_second
        least = max(step, _finite(self._busy(costs)), _finite(costs.written_bytes / limit) if limit else 0.0)
        latency = _finite(costs.promised_latency_seconds)
        found = [SnapshotLevel(near, _finite(costs.cost_seconds), price, latency, 0.0, least, fixed or None)]
        if memory_seconds is not None and (rhythm := settings.memory) is not None:
            survives = near if rhythm.mirrored else frozenset({PROCESS})
            fixed = rhythm.least_seconds(step) if rhythm.fixed else None
            found.insert(0, SnapshotLevel(survives, _finite(memory_seconds), least_seconds=step, fixed_seconds=fixed))
        if far is not None:
            every = near | {SITE}
            cost, price = found[-1].cost_seconds, price + _finite(BYTE_PRICE * far.sent_bytes)
            late = max(latency, _finite(far.latency_seconds))
            found.append(SnapshotLevel(every, cost, price, late, 0.0, _finite(far.copy_seconds)))
        return found

    def decide(
        self,
        costs: Costs,
        rates: Mapping[str, float],
        memory_seconds: float | None = None,
        far: FarCosts | None = None,
    ) -> Decision:
        """The interval that these measurements call for, hysteresis not yet applied; arguments as of `levels`."""
        settings, step = self.settings, costs.step_seconds
        rates = {one: min(rate, 1e15) if rate > 0.0 else 0.0 for one, rate in rates.items()}
        levels = self.levels(costs, memory_seconds, far)
        budget = left_for_snapshots(settings.budget, costs.hook_share)
        best = best_intervals(levels, rates, budget, settings.limits)
        memory = memory_seconds is not None and settings.memory is not None
        near = at = int(memory)
        if math.isinf(best.seconds[near]) and near + 1 < len(levels) and near not in best.goes_back_to.values():
            at = near + 1  # all that is durable goes far
        late = levels[at].latency_seconds - levels[near].latency_seconds
        limit = _limit(settings, best, near, at) - late
        bandwidth = settings.bandwidth_bytes_per_second
        bounds = Bounds(
            budget=_steps_up(best.budget_seconds[at], step),
            backpressure=_steps_up(self._busy(costs), step),
            io=0 if bandwidth is None else _steps_up(costs.written_bytes, bandwidth * step),
            failure=round(_quotient(best.unbudgeted_seconds[at], step)),
            rpo=_rpo_steps(limit, costs.promised_latency_seconds, step),
        )
        more = partial(best_intervals, levels, rates, budget + 0.01, settings.limits)
        return Decision(
            bounds.target,
            bounds,
            costs,
            settings,
            best.failures_per_second[at],
            limit,
            cache(lambda: best.waste - more().waste) if best.budget_worth > 0.0 else float,
            best.seconds[0] if memory else math.inf,
            _limit(settings, best, 0, 0) if memory else math.inf,
            best.seconds[-1] if far is not None else math.inf,
        )

    def _busy(self, costs: Costs) -> float:
        """Seconds between two snapshots that the writer needs."""
        return max(_seconds(costs.latency_seconds) / self.settings.slots, _seconds(costs.busy_seconds))


def left_for_snapshots(budget: float, hook_share: float) -> float:
    """What the hooks of each step leave of a budget, an eighth of it at least: no interval makes hooks any cheaper."""
    return max(budget - hook_share, budget / 8.0)


def _limit(settings: FrequencySettings, best: JointIntervals, *levels: int) -> float:
    """The least limit on lost work of the classes that go back to these levels; infinite without one."""
    return min(
        (settings.limits.get(one, math.inf) for one, to in best.goes_back_to.items() if to in levels), default=math.inf
    )


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
    return wanted if steps == wanted.interval_steps else replace(wanted, interval_steps=steps)


def _seconds(value: float) -> float:
    """A measurement as a bound can use it: negative and NaN are no evidence of a cost."""
    return value if value > 0.0 else 0.0


def _finite(value: float) -> float:
    """The same, as a level can use it."""
    return min(_seconds(value), 1e15)


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


def _rpo_steps(rpo: float, latency: float, step: float) -> int:
    if math.isinf(rpo):
        return MAX_INTERVAL_STEPS
    return min(MAX_INTERVAL_STEPS, math.floor(_quotient(rpo - latency, step) * (1.0 + _ROUNDING)))


@dataclass(frozen=True, slots=True)
class MemoryRhythm:
    """When snapshots are taken into memory: at fixed distances, or as failures and budget make it worth (both None).

    `mirrored`: they are in the memory of other machines too.
    """

    every_n_steps: int | None = None
    every_seconds: float | None = None
    mirrored: bool = False

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
        max_lost_work_seconds: RPO; upper bound of an interval plus the time until durable, by class of failure; a
            number: of process and machine. None: no bound.
        mtbf_seconds: mean time between failures. None: learned online (`mtbf: auto`).
        every_n_steps: fixed trigger at every step number divisible by it.
        every_seconds: fixed trigger at this wall-clock distance.
        at_steps: fixed trigger at these step numbers.
        on_validation_end: fixed trigger at the first boundary after a validation.
        at_end: fixed trigger when training ends with work that is not in a snapshot.
        slots: arena slots, i.e. snapshots that can be in flight at the same time.
        bandwidth_bytes_per_second: what snapshots may write on average. None: no bound.
        memory: when snapshots are taken that only stay in memory. None: never.
    """

    overhead: float | None = DEFAULT_OVERHEAD
    max_lost_work_seconds: float | Mapping[str, float] | None = None
    mtbf_seconds: float | None = None
    every_n_steps: int | None = None
    every_seconds: float | None = None
    at_steps: tuple[int, ...] = ()
    on_validation_end: bool = False
    at_end: bool = True
    slots: int = 1
    bandwidth_bytes_per_second: float | None = None
    memory: MemoryRhythm | None = None

    @property
    def limits(self) -> Mapping[str, float]:
        """The most seconds that a failure may cost, of each class that has a limit."""
        given = self.max_lost_work_seconds
        if given is None or isinstance(given, Mapping):
            return given or {}
        return {PROCESS: given, MACHINE: given}

    @property
    def aim(self) -> str:
        """One line for people, before the first snapshot has shown what one costs."""
        apart = f", at most {duration(min(self.limits.values()))} apart" if self.limits else ""
        return f"with at most {share(self.budget)} overhead{apart}"

    @property
    def budget(self) -> float:
        """The share of training time that snapshots of all kinds may cost."""
        return DEFAULT_OVERHEAD if self.overhead is None else self.overhead

    @classmethod
    def of(cls, config: Config) -> Self:
        """What the options of a run mean.

        A fixed interval (`every_n_steps`, `every_seconds`) without an `overhead` or a `max_lost_work` switches the
        adaptive trigger off; everything else leaves it on, with the default budget where none was given.
        """
        fixed = config.every_n_steps is not None or config.every_seconds is not None
        only_fixed = fixed and config.max_lost_work is None and "overhead" not in config.model_fields_set
        memory = config.memory
        mirrored = memory is not None and bool(memory.replicate or memory.parity)
        rhythm = None if memory is None else MemoryRhythm(memory.every_n_steps, memory.every, mirrored)
        return cls(
            overhead=None if only_fixed else config.overhead,
            max_lost_work_seconds=config.max_lost_work,
            mtbf_seconds=None if config.mtbf == "auto" else config.mtbf,
            every_n_steps=config.every_n_steps,
            every_seconds=config.every_seconds,
            at_steps=config.at_steps,
            on_validation_end=config.on_validation_end,
            at_end=config.at_end,
            # With a memory tier one slot is always complete, and one is there for the next one.
            slots=config.arena_slots if memory is None else max(1, config.arena_slots - 2),
            bandwidth_bytes_per_second=config.tiers[0].bandwidth,
            memory=rhythm,
        )
