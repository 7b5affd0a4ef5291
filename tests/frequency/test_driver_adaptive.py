"""The cadence: when the adaptive trigger fires and what it learns."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ckpt_engine.observe.events import IntervalChanged, Notice, SnapshotCommitted, SnapshotFailed
from tests.frequency.rig import Rig


def test_nothing_is_taken_before_a_few_clean_steps_were_measured() -> None:
    """A long step does not make the first snapshot come before there is anything to compare its cost with."""
    rig = Rig(overhead=0.05)
    assert rig.go(100) == "interval"
    assert rig.step == 7


def test_the_first_snapshot_waits_until_the_budget_has_earned_its_likely_stall() -> None:
    """8 GB at 4 GB/s are 2 s, which 1 % earns in 200 s of training."""
    rig = Rig(overhead=0.01)
    rig.cadence.announce(8 * 10**9)
    assert rig.go(1000) == "interval"
    assert rig.step == 200


def test_the_first_snapshot_does_not_wait_for_ever_nor_longer_than_half_the_rpo() -> None:
    """The cost of a huge state has to be learned at some time."""
    for settings, step in (({}, 600), ({"max_lost_work_seconds": 100.0}, 50)):
        rig = Rig(overhead=0.01, **settings)
        rig.cadence.announce(10**15)
        assert rig.go(1000) == "interval"
        assert rig.step == step


def test_one_snapshot_of_unknown_cost_at_a_time() -> None:
    """The second waits until the first is settled."""
    rig = Rig(overhead=0.05)
    rig.go(100)
    rig.take(stall=0.1)
    assert rig.go(500) is None
    rig.cadence.committed(7, 3.0, 10**9)
    assert rig.go() == "interval"


def test_learning_tells_the_interval_once_with_its_reason() -> None:
    """The first decision is an event with the line that `why` shows."""
    rig = Rig(overhead=0.05, mtbf_seconds=60.0)
    rig.go(100)
    rig.take(stall=0.7, latency=9.0)
    rig.go(3)
    events = [event for event in rig.sink.events if isinstance(event, IntervalChanged)]
    assert [event.interval_steps for event in events] == [rig.cadence.interval_steps] == [14]
    assert events[0].why == rig.cadence.why
    assert "stall 700 ms + slowdown 0 s against budget 5 %" in rig.cadence.why


def test_the_fence_is_part_of_the_stall() -> None:
    """Waiting before the update costs the snapshot that made it necessary."""
    rig = Rig(overhead=0.05, mtbf_seconds=60.0)
    rig.go(100)
    rig.take(stall=0.2)
    rig.clock.now += 0.5
    rig.cadence.fence(0.5)
    rig.go()
    rig.cadence.committed(7, 2.0, 10**9)
    rig.go()
    assert rig.cadence.interval_steps == 14


def test_a_commit_reported_before_the_boundary_still_counts_its_step_as_disturbed() -> None:
    """The step in which the persist ended was slowed down too, for as long as it was on its way."""
    rig = Rig(overhead=0.05, mtbf_seconds=60.0)
    rig.go(100)
    rig.take(stall=0.0)
    rig.cadence.committed(rig.step, 1.5, 10**9)
    rig.go(seconds=1.5)
    assert rig.cadence.adaptive.decision is not None
    assert rig.cadence.adaptive.decision.costs.slowdown_seconds == pytest.approx(0.5)


def test_debt_of_an_expensive_snapshot_is_paid_back() -> None:
    """A fixed snapshot that costs ten times as much delays the adaptive ones, but at most to twice the interval."""
    rig = Rig(overhead=0.05, mtbf_seconds=60.0, on_validation_end=True)
    for _ in range(40):
        rig.go(100)
        rig.take(stall=0.5, latency=1.0)
    rig.cadence.validation_ended()
    assert rig.cadence.boundary(rig.step) == "validation"
    rig.take(stall=5.0, latency=1.0)
    before = rig.step
    spacing = []
    for _ in range(30):
        rig.go(1000)
        spacing.append((rig.step - before, rig.cadence.interval_steps))
        before = rig.step
        rig.take(stall=0.5, latency=1.0)
    assert all(taken <= 2 * every + 1 for taken, every in spacing if every is not None)
    assert rig.cadence.overhead_fraction < 1.02 * 0.05
    assert spacing[-1][0] == spacing[-1][1]  # out of debt: taken when due
    assert spacing[-1][0] <= 12
    assert max(taken / every for taken, every in spacing if every is not None) > 1.5


def test_rpo_counts_the_time_of_validation() -> None:
    """A long validation brings the next snapshot forward, because its time would be lost as well."""
    rig = Rig(overhead=0.05, mtbf_seconds=1e9, max_lost_work_seconds=100.0)
    for _ in range(5):
        rig.go(1000)
        rig.take(stall=0.1, latency=1.0)
    taken = rig.step
    rig.go(20)
    rig.clock.now += 85.0
    rig.cadence.exclude(85.0)
    assert rig.go(10) == "interval"
    assert rig.step == taken + 21


def test_infeasible_rpo_is_a_warning_once() -> None:
    """The user gets one warning per change from feasible to infeasible."""
    rig = Rig(overhead=0.01, mtbf_seconds=1e6, max_lost_work_seconds=20.0)
    for _ in range(5):
        rig.go(1000)
        rig.take(stall=2.0, latency=3.0)
    notices = [event for event in rig.sink.events if isinstance(event, Notice)]
    assert [notice.level for notice in notices] == ["WARNING"]
    assert notices[0].message == "RPO infeasible: max_lost_work 20 s would need every 17 steps"
    reasons = [event.why for event in rig.sink.events if isinstance(event, IntervalChanged)]
    assert reasons and "infeasible" not in reasons[0]


def test_failed_snapshots_are_retried_at_the_usual_interval() -> None:
    """A full disk costs a stall per interval, not a stall per step, and is no evidence of a fast persist."""
    rig = Rig(overhead=0.05, mtbf_seconds=60.0)
    steps = []
    for _ in range(20):
        rig.go(1000)
        steps.append(rig.step)
        rig.take(stall=0.7)
        rig.cadence.failed(rig.step)
    gaps = [after - before for before, after in pairwise(steps[5:])]
    assert set(gaps) <= {14, 15}
    assert rig.cadence.overhead_fraction <= 0.05 + 1e-9


def test_events_of_the_writer_are_understood() -> None:
    """A cadence can be one of the sinks instead of being called."""
    rig = Rig(overhead=0.05, mtbf_seconds=60.0)
    rig.go(100)
    rig.take(stall=0.7)
    rig.cadence.emit(SnapshotCommitted("id", rig.step, "local", 10, 10, 9.0, 8.0, 0.1, 0.0))
    rig.cadence.emit(SnapshotCommitted("id", rig.step, "remote", 10, 10, 99.0, 98.0, 0.1, 0.0))
    rig.go(3)
    assert rig.cadence.adaptive.decision is not None
    assert rig.cadence.adaptive.decision.costs.latency_seconds == 9.0
    assert rig.cadence.adaptive.decision.costs.busy_seconds == 8.0
    rig.go(100)
    rig.take()
    rig.cadence.emit(SnapshotFailed("id", rig.step, "local", "CKPT301", "full"))
    rig.cadence.emit(Notice("INFO", "ignored"))
    assert rig.cadence.ended(rig.step) is None or rig.go() is None
