"""The cadence: what it measures, when it fires, what it remembers."""

import json
from itertools import pairwise

import pytest

from ckpt_engine.frequency.driver import Cadence
from ckpt_engine.frequency.settings import FrequencySettings
from ckpt_engine.observe.events import IntervalChanged, Notice, SnapshotCommitted, SnapshotFailed, SnapshotSkipped
from tests.frequency.cadence_simulator import FakeClock, Recorder


class Rig:
    """A cadence, its clock and its events, with steps of one second."""

    def __init__(self, start: int | None = 0, **settings: object) -> None:
        self.clock, self.sink = FakeClock(), Recorder()
        self.cadence = Cadence(FrequencySettings(**settings), self.clock, self.sink)  # type: ignore[arg-type]
        self.step = 0
        if start is not None:
            self.step = start
            self.cadence.start(start)

    def go(self, steps: int = 1, seconds: float = 1.0) -> str | None:
        """Trains until the first due snapshot, at most `steps` steps."""
        for _ in range(steps):
            self.step += 1
            self.clock.now += seconds
            if (reason := self.cadence.boundary(self.step)) is not None:
                return reason
        return None

    def take(self, stall: float = 0.0, latency: float | None = None) -> None:
        """Takes a snapshot now; with a latency it is durable at once (it is learned from at the next boundary)."""
        self.clock.now += stall
        self.cadence.taken(self.step, stall)
        if latency is not None:
            self.cadence.committed(self.step, latency, 10**9)


# ------------------------------------------------------------------ fixed triggers


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
    assert rig.cadence.why == "every 10 steps, at the end: fixed"


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


# ------------------------------------------------------------------ busy slots


def test_a_skipped_snapshot_stays_due_with_its_reason_and_is_told_once() -> None:
    """It is offered at each boundary until it is taken, and one event says so."""
    rig = Rig(overhead=None, every_n_steps=5)
    assert rig.go(5) == "every_n_steps"
    for _ in range(7):  # passes the next multiple: still one snapshot
        rig.cadence.skipped(rig.step, "busy")
        assert rig.go() == "every_n_steps"
    rig.take()
    assert rig.go(2) is None
    assert [event for event in rig.sink.events if isinstance(event, SnapshotSkipped)] == [SnapshotSkipped(5, "busy")]


def test_a_second_postponed_snapshot_is_told_again() -> None:
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


# ------------------------------------------------------------------ measuring


def test_the_first_boundary_only_starts_the_clock() -> None:
    """Without `start`, the time before the first boundary is nobody's step."""
    rig = Rig(start=None, overhead=None, every_n_steps=1)
    rig.clock.now += 500.0
    assert rig.cadence.boundary(0) is None
    assert rig.go() == "every_n_steps"


def test_excluded_time_and_stall_are_not_step_time() -> None:
    """The clean step time is that of training alone."""
    rig = Rig(overhead=0.05)
    for _ in range(20):
        rig.clock.now += 10.0
        rig.cadence.exclude(10.0)
        rig.go()
    assert rig.cadence.state()["step_seconds"] == pytest.approx(1.0)


def test_the_first_steps_are_not_measured() -> None:
    """Compilation and cold caches are not what a step takes."""
    rig = Rig(overhead=0.05)
    rig.go(2, seconds=60.0)
    rig.go(6)
    assert rig.cadence.state()["step_seconds"] == pytest.approx(1.0)


def test_repeated_and_jumping_step_numbers() -> None:
    """Micro-batches of one step are one step; a jump is so many equal ones; going back starts again."""
    rig = Rig(overhead=0.05)
    rig.go(2)
    for _ in range(10):  # four micro-batches of a quarter second each
        rig.step += 1
        for quarter in range(4):
            rig.clock.now += 0.25
            rig.cadence.boundary(rig.step - 1 if quarter < 3 else rig.step)
    assert rig.cadence.state()["step_seconds"] == pytest.approx(1.0)
    rig.step += 9
    rig.clock.now += 9.0
    rig.go()
    assert rig.cadence.state()["step_seconds"] == pytest.approx(1.0)
    rig.step = 0
    rig.clock.now += 777.0
    assert rig.cadence.boundary(0) is None
    rig.go(10)
    assert rig.cadence.state()["step_seconds"] == pytest.approx(1.0)


def test_overhead_is_stalls_fences_waits_and_slowdown_over_clean_time() -> None:
    """100 clean seconds with 1 + 2 + 3 of pauses and 4 of slowdown are 10 %."""
    rig = Rig(overhead=None, every_n_steps=1000)
    rig.go(92)
    rig.clock.now += 4.0
    rig.cadence.taken(rig.step, 1.0, 3.0)
    rig.clock.now += 2.0
    rig.cadence.fence(2.0)
    rig.go(8, seconds=1.5)
    rig.cadence.committed(92, 12.0, 10**9)
    rig.go(0)
    rig.step += 1
    rig.clock.now += 1.0
    rig.cadence.boundary(rig.step)
    assert rig.cadence.overhead_fraction == pytest.approx(10.0 / 101.0)


