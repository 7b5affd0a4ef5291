"""Two levels of snapshots under one budget: how it is divided, and when one that stays in memory is due.

A snapshot in memory survives the trainer, a durable one survives the machine. Per second of training, process failures
come at rate λm and lose on average half a memory interval τm, machine failures come at rate λd and lose half a durable
interval τd. Snapshots of level i cost Ci seconds of training, so that level takes the share bi = Ci / τi of it. Divide
the budget B such that the expected loss is least:

    minimise  λm τm / 2 + λd τd / 2   over τm, τd   with   Cm / τm + Cd / τd = B

Setting the derivative of the Lagrangian to zero, λi / 2 = μ Ci / τi² for both levels, gives τi ∝ sqrt(Ci / λi), that is
bi = Ci / τi ∝ sqrt(Ci λi), and as the shares add up to B:

    bi = B sqrt(Ci λi) / Σj sqrt(Cj λj)

A level is not taken more often than its own optimum, sqrt(2 Ci / λi) apart, whatever the budget: on a machine that
fails once in a month, one percent is far more than snapshots in memory are worth.

It is the first order of Young and Daly for two levels: a durable snapshot is one in memory too, which is neglected, and
failures during a snapshot or a restart are. Where a level cannot use up its part (not more than one snapshot per
step; a writer that needs its time) the loss is convex, so that the optimum is at the bound and the rest is the other's.

About three of four failures need only a process restart (DLRover's Flash Checkpoint), hence λm : λd = 3 : 1. The result
depends on the square root of the ratio only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckpt_engine.frequency.account import Account
from ckpt_engine.frequency.adaptive import ASSUMED_BYTES_PER_SECOND, ASSUMED_STALL_SECONDS
from ckpt_engine.frequency.controller import Costs, Decision
from ckpt_engine.frequency.intervals import optimal
from ckpt_engine.frequency.measure import Usual
from ckpt_engine.frequency.settings import FrequencySettings, MemoryRhythm

PROCESS_FAILURES = 0.75
"""Share of failures that leave the machine, and with it the writer process, alive."""
LEAST_RATIO = 0.01
"""Durable snapshots count as at least so expensive as this share of one in memory, whatever was measured."""


@dataclass(frozen=True, slots=True)
class Level:
    """One kind of snapshot.

    Args:
        cost_seconds: training time that one takes away.
        failures: how often a failure needs this kind; only the ratio between the levels matters.
        least_seconds: the shortest interval that is possible, or the one that is fixed; 0 where there is no bound.
    """

    cost_seconds: float
    failures: float
    least_seconds: float = 0.0

    @property
    def most(self) -> float:
        """The share of training time that snapshots at the shortest interval take."""
        if self.cost_seconds <= 0.0:
            return 0.0
        return self.cost_seconds / self.least_seconds if self.least_seconds > 0.0 else math.inf


def split(budget: float, memory: Level, durable: Level) -> tuple[float, float]:
    """What of `budget` (share of training time) is for snapshots in memory, and for durable ones.

    The sum is `budget`, less what neither level can use up.
    """
    weights = [math.sqrt(max(0.0, level.cost_seconds) * max(0.0, level.failures)) for level in (memory, durable)]
    total = sum(weights)
    if total <= 0.0:
        return min(memory.most, budget), min(durable.most, budget)
    first = budget * weights[0] / total
    if first > memory.most:
        return memory.most, min(durable.most, budget - memory.most)
    if budget - first > durable.most:
        return min(memory.most, budget - durable.most), durable.most
    return first, budget - first


class MemoryTrigger:
    """When a snapshot in memory is due, and what those cost. No clock: times and steps arrive as values.

    Without a fixed rhythm one is taken as soon as its own account has earned one (to half a step). Both rhythms count
    from the newest snapshot of either kind, because the writer keeps whatever is newest. The first one plans and
    touches what the others find ready: it is paid for like any, but it is the second that says what one costs.

    Args:
        budget: of both levels together, as a share of training time.
    """

    __slots__ = ("_account", "_budget", "_cost", "_first", "_open_seconds", "_rhythm", "_step", "_time", "share")

    def __init__(self, rhythm: MemoryRhythm, budget: float) -> None:
        self._rhythm = rhythm
        self._budget = budget
        self._cost, self._first = Usual(ASSUMED_STALL_SECONDS), True
        self.share = budget
        self.divide(0.0, self.cost_seconds, 0.0)
        self.restart(0, 0.0)

    def restart(self, step: int, now: float) -> None:
        """Training starts or goes on at `step`; what one costs stays known."""
        self._account = Account()
        self._open_seconds: float | None = None
        self._step, self._time = step, now

    def retune(self, budget: float) -> None:
        """Another budget from now on; what one costs stays known."""
        self._budget = budget
        self.divide(0.0, self.cost_seconds, 0.0)

    def announce(self, nbytes: int) -> None:
        """The size of the state, for an assumption about the stall of the first one."""
        if self._first:
            self._cost = Usual(max(ASSUMED_STALL_SECONDS, nbytes / ASSUMED_BYTES_PER_SECOND))

    @property
    def cost_seconds(self) -> float:
        """What one costs: stall and fence."""
        return self._cost.value

    @property
    def covered(self) -> float:
        """The share of failures that do not need a durable snapshot."""
        return 0.0 if self._first else PROCESS_FAILURES

    def divide(
        self,
        step_seconds: float,
        durable_cost_seconds: float,
        durable_least_seconds: float,
        failures_per_second: float = math.inf,
    ) -> float:
        """Divide the budget by what is known now; the part of the durable snapshots, which is never 0.

        A fixed rhythm takes what it takes. The durable ones get the rest, and at least their part of the optimum: what
        the user fixed for memory must not keep a run from becoming durable.

        Args:
            durable_least_seconds: the shortest interval that is wanted or possible, whatever the budget.
            failures_per_second: of all kinds; infinite: unknown, so that only the budget limits snapshots in memory.
        """
        least = self._rhythm.least_seconds(step_seconds)
        if not self._rhythm.fixed and failures_per_second < math.inf:
            rate = failures_per_second * PROCESS_FAILURES
            least = max(least, optimal(self.cost_seconds, 1.0 / rate if rate > 0.0 else math.inf))
        memory = Level(self.cost_seconds, PROCESS_FAILURES, least)
        cost = max(durable_cost_seconds, LEAST_RATIO * self.cost_seconds)
        self.share, part = split(self._budget, memory, Level(cost, 1.0 - PROCESS_FAILURES, durable_least_seconds))
        return max(part, self._budget - (memory.most if self._rhythm.fixed else self.share))

    def share_out(
        self, settings: FrequencySettings, costs: Costs, decision: Decision | None, failures_per_second: float
    ) -> float:
        """Divide the budget by what durable snapshots cost now; their part of it.

        Args:
            decision: on their interval so far; None: it is fixed, or nothing was decided.
        """
        fixed = settings.every_seconds or (settings.every_n_steps or 1) * costs.step_seconds
        least = decision.bounds.unbudgeted * costs.step_seconds if decision is not None else fixed
        return self.divide(costs.step_seconds, costs.cost_seconds, least, failures_per_second)

    def due(self, step: int, now: float, training_seconds: float) -> bool:
        """Whether one is due at this boundary.

        Args:
            training_seconds: time of all steps since the start, pauses not included.
        """
        self._settle()
        rhythm = self._rhythm
        if step <= self._step:
            return False
        if rhythm.every_n_steps is not None:
            return step // rhythm.every_n_steps > self._step // rhythm.every_n_steps
        if rhythm.every_seconds is not None:
            return now - self._time >= rhythm.every_seconds
        earned = self.share * (training_seconds - self._account.training_seconds)
        self._account.training_seconds = training_seconds
        cost = self.cost_seconds
        return self._account.credit(self.share, 2.0 * cost) >= cost - earned / 2.0

    def newer(self, step: int, now: float) -> None:
        """A snapshot of either kind was taken at `step`."""
        self._settle()
        self._step, self._time = step, now

    def took(self, step: int, now: float, stall_seconds: float) -> None:
        """One was taken into memory."""
        self.newer(step, now)
        self._open_seconds = stall_seconds
        self._account.paused_seconds += stall_seconds

    def fenced(self, seconds: float) -> bool:
        """Training waited for a copy; False if it was none of these."""
        if self._open_seconds is None:
            return False
        self._open_seconds += seconds
        self._account.paused_seconds += seconds
        return True

    def _settle(self) -> None:
        """What one cost is known once its fence is over: at the next boundary."""
        if self._open_seconds is not None:
            if self._first:
                self._cost, self._first = Usual(min(self._open_seconds, self._cost.value)), False
            else:
                self._cost.add(self._open_seconds)
            self._open_seconds = None
