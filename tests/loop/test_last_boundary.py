"""When a boundary is recorded, and what makes its record useless."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_engine.loop.failing_loop import (
    MOST_BYTES,
    ImpossibleError,
    LastBoundary,
    affordable,
    fingerprint,
    loose_tensors,
    require_finite,
)


class Steps:
    """A clock: each step and each record takes its time."""

    def __init__(self, step_seconds: float, record_seconds: float, budget: float = 0.01) -> None:
        self.now, self.made = 0.0, 0
        self._step, self.cost = step_seconds, record_seconds
        self.last = LastBoundary(self._make, budget, lambda: self.now)

    def _make(self) -> int:
        self.now += self.cost
        self.made += 1
        return self.made

    def train(self, steps: int) -> float:
        """The share of training time that records take."""
        began, made = self.now, self.made
        for _ in range(steps):
            self.last.reached()
            self.now += self._step
        return (self.made - made) * self.cost / (self.now - began)


@pytest.mark.parametrize("step_seconds", [0.001, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("record_seconds", [0.00004, 0.0002, 0.02])
def test_records_take_half_of_the_budget_at_most(step_seconds: float, record_seconds: float) -> None:
    """That is so for every cost of a step and of a record; a cheap record is made at every boundary."""
    steps = Steps(step_seconds, record_seconds)
    steps.train(100)
    share = steps.train(1000)
    if affordable(record_seconds, step_seconds, 0.01):
        assert steps.made == 1100
        assert share <= 0.005
    else:
        assert steps.made <= 10  # looked at again, ever more rarely
        with pytest.raises(ImpossibleError, match="too short"):
            steps.last.record()


def test_to_look_again_at_what_costs_too_much_takes_next_to_nothing() -> None:
    """A record of 8 ms at each 64th step of 50 ms is a quarter of a percent of training."""
    steps = Steps(0.05, 0.008)
    steps.train(2000)
    assert steps.train(20000) <= 0.0001


def test_what_has_become_cheap_is_recorded_again() -> None:
    """At the latest when the run has lasted as long again."""
    steps = Steps(0.05, 0.008)
    steps.train(1000)
    steps.cost = 0.0001
    steps.train(1000)
    made = steps.made
    steps.train(10)
    assert steps.made == made + 10


def test_a_record_holds_until_weights_may_change() -> None:
    """A call without a valid record raises an error that says why."""
    steps = Steps(1.0, 0.0001)
    with pytest.raises(ImpossibleError, match="no step was begun"):
        steps.last.record()
    steps.last.changes()
    steps.train(2)
    assert steps.last.record() == 2
    steps.last.changes()
    with pytest.raises(ImpossibleError, match="weights may have changed"):
        steps.last.record()
    steps.train(1)
    assert steps.last.record() == 3


def test_what_changes_in_forward_is_what_no_optimizer_manages() -> None:
    """Buffers, and averaged weights; up to a size that is copied in no time."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    found = {one.key for one in loose_tensors(net, [optimizer])}
    assert found == {name for name in net.state_dict() if not name.startswith("0.")}
    net.register_buffer("bank", torch.zeros(MOST_BYTES // 4 + 1))
    with pytest.raises(ImpossibleError, match="too large"):
        loose_tensors(net, [optimizer])


def test_states_are_compared_by_value() -> None:
    """What cannot be is refused, not taken for equal."""
    state = {"a": 1, "b": [torch.arange(3), (None, 2.5)], "c": "x"}
    before = fingerprint("it", state)
    assert fingerprint("it", {"a": 1, "b": [torch.arange(3), (None, 2.5)], "c": "x"}) == before
    state["b"][0][1] = 7  # type: ignore[index]
    assert fingerprint("it", state) != before
    for refused in (object(), torch.zeros(1000), {"deep": {1, 2}}):
        with pytest.raises(ImpossibleError):
            fingerprint("it", refused)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["weight", "state"])
def test_no_value_that_is_not_finite_is_overlooked(value: float, where: str) -> None:
    """In weights and in what the optimizer knows of them; large finite ones of a short type are fine."""
    weight = nn.Parameter(torch.full((300,), 60000.0, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight] = {"step": 3, "momentum_buffer": torch.full((300,), 60000.0, dtype=torch.float16)}
    require_finite([optimizer])
    (weight.data if where == "weight" else optimizer.state[weight]["momentum_buffer"])[7] = value
    with pytest.raises(ImpossibleError, match="diverged"):
        require_finite([optimizer])
