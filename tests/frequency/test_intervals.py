"""Interval formulas against published and independently computed values."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.frequency import intervals

GOLDEN = [
    (1, 11124, 300, 148.492, 0.960398),
    (10, 11124, 300, 465.035, 0.932699),
    (60, 11124, 600, 1115.721, 0.852459),
    (0.2, 28440, 120, 106.525, 0.992060),
    (5, 600, 30, 74.163, 0.833653),
    (60, 300, 30, 152.028, 0.446301),
]


def goodput_at(interval: float, cost: float, mtbf: float, restart: float) -> float:
    """Share of wall time that is useful work, exactly (Daly): τ / (M e^(R/M) (e^((τ+δ)/M) - 1))."""
    exponent = (interval + cost) / mtbf
    return math.exp(-restart / mtbf) * interval / (mtbf * math.expm1(exponent)) if exponent <= 700.0 else 0.0


@pytest.mark.parametrize(("cost", "mtbf", "restart", "exact", "goodput"), GOLDEN)
def test_golden_table(cost: float, mtbf: float, restart: float, exact: float, goodput: float) -> None:
    """The exact optimum and its goodput reproduce the reference table."""
    assert intervals.optimal(cost, mtbf) == pytest.approx(exact, abs=5e-4)
    assert goodput_at(intervals.optimal(cost, mtbf), cost, mtbf, restart) == pytest.approx(goodput, abs=1e-6)


@given(st.floats(1e-3, 1e3), st.floats(1.0, 1e6), st.floats(0.5, 2.0))
def test_optimal_is_a_maximum_of_goodput(cost: float, mtbf: float, factor: float) -> None:
    """No other interval has more goodput than the exact optimum."""
    best = intervals.optimal(cost, mtbf)
    assert goodput_at(best, cost, mtbf, 0.0) >= goodput_at(best * factor, cost, mtbf, 0.0) * (1 - 1e-9)


@given(st.floats(1e-300, 1e300), st.floats(1e-300, 1e300))
def test_optimal_is_finite_and_bounded_for_extreme_inputs(cost: float, mtbf: float) -> None:
    """The optimum lies between zero and the time between failures for any positive inputs."""
    assert 0.0 <= intervals.optimal(cost, mtbf) <= mtbf


@pytest.mark.parametrize(
    ("cost", "mtbf", "expected"),
    [(0.0, 10.0, 0.0), (1.0, math.inf, math.inf), (0.0, math.inf, 0.0), (math.inf, 10.0, 10.0), (1.0, 0.0, 0.0)],
)
def test_optimal_at_the_edges(cost: float, mtbf: float, expected: float) -> None:
    """Free checkpoints are taken always, checkpoints without failures never."""
    assert intervals.optimal(cost, mtbf) == expected


def test_optimal_is_continuous_where_the_series_takes_over() -> None:
    """The series next to the branch point and the Lambert form agree where one hands over to the other."""
    below, above = intervals.optimal(0.999999e-6, 1.0), intervals.optimal(1.000001e-6, 1.0)
    assert above / below == pytest.approx(math.sqrt(1.000001 / 0.999999), rel=1e-7)


@given(st.floats(1e-6, 700.0))
def test_optimal_solves_its_equation(ratio: float) -> None:
    """(1 - share) e^share = e^-ratio: that is Lambert's W, up to the conditioning of the problem."""
    share = intervals.optimal(ratio, 1.0)
    assert (1.0 - share) == pytest.approx(math.exp(-share - ratio), rel=1e-12, abs=1e-15)
