"""The intervals of all levels together: their laws, and a search over a grid that finds nothing better."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.frequency.intervals import SnapshotLevel, best_intervals, optimal
from ckpt_engine.observe.events import MACHINE, PROCESS, SITE

IN_MEMORY, NEAR, FAR = frozenset({PROCESS}), frozenset({PROCESS, MACHINE}), frozenset({PROCESS, MACHINE, SITE})
HOUR = 3600.0
BUDGETS = st.floats(1e-4, 0.2)


@st.composite
def ladders(draw: st.DrawFn) -> list[SnapshotLevel]:
    """One to three levels; what comes farther costs more and takes longer."""
    levels, cost, price, latency = [], 0.0, 0.0, 0.0
    for survives in (IN_MEMORY, NEAR, FAR)[draw(st.integers(0, 2)) :]:
        cost, price = cost + draw(st.floats(1e-3, 5.0)), price + draw(st.floats(0.0, 1.0))
        latency += draw(st.floats(0.0, 100.0))
        restore, least = draw(st.floats(0.0, 100.0)), draw(st.floats(1e-2, 300.0))
        levels.append(SnapshotLevel(survives, cost, price, latency, restore, least))
    return levels


RATES = st.fixed_dictionaries({one: st.floats(1e-8, 1e-4) for one in (PROCESS, MACHINE, SITE)})


def waste(levels: Sequence[SnapshotLevel], rates: Mapping[str, float], seconds: Sequence[float]) -> float:
    """What the objective says of these intervals, written once more: infinite ones take no snapshots of their own."""
    total = cost = price = 0.0
    for level, every in zip(levels, seconds, strict=True):
        if every < math.inf:
            own, worth = max(level.cost_seconds - cost, 0.01 * cost), max(level.price_seconds - price, 0.0)
            total += (own + worth) / every
            cost, price = cost + own, price + worth
    for one, rate in rates.items():
        able = [n for n, level in enumerate(levels) if one in level.survives] or [len(levels) - 1]
        total += rate * min(
            min(seconds[n:]) / 2.0 + levels[n].latency_seconds + levels[n].restore_seconds for n in able
        )
    return total


def spent(levels: Sequence[SnapshotLevel], seconds: Sequence[float]) -> float:
    """The share of training time that snapshots take."""
    return waste([replace(level, price_seconds=0.0) for level in levels], {}, seconds)


@pytest.mark.long
@settings(max_examples=12, deadline=None)
@given(ladders(), RATES, BUDGETS)
def test_a_grid_of_all_intervals_has_nothing_better(
    levels: list[SnapshotLevel], rates: dict[str, float], budget: float
) -> None:
    """Within the first order, which is what the objective is: the exact optimum for one level is 0.1 % away at most."""
    found = best_intervals(levels, rates, budget)
    assert found.waste == pytest.approx(waste(levels, rates, found.seconds), rel=1e-9)
    grid = [10.0 ** (power / 8) for power in range(-8, 60)]
    around = [[every * factor for factor in (0.8, 0.95, 1.05, 1.25)] for every in found.seconds]
    axes = [
        [max(level.least_seconds, every) for every in (*grid[::2], *near) if every < math.inf] + [math.inf]
        for level, near in zip(levels, around, strict=True)
    ]
    for seconds in itertools.product(*axes):
        finite = [every for every in seconds if every < math.inf]
        if finite == sorted(finite) and spent(levels, seconds) <= budget:
            assert found.waste <= waste(levels, rates, seconds) * 1.001


@given(ladders(), RATES, BUDGETS)
def test_the_budget_and_all_bounds_are_kept(
    levels: list[SnapshotLevel], rates: dict[str, float], budget: float
) -> None:
    """Back-pressure too; and an interval is never shorter than that of a nearer level."""
    found = best_intervals(levels, rates, budget)
    assert spent(levels, found.seconds) <= budget * (1 + 1e-6)
    assert all(every >= level.least_seconds for every, level in zip(found.seconds, levels, strict=True))
    finite = [every for every in found.seconds if every < math.inf]
    assert finite == sorted(finite)


@given(ladders(), RATES, BUDGETS, st.floats(1.1, 20.0))
def test_a_larger_budget_never_wastes_more(
    levels: list[SnapshotLevel], rates: dict[str, float], budget: float, factor: float
) -> None:
    """The gain is at most what the multiplier says, which is the worth of budget at the margin."""
    less, more = best_intervals(levels, rates, budget), best_intervals(levels, rates, factor * budget)
    gained = less.waste - more.waste
    assert -1e-4 * less.waste <= gained <= less.budget_worth * (factor - 1.0) * budget + 1e-3 * less.waste
    if less.budget_worth == 0.0:
        assert more.waste == pytest.approx(less.waste, rel=1e-3)


@given(ladders(), RATES, BUDGETS, st.floats(1.0, 100.0))
def test_more_failures_never_waste_less(
    levels: list[SnapshotLevel], rates: dict[str, float], budget: float, factor: float
) -> None:
    """That is so for failures of each class."""
    before = best_intervals(levels, rates, budget).waste
    for one in rates:
        assert best_intervals(levels, rates | {one: factor * rates[one]}, budget).waste >= before * (1 - 1e-3)


@given(ladders(), RATES, BUDGETS, st.floats(0.01, 100.0))
def test_units_do_not_matter(levels: list[SnapshotLevel], rates: dict[str, float], budget: float, scale: float) -> None:
    """Milliseconds instead of seconds, or rates per hour."""
    scaled = [
        SnapshotLevel(
            level.survives,
            *(
                scale * value
                for value in (
                    level.cost_seconds,
                    level.price_seconds,
                    level.latency_seconds,
                    level.restore_seconds,
                    level.least_seconds,
                )
            ),
        )
        for level in levels
    ]
    first = best_intervals(levels, rates, budget)
    second = best_intervals(scaled, {one: rate / scale for one, rate in rates.items()}, budget)
    assert second.waste == pytest.approx(first.waste, rel=1e-6)


LIMITS = st.dictionaries(st.sampled_from([PROCESS, MACHINE, SITE]), st.floats(1.0, 1e4))


@given(ladders(), RATES, BUDGETS, LIMITS)
def test_a_limit_on_lost_work_is_kept_or_named(
    levels: list[SnapshotLevel], rates: dict[str, float], budget: float, limits: dict[str, float]
) -> None:
    """Per class; and the budget is kept whatever is asked for."""
    found = best_intervals(levels, rates, budget, limits)
    assert spent(levels, found.seconds) <= budget * (1 + 1e-6)
    for one, limit in limits.items():
        able = [n for n, level in enumerate(levels) if one in level.survives] or [len(levels) - 1]
        worst = min(min(found.seconds[n:]) + levels[n].latency_seconds for n in able)
        assert one in found.broken or worst <= limit * (1 + 1e-6)
    if found.broken and not any(level.least_seconds + level.latency_seconds > 1.0 for level in levels):
        assert spent(levels, found.seconds) == pytest.approx(budget)  # it gave all it had


@given(ladders(), RATES, LIMITS)
def test_a_limit_that_can_be_kept_is_kept(
    levels: list[SnapshotLevel], rates: dict[str, float], limits: dict[str, float]
) -> None:
    """Where there is budget enough: only a level that is too slow, or becomes durable too late, breaks it."""
    found = best_intervals(levels, rates, 1e9, limits)
    for one, limit in limits.items():
        able = [n for n, level in enumerate(levels) if one in level.survives] or [len(levels) - 1]
        soonest = [max(level.least_seconds for level in levels[: n + 1]) + levels[n].latency_seconds for n in able]
        assert one not in found.broken or min(soonest) >= limit * (1 - 1e-6)


def test_one_level_is_the_optimum_of_the_exact_model() -> None:
    """Failures that need other levels count for it too: there is none."""
    level = SnapshotLevel(NEAR, 10.0)
    rates = {PROCESS: 0.5 / 11124, MACHINE: 0.3 / 11124, SITE: 0.2 / 11124}
    found = best_intervals([level], rates, 1.0)
    assert found.seconds == pytest.approx((465.035,))
    assert found.failures_per_second == pytest.approx((1 / 11124,))


def test_two_levels_of_the_literature() -> None:
    """`M = 3.09 h`, three of four failures spare the machine, 0.2 s and 10 s: 77 s and twelve times that."""
    rates = {PROCESS: 0.75 / 11124, MACHINE: 0.25 / 11124}
    levels = [
        SnapshotLevel(IN_MEMORY, 0.2, restore_seconds=30.0),
        SnapshotLevel(NEAR, 10.0, restore_seconds=300.0),
    ]
    found = best_intervals(levels, rates, 1.0)
    assert found.seconds[0] == pytest.approx(77.0, rel=0.01)
    assert found.seconds[1] / found.seconds[0] == pytest.approx(12.0, rel=0.05)
    assert found.waste == pytest.approx(0.0352, rel=0.01)


def test_a_workstation_takes_few_snapshots_into_memory() -> None:
    """47 days between failures, and copies of 0.1 s: less than 0.03 % of training, whatever the budget."""
    rates = {PROCESS: 0.75 / (47 * 24 * HOUR), MACHINE: 0.2 / (47 * 24 * HOUR), SITE: 0.05 / (47 * 24 * HOUR)}
    levels = [SnapshotLevel(IN_MEMORY, 0.1), SnapshotLevel(NEAR, 0.3)]
    found = best_intervals(levels, rates, 0.01)
    assert spent(levels, found.seconds) < 0.0003
    assert found.budget_worth == 0.0


def test_a_level_that_is_no_better_than_the_next_takes_nothing() -> None:
    """A copy into memory that costs as much as a durable snapshot."""
    found = best_intervals(
        [SnapshotLevel(IN_MEMORY, 1.0), SnapshotLevel(NEAR, 1.0)], {PROCESS: 1e-6, MACHINE: 1e-4}, 0.5
    )
    assert found.seconds[0] == math.inf or found.seconds[0] == found.seconds[1]


def test_bytes_have_a_price_where_snapshots_are_free() -> None:
    """A capture that costs training nothing is not taken as often as the disk can write."""
    free = SnapshotLevel(NEAR, 0.0, price_seconds=1.0, least_seconds=20.0)
    assert best_intervals([free], {PROCESS: 1e-4}, 0.01).seconds == (pytest.approx(optimal(1.0, 1e4)),)


def test_what_is_fixed_comes_first_and_leaves_half_of_the_budget() -> None:
    """The run still becomes durable where the user wants a copy in memory at each step."""
    memory = SnapshotLevel(IN_MEMORY, 0.1, fixed_seconds=1.0)
    found = best_intervals([memory, SnapshotLevel(NEAR, 0.2)], {PROCESS: 1e-1, MACHINE: 1e-1}, 0.01)
    assert found.seconds == (1.0, pytest.approx(0.1 / 0.005, rel=1e-3))
