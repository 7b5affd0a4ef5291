"""Two levels under one budget: the laws of the division, and when a snapshot in memory is due."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckpt_engine.frequency.policy import MemoryRhythm
from ckpt_engine.frequency.triggers import PROCESS_FAILURES, MemoryTrigger, SharedLevel, split

BUDGETS = st.floats(1e-4, 0.5)
COSTS = st.floats(1e-4, 100.0)
RATES = st.floats(1e-6, 1.0)
BOUNDS = st.just(0.0) | st.floats(1e-3, 1e5)
LEVELS = st.builds(SharedLevel, COSTS, RATES, BOUNDS)


def loss(part: float, level: SharedLevel) -> float:
    """Expected work lost: failures times half an interval."""
    return level.failures * level.cost_seconds / part / 2.0 if part > 0.0 else math.inf


@given(BUDGETS, LEVELS, LEVELS)
def test_the_parts_are_within_the_budget_and_within_what_each_level_can_use(
    budget: float, memory: SharedLevel, durable: SharedLevel
) -> None:
    """Nothing is given away twice, and nothing is left over that one of them could use."""
    parts = split(budget, memory, durable)
    assert all(0.0 <= part <= level.most * (1 + 1e-9) for part, level in zip(parts, (memory, durable), strict=True))
    assert sum(parts) == pytest.approx(min(budget, memory.most + durable.most))


@given(BUDGETS, COSTS, RATES, COSTS, RATES)
def test_without_bounds_the_parts_are_as_the_roots_of_cost_times_rate(
    budget: float, cost_m: float, rate_m: float, cost_d: float, rate_d: float
) -> None:
    """The formula of the module's first page."""
    memory, durable = split(budget, SharedLevel(cost_m, rate_m), SharedLevel(cost_d, rate_d))
    assert memory / durable == pytest.approx(math.sqrt(cost_m * rate_m / (cost_d * rate_d)))


@given(BUDGETS, LEVELS, LEVELS, st.floats(0.001, 0.999))
def test_no_other_division_loses_less_work(
    budget: float, memory: SharedLevel, durable: SharedLevel, other: float
) -> None:
    """The optimum, bounds included: any other division that keeps to budget and bounds expects more loss."""
    best = split(budget, memory, durable)
    parts = (min(memory.most, other * budget), min(durable.most, (1.0 - other) * budget))
    found, at_best = (sum(map(loss, p, (memory, durable))) for p in (parts, best))
    assert at_best <= found * (1 + 1e-9)


@given(BUDGETS, LEVELS, LEVELS, st.floats(0.01, 100.0))
def test_units_do_not_matter(budget: float, memory: SharedLevel, durable: SharedLevel, scale: float) -> None:
    """Milliseconds instead of seconds, or rates per year, divide the same."""
    scaled = [
        SharedLevel(x.cost_seconds * scale, x.failures / scale, x.least_seconds * scale) for x in (memory, durable)
    ]
    assert split(budget, *scaled) == pytest.approx(split(budget, memory, durable))


def test_a_level_that_costs_nothing_leaves_everything_to_the_other() -> None:
    """It is taken as often as possible without needing a part."""
    assert split(0.01, SharedLevel(0.0, 0.75), SharedLevel(1.0, 0.25)) == (0.0, 0.01)
    assert split(0.01, SharedLevel(1.0, 0.75), SharedLevel(0.0, 0.25)) == (0.01, 0.0)
    assert split(0.01, SharedLevel(0.0, 0.75), SharedLevel(0.0, 0.25)) == (0.0, 0.0)


def test_the_usual_failures_and_equal_costs() -> None:
    """Three of four failures spare the machine: snapshots in memory come sqrt(3) times as often."""
    memory, durable = split(0.01, SharedLevel(0.1, PROCESS_FAILURES), SharedLevel(0.1, 1.0 - PROCESS_FAILURES))
    assert memory / durable == pytest.approx(math.sqrt(3.0))


class Training:
    """Steps of a constant length with a snapshot in memory whenever one is due."""

    def __init__(self, trigger: MemoryTrigger, step_seconds: float, stall: float, fence: float = 0.0) -> None:
        self.trigger, self.step_seconds, self.stall, self.wait = trigger, step_seconds, stall, fence
        self.step, self.now, self.training = 0, 0.0, 0.0
        self.taken: list[int] = []

    def run(self, steps: int) -> Training:
        for _ in range(steps):
            self.step += 1
            self.now += self.step_seconds
            self.training += self.step_seconds
            if self.trigger.due(self.step, self.now, self.training):
                self.now += self.stall
                self.trigger.took(self.step, self.now, self.stall)
                if self.wait:
                    self.now += self.wait
                    assert self.trigger.fenced(self.wait)
                self.taken.append(self.step)
        return self

    @property
    def overhead(self) -> float:
        return len(self.taken) * (self.stall + self.wait) / self.training


