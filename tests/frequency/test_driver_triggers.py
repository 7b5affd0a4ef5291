"""The cadence: when its fixed triggers fire, and what becomes of a snapshot that finds no slot."""

from __future__ import annotations

from ckpt_engine.frequency.policy import FrequencySettings
from ckpt_engine.observe.events import SnapshotSkipped
from tests.frequency.rig import Rig


def test_every_n_steps_fires_on_its_grid_whatever_snapshots_cost() -> None:
    """Fixed triggers are never adapted, not even to a stall of many steps."""
    rig = Rig(overhead=None, every_n_steps=10)
    fired = []
    for _ in range(50):
        if rig.go():
            fired.append(rig.step)
            rig.take(stall=100.0, latency=100.0)
    assert fired == [10, 20, 30, 40, 50]
    assert rig.cadence.interval_steps == 10
    assert rig.cadence.why == "every 10 steps and at the end"


def test_every_step_is_possible() -> None:
    """`every_n_steps=1` fires at each boundary, from the first step on."""
    rig = Rig(overhead=None, every_n_steps=1)
    for _ in range(5):
        assert rig.go() == "every_n_steps"
        rig.take()


def test_every_seconds_counts_validation_time_too() -> None:
    """Wall-clock time is at risk whether training or validation used it."""
    rig = Rig(overhead=None, every_seconds=10.0)
    assert rig.go(9) is None
    rig.clock.now += 30.0
    rig.cadence.exclude(30.0)
    assert rig.go() == "every_seconds"


def test_validation_is_due_at_the_next_boundary_also_of_the_same_step() -> None:
    """The snapshot after a validation does not wait for another step."""
    rig = Rig(overhead=None, on_validation_end=True)
    rig.go(3)
    rig.cadence.validation_ended()
    assert rig.cadence.boundary(3) == "validation"
    rig.take()
    assert rig.cadence.boundary(3) is None
    assert rig.go() is None


def test_fixed_and_adaptive_triggers_coexist() -> None:
    """The fixed one keeps its grid, the adaptive one adds snapshots between; each has its own reason."""
    rig = Rig(overhead=0.05, mtbf_seconds=60.0, every_n_steps=100, max_lost_work_seconds=1e6)
    reasons: dict[int, str] = {}
    for _ in range(1000):
        if reason := rig.go():
            reasons[rig.step] = reason
            rig.take(stall=1.0, latency=2.0)
    fixed = [step for step, reason in reasons.items() if reason == "every_n_steps"]
    assert fixed == list(range(100, 1001, 100))
    assert list(reasons.values()).count("interval") > 20


def test_the_end_is_due_only_with_unsaved_work() -> None:
    """Work that is in flight or durable is safe, failed work is not."""
    rig = Rig(overhead=None)
    assert rig.cadence.ended(0) is None
    rig.go(5)
    assert rig.cadence.ended(5) == "end"
    rig.take()
    assert rig.cadence.ended(5) is None
    rig.cadence.failed(5)
    rig.go()
    assert rig.cadence.ended(5) == "end"
    rig.take(latency=1.0)
    rig.go()
    assert rig.cadence.ended(6) is None


def test_a_pending_snapshot_is_due_at_the_end_without_an_end_trigger() -> None:
    """What was due and met a busy slot is not lost because training ended."""
    rig = Rig(overhead=None, every_n_steps=5, at_end=False)
    assert rig.go(5) == "every_n_steps"
    rig.cadence.skipped(5, "busy")
    assert rig.cadence.ended(5) == "every_n_steps"


def test_a_skipped_snapshot_stays_due_with_its_reason_and_is_reported_once() -> None:
    """It is offered at each boundary until it is taken, and one event says so."""
    rig = Rig(overhead=None, every_n_steps=5)
    assert rig.go(5) == "every_n_steps"
    for _ in range(7):  # passes the next multiple: still one snapshot
        rig.cadence.skipped(rig.step, "busy")
        assert rig.go() == "every_n_steps"
    assert rig.cadence.overtaken == 1
    rig.take()
    assert rig.go(2) is None
    assert [event for event in rig.sink.events if isinstance(event, SnapshotSkipped)] == [SnapshotSkipped(5, "busy")]
    rig.go()
    for _ in range(6):  # passes the next multiple again
        rig.cadence.skipped(rig.step, "accumulating")
        rig.go()
    assert rig.cadence.overtaken == 1, "the writer had time"


def test_a_second_postponed_snapshot_is_reported_again() -> None:
    """Once per due snapshot, not once per run."""
    rig = Rig(overhead=None, every_n_steps=5)
    for _ in range(2):
        rig.go(10)
        rig.cadence.skipped(rig.step, "busy")
        rig.take()
    assert len(rig.sink.events) == 2


def test_an_error_is_not_retried_at_every_step() -> None:
    """Trying costs a stall: after an error the snapshot is offered again ten seconds later, still with its reason."""
    rig = Rig(overhead=None, every_n_steps=5)
    assert rig.go(5) == "every_n_steps"
    rig.cadence.skipped(5, "error")
    assert rig.go(9) is None
    assert rig.go() == "every_n_steps"
    rig.cadence.skipped(15, "error")
    rig.go(2)
    rig.take()  # somebody else's save worked: nothing is pending any more
    assert rig.go(2) is None
    assert rig.go() == "every_n_steps"


def test_meeting_a_busy_slot_raises_the_interval_even_by_one_step() -> None:
    """Skipping as well as waiting shows that the interval is just too short."""
    for busy in (True, False):
        rig = Rig(overhead=0.05, mtbf_seconds=60.0)
        for latency in (14.0, 14.5, 14.5):
            rig.go(100)
            if busy:
                rig.cadence.skipped(rig.step, "busy")
            rig.take(stall=0.5, latency=latency)
        rig.go(2)
        assert rig.cadence.interval_steps == (15 if busy else 14)


def test_waiting_for_a_slot_raises_the_interval_even_by_one_step() -> None:
    """The adapter that waits instead of skipping is treated alike."""
    rig = Rig(overhead=0.05, mtbf_seconds=60.0)
    for latency, wait in ((14.0, 0.0), (14.5, 0.0), (14.5, 0.5)):
        rig.go(100)
        rig.clock.now += wait
        rig.cadence.taken(rig.step, 0.0, wait)
        rig.cadence.committed(rig.step, latency, 10**9)
    rig.go(2)
    assert rig.cadence.interval_steps == 15


def test_other_settings_hold_from_the_next_boundary_on() -> None:
    """A denser grid fires on its own steps; what was due under the old settings is not due any more."""
    rig = Rig(overhead=None, every_n_steps=10)
    assert rig.go(10) == "every_n_steps"
    rig.cadence.retune(FrequencySettings(overhead=None, every_n_steps=4))
    assert rig.go(1) is None
    assert rig.go(10) == "every_n_steps" and rig.step == 12
    rig.take()
    rig.cadence.retune(FrequencySettings(overhead=None, every_seconds=5.0))
    assert rig.go(10) == "every_seconds" and rig.step == 17


def test_another_budget_is_applied_to_what_was_measured() -> None:
    """Nothing is learned again: ten times the budget, about a tenth of the interval."""
    rig = Rig(overhead=0.001, mtbf_seconds=200.0)
    for _ in range(3):
        rig.go(5000)
        rig.take(stall=0.1, latency=0.5)
    rig.go(1)
    before = rig.cadence.interval_steps
    assert before is not None and before > 50
    rig.cadence.retune(FrequencySettings(overhead=0.01, mtbf_seconds=200.0))
    rig.go(1)
    after = rig.cadence.interval_steps
    assert after is not None and after < before / 5
