"""The cadence: what is durable, and what it remembers across restarts."""

from __future__ import annotations

import json

import pytest

from ckpt_engine.observe.events import Notice
from tests.frequency.rig import Rig


def test_age_is_counted_from_the_instant_of_the_newest_durable_snapshot() -> None:
    """Work is at risk from the instant, not from the moment it became durable."""
    rig = Rig(overhead=None, every_n_steps=10)
    rig.go(10)
    assert rig.cadence.age_of_last_durable() == pytest.approx(10.0)
    rig.take(stall=1.0)
    rig.go(5)
    assert rig.cadence.age_of_last_durable() == pytest.approx(16.0)
    rig.cadence.committed(10, 6.0, 10**9)
    assert rig.cadence.age_of_last_durable() == pytest.approx(6.0)
    rig.go(2)
    rig.cadence.committed(999, 3.0, 10**9)  # a snapshot that the cadence did not see taken
    assert rig.cadence.age_of_last_durable() == pytest.approx(3.0)


def test_state_survives_json_and_a_restart_is_a_failure() -> None:
    """The next run starts from the learned interval and a higher failure rate."""
    first = Rig(overhead=0.05)
    for _ in range(10):
        first.go(10000)
        first.take(stall=0.7, latency=9.0)
    first.go(3)
    state = json.loads(json.dumps(first.cadence.state(), allow_nan=False))
    assert first.cadence.adaptive.decision is not None
    second = Rig(start=None, overhead=0.05)
    second.cadence.restore(state)
    second.cadence.start(500)
    second.step = 500
    reason = second.go(10000)
    assert second.cadence.adaptive.decision is not None
    assert reason == "interval"
    assert second.cadence.adaptive.decision.costs.stall_seconds == pytest.approx(0.7)
    assert second.cadence.adaptive.decision.failures_per_second > first.cadence.adaptive.decision.failures_per_second
    assert second.step - 500 == second.cadence.interval_steps


def test_a_clean_end_is_no_failure() -> None:
    """Continuing a finished run does not make it look unreliable."""
    first = Rig(overhead=0.05)
    first.go(5)
    state = first.cadence.state()
    crashed, finished = Rig(overhead=0.05), Rig(overhead=0.05)
    crashed.cadence.restore(state)
    finished.cadence.restore(state, failure="")
    believed = [rig.cadence.state()["failures"]["process"] for rig in (crashed, finished)]
    assert believed[0] > believed[1] == state["failures"]["process"]


def test_starting_again_keeps_what_an_earlier_run_learned() -> None:
    """A second `start` loses neither the time survived nor the restored step time."""
    rig = Rig(overhead=0.05)
    rig.go(20)
    state = rig.cadence.state()
    other = Rig(start=None, overhead=0.05)
    other.cadence.restore(state, failure="")
    before = other.cadence.state()
    assert before["step_seconds"] == pytest.approx(1.0)
    other.cadence.start(20)
    other.clock.now += 100.0
    other.cadence.start(20)
    after = other.cadence.state()
    assert after["step_seconds"] == before["step_seconds"]
    assert after["failures"]["exposure_seconds"] == pytest.approx(before["failures"]["exposure_seconds"] + 100.0)


@pytest.mark.parametrize(("extra", "steps"), [(0, 1.0), (60, 2.0)])
def test_a_restart_does_not_forget_what_the_budget_has_earned(extra: int, steps: float) -> None:
    """Lives of a few hours: the next one may spend at once what the one before has left, and pays what it owes."""
    first = Rig(overhead=0.01, mtbf_seconds=7200.0)
    for _ in range(40):
        first.go(10000)
        first.take(stall=0.7, latency=9.0)
    for _ in range(extra):
        first.go(1)
        first.take(stall=0.7, latency=0.1)
    first.go(2)
    second = Rig(start=None, overhead=0.01, mtbf_seconds=7200.0)
    second.cadence.restore(first.cadence.state(), failure="")
    second.cadence.start(0)
    assert second.go(10000) == "interval"
    second.take(stall=2.1, latency=9.0)
    taken = second.step
    assert second.go(10000) == "interval"
    assert second.step - taken == pytest.approx(steps * (second.cadence.interval_steps or 0), rel=0.1)


@pytest.mark.parametrize(
    "state",
    [
        {},
        None,
        {"version": 99},
        {"version": 1, "failures": {}, "costs": None, "step_seconds": None, "interval_steps": None},
        {"version": 1, "failures": 5, "costs": None, "step_seconds": None, "interval_steps": None},
    ],
)
def test_an_unreadable_state_is_reported_and_ignored(state: object) -> None:
    """It only costs a little learning."""
    rig = Rig(overhead=0.05)
    rig.cadence.restore(state)  # type: ignore[arg-type]
    assert [type(event) for event in rig.sink.events] == [Notice]
    assert rig.go(100) == "interval"


def test_mtbf_given_by_the_user_is_where_the_belief_begins() -> None:
    """It weighs more than an assumption; evidence corrects it as well."""
    rig = Rig(overhead=0.05, mtbf_seconds=3600.0)
    rig.go(100)
    rig.take(stall=0.7, latency=9.0)
    rig.go(3)
    assert "failure rate 1/60 min" in rig.cadence.why
