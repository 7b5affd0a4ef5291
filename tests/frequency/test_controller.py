"""The adaptive policy: bounds, clip, hysteresis, explanation, and its laws for any input."""

import dataclasses
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt_engine.frequency.policy import (
    MAX_INTERVAL_STEPS,
    AdaptivePolicy,
    Bounds,
    Costs,
    Decision,
    FarCosts,
    FrequencySettings,
    MemoryRhythm,
    settle,
)
from ckpt_engine.observe.events import MACHINE, PROCESS, SITE

HOUR = 3600.0
COSTS = Costs(step_seconds=1.0, stall_seconds=0.7, latency_seconds=14.0, busy_seconds=14.0, written_bytes=1e6)


def decide(costs: Costs = COSTS, rate: float = 1 / 60, **settings: object) -> Decision:
    given_settings = FrequencySettings(**{"overhead": 0.05} | settings)  # type: ignore[arg-type]
    return AdaptivePolicy(given_settings).decide(costs, {MACHINE: rate})


def test_budget_bound() -> None:
    """A stall of 0.7 steps against 5 % needs 14 steps, a slowdown of the same size twice that."""
    assert decide().bounds.budget == 14
    assert decide(dataclasses.replace(COSTS, slowdown_seconds=0.7)).bounds.budget == 28


def test_backpressure_bound_counts_slots_but_not_below_what_the_writer_can_do() -> None:
    """Two slots halve the bound on latency; a writer that is busy all the time keeps it."""
    assert decide().bounds.backpressure == 14
    queued = dataclasses.replace(COSTS, latency_seconds=28.0, busy_seconds=10.0)
    assert decide(queued, slots=2).bounds.backpressure == 14
    assert decide(dataclasses.replace(queued, busy_seconds=20.0), slots=2).bounds.backpressure == 20


def test_bandwidth_bound() -> None:
    """1 MB at 40 kB/s is one snapshot per 25 steps of a second."""
    decision = decide(bandwidth_bytes_per_second=40e3)
    assert decision.bounds.io == 25
    assert decision.interval_steps == 25
    assert decision.bounds.binding == "bandwidth"


def test_failure_rate_decides_between_the_bounds() -> None:
    """With rare failures the optimum is far above what the budget allows, and is taken."""
    decision = decide(rate=1 / (6 * HOUR))
    assert decision.interval_steps == decision.bounds.failure == 173
    assert decision.bounds.binding == "failure rate"


def test_rpo_lowers_the_interval_and_persist_time_counts() -> None:
    """A maximum loss of 60 s with a persist of 14 s allows 46 steps."""
    decision = decide(rate=1 / (6 * HOUR), max_lost_work_seconds=60.0)
    assert decision.interval_steps == decision.bounds.rpo == 46
    assert decision.bounds.binding == "max_lost_work"
    assert decision.bounds.feasible


@pytest.mark.parametrize(("rpo", "needed"), [(20.0, "every 6 steps"), (10.0, "a faster persist")])
def test_infeasible_rpo_keeps_the_lower_bound_and_says_so(rpo: float, needed: str) -> None:
    """What budget and back-pressure forbid is not done; the line says what would have been needed."""
    decision = decide(max_lost_work_seconds=rpo)
    assert decision.interval_steps == 14
    assert not decision.bounds.feasible
    assert f"RPO infeasible: max_lost_work {rpo:.0f} s would need {needed}" in decision.why


def test_a_limit_of_a_class_holds_for_the_level_it_goes_back_to() -> None:
    """Lost trainers go back to memory, which is taken as often as their limit needs; machines to what is durable."""
    settings = FrequencySettings(
        overhead=0.5, memory=MemoryRhythm(), max_lost_work_seconds={PROCESS: 20.0, MACHINE: 300.0}
    )
    rates = {PROCESS: 1e-6, MACHINE: 1e-6, SITE: 1e-7}
    decision = AdaptivePolicy(settings).decide(COSTS, rates, memory_seconds=0.1)
    assert (decision.memory_seconds, decision.memory_limit_seconds) == (pytest.approx(20.0), 20.0)
    assert (decision.interval_steps, decision.limit_seconds) == (286, 300.0)