@given(st.floats(0.001, 0.2), st.floats(1e-3, 10.0), st.floats(1e-4, 10.0), st.booleans())
def test_the_account_is_never_overdrawn(share: float, step_seconds: float, cost: float, lazy: bool) -> None:
    """Whatever one costs, in stall or at the fence, all together cost at most the share and two of them."""
    trigger = MemoryTrigger(MemoryRhythm(), share)
    assume(cost / share / step_seconds < 1000)
    stall, fence = (0.0, cost) if lazy else (cost, 0.0)
    training = Training(trigger, step_seconds, stall, fence).run(500)
    assert len(training.taken) * cost <= trigger.share * training.training + 2.0 * cost + 1e-9


def test_a_cheap_copy_is_taken_at_every_iteration() -> None:
    """1 ms of 10 s steps is a hundredth of what one percent earns."""
    trigger = MemoryTrigger(MemoryRhythm(), 0.01)
    training = Training(trigger, 10.0, 0.001).run(50)
    assert training.taken[-40:] == list(range(11, 51))


def test_an_expensive_copy_is_taken_when_the_account_has_earned_it() -> None:
    """0.1 s at 0.1 % of steps of 1 s: every hundredth step."""
    trigger = MemoryTrigger(MemoryRhythm(), 0.01)
    trigger.share = 0.001
    training = Training(trigger, 1.0, 0.1).run(2000)
    gaps = {b - a for a, b in zip(training.taken[3:], training.taken[4:], strict=False)}
    assert gaps <= {99, 100, 101}


def test_a_fixed_rhythm_is_kept_whatever_it_costs() -> None:
    """Steps on the grid of the run, or seconds since the newest snapshot."""
    steps = Training(MemoryTrigger(MemoryRhythm(every_n_steps=3), 0.01), 1.0, 5.0).run(10)
    assert steps.taken == [3, 6, 9]
    seconds = Training(MemoryTrigger(MemoryRhythm(every_seconds=2.5), 0.01), 1.0, 0.0).run(10)
    assert seconds.taken == [3, 6, 9]


def test_a_durable_snapshot_is_one_in_memory_too() -> None:
    """No other one is due at its step, and a fixed distance counts from it."""
    trigger = MemoryTrigger(MemoryRhythm(every_seconds=2.0), 0.01)
    trigger.newer(5, 5.0)
    assert not trigger.due(5, 5.0, 5.0)
    assert not trigger.due(6, 6.0, 6.0)
    assert trigger.due(7, 7.0, 7.0)


def test_what_snapshots_at_every_step_leave_over_is_for_the_durable_ones() -> None:
    """A copy of 0.1 % of a step cannot use half a percent."""
    trigger = MemoryTrigger(MemoryRhythm(), 0.01)
    Training(trigger, 1.0, 0.001).run(20)
    assert trigger.divide(1.0, 0.002, 0.0) == pytest.approx(0.009)
    assert trigger.share == pytest.approx(0.001)


def test_what_durable_ones_do_not_need_is_for_those_in_memory() -> None:
    """Where the failure rate wants one in 1000 s that costs 0.5 s, the other 0.95 % are free."""
    trigger = MemoryTrigger(MemoryRhythm(), 0.01)
    Training(trigger, 1.0, 0.5).run(2000)
    assert trigger.divide(1.0, 0.5, 1000.0) == pytest.approx(0.0005)
    assert trigger.share == pytest.approx(0.0095)


def test_a_fixed_rhythm_above_the_budget_leaves_durable_ones_their_part() -> None:
    """The run still becomes durable; the sum is then what the user has asked for."""
    trigger = MemoryTrigger(MemoryRhythm(every_n_steps=1), 0.01)
    Training(trigger, 1.0, 0.1).run(50)
    part = trigger.divide(1.0, 0.1, 0.0)
    assert part == pytest.approx(0.01 / (1.0 + math.sqrt(3.0)), rel=0.05)


def test_fences_of_durable_snapshots_are_not_charged() -> None:
    """Only the fence right after a snapshot in memory is its own."""
    trigger = MemoryTrigger(MemoryRhythm(), 0.01)
    assert not trigger.fenced(1.0)
    for step in (1, 3):
        trigger.took(step, float(step), 0.0)
        assert trigger.fenced(1.0)
        trigger.newer(step + 1, step + 1.0)
        assert not trigger.fenced(1.0)
    assert trigger.cost_seconds == 1.0


def test_a_slow_first_one_does_not_make_the_next_ones_rare() -> None:
    """Planning and first touch cost 60 ms once, which is paid back; then one that costs 1 ms comes at every step."""
    trigger = MemoryTrigger(MemoryRhythm(), 0.04)
    seconds, taken = 0.0, []
    for step in range(1, 101):
        seconds += 0.05
        if trigger.due(step, seconds, seconds):
            trigger.took(step, seconds, 0.001 if taken else 0.06)
            taken.append(step)
    first = taken[0]
    assert taken[1] - first <= 50  # 60 ms of the part of 4 % that snapshots in memory get, in steps of 50 ms
    assert taken[2:] == list(range(taken[2], 101))
    assert taken[2] - taken[1] <= 1
