"""The frequency policy: from measured costs and a failure rate to an interval that explains itself.

Every rule here is a pure function of values. All bounds are in training steps:

    k_budget        ceil(o / (p Ti))                 o: stall + slowdown per snapshot, p: budget, Ti: clean step time
    k_backpressure  ceil(max(L / slots, B) / Ti)     L: snapshot instant to durable, B: time the writer needs for one
    k_io            ceil(written bytes / (bandwidth Ti))
    k_failure       round(τ*(λ, o) / Ti)             τ*: `intervals.optimal`
    k_rpo           floor((RPO - L) / Ti)
    k               clip(k_failure, max(1, k_budget, k_backpressure, k_io), k_rpo)

The expected loss is convex in the interval, so the optimum under bounds is the clip. Where the lower bound exceeds
k_rpo the lower bound stays and the decision says that the RPO is infeasible: training is never stopped to meet it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ckpt_engine.frequency.intervals import optimal
from ckpt_engine.frequency.settings import DEFAULT_OVERHEAD, FrequencySettings
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