def test_what_may_be_lost_far_away_bounds_what_is_near() -> None:
    """A further tier gets copies of what is durable, so that its limit needs these as often."""
    settings = FrequencySettings(overhead=0.5, max_lost_work_seconds={SITE: 100.0})
    far = FarCosts(sent_bytes=1e6, copy_seconds=10.0, latency_seconds=24.0)
    decision = AdaptivePolicy(settings).decide(COSTS, {MACHINE: 1e-7, SITE: 1e-7}, far=far)
    assert decision.interval_steps == 76
    assert decision.far_seconds == pytest.approx(76.0)


def test_explanation_names_measurements_and_the_binding_constraint() -> None:
    """The line has the form of the design document and ends with what set the interval."""
    costs = Costs(step_seconds=0.7, stall_seconds=0.21, slowdown_seconds=0.05, latency_seconds=9.0)
    why = decide(costs, 1 / (6 * HOUR), overhead=0.01).why
    assert why == (
        "every 151 steps: stall 210 ms + slowdown 50 ms against budget 1 %; persist 9 s; failure rate 1/6 h; "
        "set by failure rate"
    )
    assert decide(costs, 1 / 60, overhead=0.01).why.endswith("set by budget; 1 % more budget = 9.8 % more useful work")
    assert decide(costs, 1 / 60, overhead=0.01).why.startswith("every 38 steps: ")
    assert decide(Costs(step_seconds=10.0), 1 / 60).why.startswith("every step: ")


def test_binding_names_each_constraint() -> None:
    """Each bound is named when it is the one that decides."""
    cases = {
        "budget": Bounds(30, 20, 10, 5, 99),
        "back-pressure": Bounds(10, 30, 20, 5, 99),
        "bandwidth": Bounds(10, 20, 30, 5, 99),
        "failure rate": Bounds(10, 20, 30, 50, 99),
        "max_lost_work": Bounds(10, 20, 30, 200, 99),
        "step time": Bounds(0, 0, 0, 0, 99),
    }
    assert {name: bounds.binding for name, bounds in cases.items()} == {name: name for name in cases}
    assert Bounds(30, 20, 10, 500, 9).binding == "budget"  # infeasible: the lower bound decides


# ------------------------------------------------------------------ hysteresis


def settled(current: int | None, target: int, *, held_back: bool = False, rpo: int = 10**9) -> int:
    wanted = Decision(target, Bounds(target, 0, 0, 0, rpo), COSTS, FrequencySettings(), 0.0)
    return settle(current, wanted, held_back=held_back).interval_steps


def test_the_first_decision_is_taken_as_it_is() -> None:
    """There is nothing to compare with."""
    assert settled(None, 123) == 123


def test_changes_within_ten_percent_are_not_applied() -> None:
    """100 stays for anything from 90 to 110."""
    assert [settled(100, target) for target in (90, 100, 110)] == [100, 100, 100]


def test_any_other_change_happens_at_once() -> None:
    """What is measured is robust: a target that has moved is one that the world has moved."""
    assert [settled(100, 111), settled(14, 1000), settled(90, 10)] == [111, 1000, 10]


def test_raising_by_a_step_happens_when_back_pressure_was_met() -> None:
    """An interval just below the persist time would be overrun at each snapshot."""
    assert settled(14, 15) == 14
    assert settled(14, 15, held_back=True) == 15


def test_a_feasible_rpo_is_met_at_once() -> None:
    """Steps that became slower must not break the promise for as long as hysteresis takes."""
    assert settled(90, 40, rpo=40) == 40


# ------------------------------------------------------------------ laws

