"""The cadence with a memory tier: both kinds of snapshots together keep to the budget."""

from __future__ import annotations

import random

import pytest

from ckpt_engine.frequency.policy import FrequencySettings, MemoryRhythm
from tests.frequency.rig import Rig


class TwoLevels(Rig):
    """Takes whatever is due: durable ones of 0.2 s and 5 s of persist, those in memory of `stall` seconds."""

    def __init__(self, stall: float = 0.1, **settings: object) -> None:
        super().__init__(**({"memory": MemoryRhythm()} | settings))
        self.stall = stall
        self.durable: list[int] = []
        self.memory: list[int] = []
        self.training = 0.0

    def train(self, steps: int, jitter: float = 0.0) -> TwoLevels:
        draw = random.Random(7)
        pending: list[tuple[int, float]] = []
        for _ in range(steps):
            seconds = draw.lognormvariate(0.0, jitter) if jitter else 1.0
            self.training += seconds
            reason = self.go(1, seconds)
            if pending and self.clock.now >= pending[0][1]:
                self.cadence.committed(pending.pop(0)[0], 5.0, 10**9)
            if reason is not None:
                self.clock.now += 0.2
                self.cadence.taken(self.step, 0.2)
                self.durable.append(self.step)
                pending.append((self.step, self.clock.now + 5.0))
            elif self.cadence.memory_due(self.step):
                self.clock.now += self.stall
                self.cadence.held(self.step, self.stall)
                self.memory.append(self.step)
        return self

    @property
    def overhead(self) -> float:
        return (0.2 * len(self.durable) + self.stall * len(self.memory)) / self.training


@pytest.mark.cells(2)
@pytest.mark.parametrize("jitter", [0.0, 0.1])
@pytest.mark.parametrize("stall", [0.002, 0.05, 0.1])
def test_both_kinds_together_keep_to_the_budget(stall: float, jitter: float) -> None:
    """Whatever a copy costs, if it is less than a durable one; and both kinds are taken."""
    rig = TwoLevels(stall, overhead=0.02, mtbf_seconds=3600.0).train(5000, jitter)
    assert rig.overhead <= 0.02 * 1.05
    assert rig.cadence.overhead_fraction == pytest.approx(rig.overhead, abs=0.001)
    assert len(rig.durable) > 10
    assert len(rig.memory) > 10


def test_copies_that_cost_more_than_durable_snapshots_are_not_taken() -> None:
    """Only the few that measure the cost are taken."""
    rig = TwoLevels(1.0, overhead=0.02, mtbf_seconds=3600.0).train(5000)
    assert len(rig.memory) < 10
    assert rig.overhead <= 0.02


@pytest.mark.parametrize(("hours", "optimum"), [(12.0, 0.00147), (47 * 24.0, 0.000152)])
def test_neither_kind_is_taken_more_often_than_failures_make_it_worth(hours: float, optimum: float) -> None:
    """The budget is a limit: sqrt(C λ / 2) of what each kind adds is the least that snapshots and lost work cost."""
    rig = TwoLevels(0.1, overhead=0.02, mtbf_seconds=hours * 3600.0).train(40000)
    assert rig.overhead == pytest.approx(optimum, rel=0.1)


def test_the_whole_budget_is_used_where_failures_are_frequent() -> None:
    """Durable snapshots count the failures that need them only: one of four, once there are some in memory."""
    rig = TwoLevels(0.1, overhead=0.02, mtbf_seconds=120.0).train(5000)
    assert rig.overhead == pytest.approx(0.02, rel=0.1)
    assert rig.cadence.adaptive.decision is not None
    assert rig.cadence.adaptive.decision.failures_per_second == pytest.approx(0.25 / 120.0)


def test_a_run_without_a_memory_tier_never_has_one_due() -> None:
    """No snapshot in memory is due after any step."""
    rig = Rig(overhead=0.02)
    rig.go(50)
    assert not rig.cadence.memory_due(rig.step)


def test_every_step_where_the_user_says_so() -> None:
    """A fixed rhythm is not subject to the budget, and fills every step that has no durable snapshot."""
    rig = TwoLevels(0.5, overhead=None, memory=MemoryRhythm(every_n_steps=1), every_n_steps=10).train(100)
    assert sorted([*rig.memory, *rig.durable]) == list(range(1, 101))
    assert rig.durable == list(range(10, 101, 10))


def test_stalls_in_memory_are_no_step_time() -> None:
    """The clean step stays one second although each second step is followed by half a second of copying."""
    rig = TwoLevels(0.5, memory=MemoryRhythm(every_n_steps=2), overhead=0.05, mtbf_seconds=60.0).train(500)
    assert rig.cadence.adaptive.decision is not None
    assert rig.cadence.adaptive.decision.costs.step_seconds == pytest.approx(1.0)
    assert rig.cadence.adaptive.decision.costs.slowdown_seconds == pytest.approx(0.0, abs=1e-9)


def test_the_fence_belongs_to_the_newest_snapshot_of_either_kind() -> None:
    """The one behind a snapshot in memory does not make durable ones look expensive."""
    rig = TwoLevels(overhead=0.05, mtbf_seconds=60.0)
    rig.go(100)
    rig.take(stall=0.2, latency=1.0)
    rig.go(1)
    rig.cadence.held(rig.step, 0.0)
    rig.clock.now += 0.7
    rig.cadence.fence(0.7)
    rig.go(3)
    assert rig.cadence.adaptive.decision is not None
    assert rig.cadence.adaptive.decision.costs.stall_seconds == pytest.approx(0.2)
    assert rig.cadence.overhead_fraction == pytest.approx(0.9 / (rig.clock.now - 1000.0 - 0.9))


def test_a_fixed_durable_rhythm_shares_the_default_budget() -> None:
    """Without a budget of the user's, snapshots in memory keep to one percent less what the fixed ones cost."""
    rig = TwoLevels(0.1, overhead=None, every_n_steps=50, mtbf_seconds=60.0).train(3000)
    assert len(rig.durable) == 60
    assert 0.006 <= rig.overhead <= 0.0105


def test_another_budget_holds_for_both_kinds() -> None:
    """A file that was edited while training runs: more of both, and within the new budget."""
    rig = TwoLevels(0.1, overhead=0.005, mtbf_seconds=60.0).train(5000)
    before = (len(rig.durable), len(rig.memory))
    rig.cadence.retune(FrequencySettings(overhead=0.04, mtbf_seconds=60.0, memory=MemoryRhythm()))
    rig.durable, rig.memory, rig.training = [], [], 0.0
    rig.train(5000)
    assert len(rig.durable) > before[0]
    assert len(rig.memory) > before[1]
    assert 0.02 < rig.overhead <= 0.04 * 1.05