def test_excluding_more_than_has_passed_gives_a_step_of_no_time() -> None:
    """Overlapping reports of an adapter cannot make training time negative."""
    rig = Rig(overhead=0.05)
    for _ in range(20):
        rig.cadence.exclude(5.0)
        rig.go()
    assert rig.cadence.state()["step_seconds"] == 0.0


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -3.0])
def test_nonsense_measurements_do_no_harm(nonsense: float) -> None:
    """NaN, infinite and negative durations are taken for none."""
    rig = Rig(overhead=0.05, mtbf_seconds=60.0)
    for _ in range(200):
        rig.cadence.exclude(nonsense)
        if rig.go():
            rig.cadence.taken(rig.step, nonsense, nonsense)
            rig.cadence.fence(nonsense)
            rig.cadence.committed(rig.step, nonsense, nonsense, nonsense)
    assert rig.cadence.overhead_fraction == 0.0
    assert rig.cadence.interval_steps is not None
    json.dumps(rig.cadence.state(), allow_nan=False)


def test_a_clock_that_stands_still_does_no_harm() -> None:
    """Zero step times mean no division by zero."""
    rig = Rig(overhead=0.05, every_n_steps=7)
    for _ in range(100):
        if rig.go(seconds=0.0):
            rig.take(latency=0.0)
    assert rig.cadence.overhead_fraction == 0.0


# ------------------------------------------------------------------ the adaptive trigger


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
    assert "stall 0.7 s + slowdown 0 s against budget 5 %" in rig.cadence.why


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
    """The step in which the persist ended was slowed down too."""
    rig = Rig(overhead=0.05, mtbf_seconds=60.0)
    rig.go(100)
    rig.take(stall=0.0)
    rig.cadence.committed(7, 0.5, 10**9)
    rig.go(seconds=2.0)
    assert rig.cadence.decision is not None
    assert rig.cadence.decision.costs.slowdown_seconds == pytest.approx(1.0)


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
    assert rig.cadence.overhead_fraction < 0.05
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
    """The user is told, once per change from feasible to infeasible."""
    rig = Rig(overhead=0.01, mtbf_seconds=1e6, max_lost_work_seconds=20.0)
    for _ in range(5):
        rig.go(1000)
        rig.take(stall=2.0, latency=3.0)
    notices = [event for event in rig.sink.events if isinstance(event, Notice)]
    assert [notice.level for notice in notices] == ["WARNING"]
    assert "RPO infeasible: max_lost_work 20 s would need every 17 steps" in notices[0].message


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
    assert rig.cadence.decision is not None
    assert rig.cadence.decision.costs.latency_seconds == 9.0
    assert rig.cadence.decision.costs.busy_seconds == 8.0
    rig.go(100)
    rig.take()
    rig.cadence.emit(SnapshotFailed("id", rig.step, "local", "CKPT301", "full"))
    rig.cadence.emit(Notice("INFO", "ignored"))
    assert rig.cadence.ended(rig.step) is None or rig.go() is None


# ------------------------------------------------------------------ durability


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
    rig.cadence.committed(999, 3.0, 10**9)  # a snapshot the cadence was not told about
    assert rig.cadence.age_of_last_durable() == pytest.approx(3.0)


def test_state_survives_json_and_a_restart_is_a_failure() -> None:
    """The next run starts from the learned interval and a higher failure rate."""
    first = Rig(overhead=0.05)
    for _ in range(10):
        first.go(10000)
        first.take(stall=0.7, latency=9.0)
    first.go(3)
    state = json.loads(json.dumps(first.cadence.state(), allow_nan=False))
    assert first.cadence.decision is not None
    second = Rig(start=None, overhead=0.05)
    second.cadence.restore(state)
    second.cadence.start(500)
    second.step = 500
    reason = second.go(10000)
    assert second.cadence.decision is not None
    assert reason == "interval"
    assert second.cadence.decision.costs.stall_seconds == pytest.approx(0.7)
    assert second.cadence.decision.failures_per_second > first.cadence.decision.failures_per_second
    assert second.step - 500 == second.cadence.interval_steps


def test_a_clean_end_is_no_failure() -> None:
    """Continuing a finished run does not make it look unreliable."""
    first = Rig(overhead=0.05)
    first.go(5)
    state = first.cadence.state()
    crashed, finished = Rig(overhead=0.05), Rig(overhead=0.05)
    crashed.cadence.restore(state)
    finished.cadence.restore(state, failed=False)
    rate = {
        name: rig.cadence.state()["failures"]["events"] for name, rig in {"crash": crashed, "end": finished}.items()
    }
    assert rate["crash"] > rate["end"] == 1.0


def test_starting_again_keeps_what_an_earlier_run_learned() -> None:
    """Neither the time survived nor the restored step time is lost with a second `start`."""
    rig = Rig(overhead=0.05)
    rig.go(20)
    state = rig.cadence.state()
    other = Rig(start=None, overhead=0.05)
    other.cadence.restore(state, failed=False)
    before = other.cadence.state()
    assert before["step_seconds"] == pytest.approx(1.0)
    other.cadence.start(20)
    other.clock.now += 100.0
    other.cadence.start(20)
    after = other.cadence.state()
    assert after["step_seconds"] == before["step_seconds"]
    assert after["failures"]["exposure_seconds"] == pytest.approx(before["failures"]["exposure_seconds"] + 100.0)


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
def test_an_unreadable_state_is_told_and_ignored(state: object) -> None:
    """It only costs a little learning."""
    rig = Rig(overhead=0.05)
    rig.cadence.restore(state)  # type: ignore[arg-type]
    assert [type(event) for event in rig.sink.events] == [Notice]
    assert rig.go(100) == "interval"


def test_mtbf_given_by_the_user_is_used_as_it_is() -> None:
    """No learning where a duration was given."""
    rig = Rig(overhead=0.05, mtbf_seconds=3600.0)
    rig.go(100)
    rig.take(stall=0.7, latency=9.0)
    rig.go(3)
    assert "failure rate 1/60 min" in rig.cadence.why
