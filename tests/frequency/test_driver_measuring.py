"""The cadence: what counts as a step, a stall and overhead."""

from __future__ import annotations

import json

import pytest

from tests.frequency.rig import Rig


def test_the_first_boundary_only_starts_the_clock() -> None:
    """Without `start`, the time before the first boundary belongs to no step."""
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
