"""The plan for the time that is left: laws, and a writer that is simulated step by step to check its promises."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.observe.durability import PendingCommit, TierStanding
from ckpt_engine.preempt.stop_plan import MARGIN, StopChoice, StopFacts, plan_stop

MB, GB = 1e6, 1e9
NEAR, FAR = "file:///run", "s3://bucket/run"


def facts(**given: object) -> StopFacts:
    """A run at a boundary of step 100, 4 GB of state, one tier of 1 GB/s that has step 90, 30 s left."""
    usual = StopFacts(100, 30.0, 4 * GB, (TierStanding(NEAR, 1 * GB, 90),), stall_seconds=0.2)
    return dataclasses.replace(usual, **given)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- what it chooses


def test_a_snapshot_that_fits_is_taken() -> None:
    """0.2 s of stall and 4 GB at 1 GB/s, with a quarter to spare."""
    plan = plan_stop(facts())
    assert (plan.choice, plan.step, plan.lost_steps, plan.certain) == (StopChoice.SNAPSHOT, 100, 0, True)
    assert plan.seconds == pytest.approx(0.2 + 4 * MARGIN)
    assert plan.why == (
        "30 s left: a snapshot of step 100 will be durable on file:///run within 5.2 s "
        "(200 ms stall + 4 GB at 1 GB/s, a quarter to spare); no step is lost"
    )


def test_the_step_that_runs_is_waited_for() -> None:
    """At the end of that step there is one more step to save."""
    plan = plan_stop(facts(boundary_seconds=3.0))
    assert (plan.choice, plan.step, plan.lost_steps) == (StopChoice.SNAPSHOT, 101, 0)
    assert plan.seconds == pytest.approx(3.2 + 4 * MARGIN)
    assert "3 s to the end of the step" in plan.why


def test_what_is_in_flight_finishes_where_no_new_one_fits() -> None:
    """The line says what a new snapshot would have needed, and what is lost."""
    plan = plan_stop(facts(grace_seconds=5.0, in_flight=(PendingCommit(97, 3 * GB, 0.0),)))
    assert (plan.choice, plan.step, plan.lost_steps) == (StopChoice.FINISH, 97, 3)
    assert plan.why == (
        "5 s left: the snapshot of step 97 in flight will be durable on file:///run within 3.8 s; one of step 100 "
        "would need 8.8 s (200 ms stall + 3 GB in flight + 4 GB at 1 GB/s, a quarter to spare); 3 steps are lost"
    )


def test_the_newest_in_memory_is_flushed_where_no_new_one_fits() -> None:
    """The step that runs is too long, the copy in memory is complete."""
    plan = plan_stop(facts(grace_seconds=6.0, boundary_seconds=20.0, held_step=99))
    assert (plan.choice, plan.step, plan.lost_steps) == (StopChoice.FLUSH, 99, 1)


def test_a_new_one_waits_for_a_slot_and_for_the_writer() -> None:
    """With both slots full the first must be written before a copy can be taken."""
    queue = (PendingCommit(98, 4 * GB, 0.0), PendingCommit(99, 4 * GB, 0.0))
    plan = plan_stop(facts(in_flight=queue))
    assert plan.seconds == pytest.approx(12 * MARGIN)  # copying is hidden behind the second
    plan = plan_stop(facts(in_flight=queue, slots=1))
    assert plan.seconds == pytest.approx(8 * MARGIN + 0.2 + 4 * MARGIN)


def test_nothing_is_promised_where_nothing_fits() -> None:
    """Step 90 is durable already, and all after it is lost."""
    plan = plan_stop(facts(grace_seconds=1.0))
    assert (plan.choice, plan.step, plan.lost_steps) == (StopChoice.NOTHING, 90, 10)
    assert "the snapshot of step 90 is durable on file:///run already" in plan.why
    assert "10 steps are lost" in plan.why
    plan = plan_stop(facts(grace_seconds=1.0, tiers=(TierStanding(NEAR, 1 * GB),)))
    assert (plan.step, plan.lost_steps, plan.seconds) == (None, None, math.inf)
    assert "all work is lost" in plan.why


def test_without_a_measured_speed_a_snapshot_is_tried_and_nothing_promised() -> None:
    """The first snapshot of a run may be the one that is asked for."""
    plan = plan_stop(facts(tiers=(TierStanding(NEAR, None),)))
    assert (plan.choice, plan.certain) == (StopChoice.SNAPSHOT, False)
    assert "whose speed is not known yet" in plan.why


def test_a_step_that_is_durable_already_is_not_taken_again() -> None:
    """A stop right after a snapshot costs nothing."""
    plan = plan_stop(facts(tiers=(TierStanding(NEAR, 1 * GB, 100),)))
    assert (plan.choice, plan.step, plan.seconds) == (StopChoice.NOTHING, 100, 0.0)


@pytest.mark.parametrize(
    ("far", "step"),
    [
        (TierStanding(FAR, 400 * MB, 80), 100),  # 5.2 s + 12.5 s
        (TierStanding(FAR, 170 * MB, 80), 80),  # 29.4 s for the copy alone
        (TierStanding(FAR, None, 80), 80),
    ],
)
def test_each_further_tier_has_a_forecast_of_its_own(far: TierStanding, step: int) -> None:
    """The upload that fits, or what it has already."""
    plan = plan_stop(facts(tiers=(TierStanding(NEAR, 1 * GB, 90), far)))
    assert (plan.step, plan.tiers[1].step) == (100, step)
    assert (f"on {FAR} in" if step == 100 else f"{FAR} ends with step {step}") in plan.why


# ---------------------------------------------------------------------- laws

speeds = st.none() | st.floats(1e6, 4e9)
steps = st.integers(0, 100)


@st.composite
def runs(draw: st.DrawFn) -> StopFacts:
    """Any run that must stop at step 100 or in the step after it."""
    flying = sorted(draw(st.lists(steps, max_size=3, unique=True)))
    newest = draw(st.none() | st.integers(0, flying[0] if flying else 100))
    return StopFacts(
        step=100,
        grace_seconds=draw(st.floats(0, 300)),
        state_bytes=draw(st.floats(0, 1e11)),
        tiers=tuple(
            TierStanding(url, draw(speeds), near) for url, near in ((NEAR, newest), (FAR, draw(st.none() | steps)))
        ),
        boundary_seconds=draw(st.just(0.0) | st.floats(0, 400)),
        stall_seconds=draw(st.floats(0, 10)),
        in_flight=tuple(PendingCommit(step, draw(st.floats(0, 1e11)), 0.0) for step in flying),
        slots=draw(st.integers(1, 3)),
        held_step=draw(st.none() | st.integers(flying[-1] if flying else 0, 100)),
    )


def rank(step: int | None) -> int:
    return -1 if step is None else step


@given(runs())
def test_what_is_promised_fits(run: StopFacts) -> None:
    """In time, no step beyond the one that runs, and never older than what is durable already."""
    plan = plan_stop(run)
    assert plan.choice is StopChoice.NOTHING or plan.seconds <= run.grace_seconds
    assert rank(run.tiers[0].newest_step) <= rank(plan.step) <= run.step + (run.boundary_seconds > 0)
    assert plan.tiers[0].step == plan.step
    assert all(tier.seconds <= run.grace_seconds or math.isinf(tier.seconds) for tier in plan.tiers[1:])
    assert plan.lost_steps == (None if plan.step is None else max(0, run.step - plan.step))
    assert "\n" not in plan.why and plan.why.startswith(f"{plan.why.split(' left:')[0]} left:")


@given(runs(), st.floats(0, 300))
def test_more_time_never_saves_less(run: StopFacts, more: float) -> None:
    """A faster disk of the nearest tier does not save less either."""
    later = dataclasses.replace(run, grace_seconds=run.grace_seconds + more)
    assert rank(plan_stop(later).step) >= rank(plan_stop(run).step)
    near, far = run.tiers
    if near.bytes_per_second is not None:
        faster = dataclasses.replace(near, bytes_per_second=near.bytes_per_second * (1 + more))
        assert rank(plan_stop(dataclasses.replace(run, tiers=(faster, far))).step) >= rank(plan_stop(run).step)


@given(runs())
def test_no_newer_one_would_have_fitted(run: StopFacts) -> None:
    """Of all that could be done, a newer snapshot than the chosen one needs more than the grace."""
    plan = plan_stop(run)
    done = written(run, 1.0 / MARGIN)
    newer = {step: seconds for step, seconds in done.items() if step > rank(plan.step)}
    if plan.certain and run.tiers[0].bytes_per_second is not None:
        assert all(seconds > run.grace_seconds * (1 - 1e-9) for seconds in newer.values())


# ---------------------------------------------------------------------- against a simulated writer


def written(run: StopFacts, pace: float) -> dict[int, float]:
    """When each snapshot is durable, with a writer at `pace` times the measured speed: one event after the other."""
    near = run.tiers[0]
    speed = (near.bytes_per_second or math.inf) * pace
    now, ends, freed = 0.0, {}, []
    for one in run.in_flight:
        now += one.nbytes / speed
        ends[one.step] = now
        freed.append(now)
    if run.held_step is not None:
        ends.setdefault(run.held_step, now + run.state_bytes / speed)
    occupied = len(run.in_flight)
    slot = 0.0
    while occupied >= run.slots:
        slot = freed.pop(0)
        occupied -= 1
    taken = max(slot, run.boundary_seconds) + run.stall_seconds
    step = run.step + (run.boundary_seconds > 0)
    ends.setdefault(step, max(taken, now) + run.state_bytes / speed)
    return ends


@given(runs(), st.floats(1 / MARGIN, 3))
def test_a_promise_holds_for_a_writer_within_the_margin(run: StopFacts, pace: float) -> None:
    """Whatever is said to become durable does, if the writer is at most a quarter slower than measured."""
    plan = plan_stop(run)
    if plan.choice is not StopChoice.NOTHING and plan.certain:
        assert plan.step is not None
        assert written(run, pace)[plan.step] <= run.grace_seconds * (1 + 1e-9)


GRACES = (5.0, 30.0, 120.0)
TIER_SPEEDS = (50 * MB, 100 * MB, 200 * MB, 500 * MB, 1 * GB, 2 * GB)


@pytest.mark.parametrize("grace", GRACES)
@pytest.mark.parametrize("speed", TIER_SPEEDS)
@settings(max_examples=30)
@given(
    gigabytes=st.sampled_from([0.1, 0.5, 2, 8, 30, 100]),
    step_share=st.floats(0, 1.2),
    flying=st.none() | st.floats(0, 1),
    pace=st.floats(1 / MARGIN, 1.5),
)
def test_full_scale(
    grace: float, speed: float, gigabytes: float, step_share: float, flying: float | None, pace: float
) -> None:
    """Graces and speeds of real machines: the running step, or the one before it, is durable wherever that is possible.

    Possible: even a writer as slow as the margin allows manages it. Where it is not, the plan does not claim it.
    """
    run = facts(
        grace_seconds=grace,
        state_bytes=gigabytes * GB,
        tiers=(TierStanding(NEAR, speed, 90),),
        boundary_seconds=grace * step_share,
        stall_seconds=0.05 * gigabytes,
        in_flight=() if flying is None else (PendingCommit(99, flying * gigabytes * GB, 0.0),),
    )
    plan = plan_stop(run)
    truth = written(run, pace)
    reached = 100 + (step_share > 0)
    if written(run, 1 / MARGIN)[reached] <= grace * (1 - 1e-9):
        assert plan.step == reached
    assert plan.step is not None
    if plan.step != 90:
        assert truth[plan.step] <= grace * (1 + 1e-9)
    else:
        assert "steps are lost" in plan.why
