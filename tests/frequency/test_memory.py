"""When a snapshot in memory is due, and what those cost."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckpt_engine.frequency.policy import MemoryRhythm
from ckpt_engine.frequency.triggers import Account, MemoryTrigger


class Training:
    """Steps of a constant length with a snapshot in memory whenever one is due."""

    def __init__(
        self, trigger: MemoryTrigger, step_seconds: float, stall: float, fence: float = 0.0, budget: float = 0.01
    ) -> None:
        self.trigger, self.step_seconds, self.stall, self.wait = trigger, step_seconds, stall, fence
        self.budget, self.account = budget, Account()
        self.step, self.now = 0, 0.0
        self.taken: list[int] = []

    def run(self, steps: int) -> Training:
        for _ in range(steps):
            self.step += 1
            self.now += self.step_seconds
            self.account.training_seconds += self.step_seconds
            if self.trigger.due(self.step, self.now, self.account, self.budget, self.step_seconds):
                self.now += self.stall + self.wait
                self.account.paused_seconds += self.stall + self.wait
                self.trigger.took(self.step, self.now, self.account.training_seconds, self.stall)
                if self.wait:
                    assert self.trigger.fenced(self.wait)
                self.taken.append(self.step)
        return self

    @property
    def overhead(self) -> float:
        return len(self.taken) * (self.stall + self.wait) / self.account.training_seconds


def trigger(interval: float = 0.0, limit: float = math.inf) -> MemoryTrigger:
    one = MemoryTrigger(MemoryRhythm())
    one.interval_seconds, one.limit_seconds = interval, limit
    return one


@pytest.mark.long
@given(st.floats(0.001, 0.2), st.floats(1e-3, 10.0), st.floats(1e-4, 10.0), st.booleans())
def test_a_debt_makes_them_half_as_frequent(budget: float, step_seconds: float, cost: float, lazy: bool) -> None:
    """Whatever one costs, in stall or at the fence: where the budget does not pay for the interval it doubles."""
    assume(10 < cost / budget / step_seconds < 100)
    stall, fence = (0.0, cost) if lazy else (cost, 0.0)
    right, half = (
        Training(trigger(share * cost / budget), step_seconds, stall, fence, budget).run(2000) for share in (1.0, 0.5)
    )
    assert right.overhead <= budget * 1.1 + 3.0 * cost / right.account.training_seconds
    assert half.overhead <= budget * 1.1 + 3.0 * cost / half.account.training_seconds


def test_a_cheap_copy_is_taken_at_every_iteration() -> None:
    """Where the levels' optimum wants that."""
    assert Training(trigger(1.0), 10.0, 0.001).run(50).taken[-40:] == list(range(11, 51))


def test_the_interval_counts_from_the_newest_of_either_kind() -> None:
    """To half a step, so that equal steps give exactly the interval."""
    training = Training(trigger(100.0), 1.0, 0.1).run(1000)
    assert {b - a for a, b in zip(training.taken, training.taken[1:], strict=False)} == {100}
    training.trigger.newer(1001, 1100.0, 1001.0)
    assert training.run(99).taken[-1] <= 1000
    assert training.run(5).taken[-1] == 1101


def test_a_limit_on_lost_work_comes_before_the_interval() -> None:
    """Ahead by one step and the copy itself."""
    training = Training(trigger(math.inf, limit=20.0), 1.0, 0.1).run(100)
    assert {b - a for a, b in zip(training.taken, training.taken[1:], strict=False)} == {19}


def test_none_is_due_where_none_is_worth_it() -> None:
    """With an infinite interval no snapshot in memory is taken."""
    assert Training(trigger(math.inf), 1.0, 0.1).run(100).taken == []


def test_a_fixed_rhythm_is_kept_whatever_it_costs() -> None:
    """Steps on the grid of the run, or seconds since the newest snapshot."""
    steps = Training(MemoryTrigger(MemoryRhythm(every_n_steps=3)), 1.0, 5.0).run(10)
    assert steps.taken == [3, 6, 9]
    seconds = Training(MemoryTrigger(MemoryRhythm(every_seconds=2.5)), 1.0, 0.0).run(10)
    assert seconds.taken == [3, 6, 9]


def test_a_durable_snapshot_is_one_in_memory_too() -> None:
    """No other one is due at its step, and a fixed distance counts from it."""
    one = MemoryTrigger(MemoryRhythm(every_seconds=2.0))
    one.newer(5, 5.0, 5.0)
    assert [one.due(step, float(step), Account(), 0.01, 1.0) for step in (5, 6, 7)] == [False, False, True]


def test_fences_of_durable_snapshots_are_not_charged() -> None:
    """Only the fence right after a snapshot in memory is charged to it."""
    one = trigger()
    assert not one.fenced(1.0)
    for step in (1, 3):
        one.took(step, float(step), float(step), 0.0)
        assert one.fenced(1.0)
        one.newer(step + 1, step + 1.0, step + 1.0)
        assert not one.fenced(1.0)
    assert one.cost_seconds == 1.0


def test_a_slow_first_one_does_not_make_the_next_ones_rare() -> None:
    """Planning and first touch cost 60 ms once; what the second one costs is what counts."""
    one = trigger()
    for step, stall in ((1, 0.06), (2, 0.001), (3, 0.001)):
        one.took(step, float(step), float(step), stall)
    one.newer(4, 4.0, 4.0)
    assert one.cost_seconds == pytest.approx(0.001)