wild = st.one_of(
    st.floats(min_value=0.0, max_value=1e12),
    st.sampled_from([0.0, math.inf, math.nan, -1.0, 5e-324, 1e-300, 1e300, 1.7e308]),
)
positive = st.one_of(st.floats(min_value=1e-6, max_value=1e12), st.sampled_from([5e-324, 1.7e308]))
budgets = st.floats(min_value=1e-9, max_value=1.0)
all_costs = st.builds(Costs, wild, wild, wild, wild, wild, wild, wild)
all_settings = st.builds(
    FrequencySettings,
    overhead=budgets,
    max_lost_work_seconds=st.none() | positive,
    slots=st.integers(1, 16),
    bandwidth_bytes_per_second=st.none() | positive,
)


@given(all_costs, all_settings, wild)
@example(Costs(0.0, written_bytes=1.0, worst_latency_seconds=1.0), FrequencySettings(max_lost_work_seconds=1.0), 0.0)
def test_any_measurement_gives_an_interval_within_the_clip(
    costs: Costs, settings: FrequencySettings, rate: float
) -> None:
    """Zero, infinite, negative and NaN measurements neither raise nor leave the bounds, and are explained."""
    decision = AdaptivePolicy(settings).decide(costs, {MACHINE: rate})
    bounds = decision.bounds
    assert 1 <= decision.interval_steps <= MAX_INTERVAL_STEPS
    assert bounds.lower <= decision.interval_steps
    assert decision.interval_steps <= max(bounds.rpo, bounds.lower)
    assert bounds.feasible or decision.interval_steps == bounds.lower
    assert all(0 <= value <= MAX_INTERVAL_STEPS for value in dataclasses.astuple(bounds))
    assert "nan" not in decision.why
    for current in (1, 10, 10**6):
        assert settle(current, decision, held_back=True).interval_steps >= 1


sane = st.floats(min_value=0.0, max_value=1e6)
steps = st.floats(min_value=1e-3, max_value=1e3)
rates = st.floats(min_value=1e-9, max_value=1.0)


@given(steps, sane, sane, sane, all_settings, rates, st.floats(1.0, 100.0), st.floats(0.0, 10.0))
def test_dearer_snapshots_never_come_more_often(
    step: float,
    stall: float,
    slowdown: float,
    latency: float,
    settings: FrequencySettings,
    rate: float,
    factor: float,
    extra: float,
) -> None:
    """The interval is monotone in the cost of a snapshot."""
    policy = AdaptivePolicy(settings)
    cheap = Costs(step, stall, slowdown, latency, latency, 1e9)
    dear = dataclasses.replace(cheap, stall_seconds=stall * factor + extra)
    assert policy.decide(cheap, {MACHINE: rate}).interval_steps <= policy.decide(dear, {MACHINE: rate}).interval_steps


@given(all_costs, all_settings, rates, st.floats(1.0, 100.0))
def test_a_larger_budget_never_makes_snapshots_rarer(
    costs: Costs, settings: FrequencySettings, rate: float, factor: float
) -> None:
    """The interval is monotone in the budget."""
    assert settings.overhead is not None
    richer = dataclasses.replace(settings, overhead=min(1.0, settings.overhead * factor))
    less, more = (
        AdaptivePolicy(settings).decide(costs, {MACHINE: rate}),
        AdaptivePolicy(richer).decide(costs, {MACHINE: rate}),
    )
    assert more.interval_steps <= less.interval_steps


@given(steps, sane, all_settings, rates, st.floats(1.0, 100.0))
def test_more_failures_never_make_snapshots_rarer(
    step: float, stall: float, settings: FrequencySettings, rate: float, factor: float
) -> None:
    """The interval is monotone in the failure rate."""
    policy, costs = AdaptivePolicy(settings), Costs(step, stall)
    assert (
        policy.decide(costs, {MACHINE: rate * factor}).interval_steps
        <= policy.decide(costs, {MACHINE: rate}).interval_steps
    )


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.booleans())
def test_settling_stays_or_goes_to_the_target(current: int, target: int, held_back: bool) -> None:
    """The interval is the old one or the target, and never one between."""
    assert settled(current, target, held_back=held_back) in (current, target)
