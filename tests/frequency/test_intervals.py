"""Interval formulas against published and independently computed values."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.frequency import intervals

GOLDEN = [
    (1, 11124, 300, 149.158, 150.156, 148.492, 148.492, 0.960398),
    (10, 11124, 300, 471.678, 467.996, 465.035, 465.035, 0.932699),
    (60, 11124, 600, 1155.370, 1126.120, 1115.716, 1115.721, 0.852459),
    (0.2, 28440, 120, 106.658, 106.683, 106.525, 106.525, 0.992060),
    (5, 600, 30, 77.460, 74.373, 74.162, 74.163, 0.833653),
    (60, 300, 30, 189.737, 138.997, 151.845, 152.028, 0.446301),
]


@pytest.mark.parametrize(("cost", "mtbf", "restart", "young", "daly", "higher", "exact", "goodput"), GOLDEN)
def test_golden_table(
    cost: float,
    mtbf: float,
    restart: float,
    young: float,
    daly: float,
    higher: float,
    exact: float,
    goodput: float,
) -> None:
    """Young, both Daly formulas, the exact optimum and its goodput reproduce the reference table."""
    assert intervals.young(cost, mtbf) == pytest.approx(young, abs=5e-4)
    assert intervals.daly_first_order(cost, mtbf, restart) == pytest.approx(daly, abs=5e-4)
    assert intervals.daly_higher_order(cost, mtbf) == pytest.approx(higher, abs=5e-4)
    assert intervals.optimal(cost, mtbf) == pytest.approx(exact, abs=5e-4)
    assert intervals.goodput(intervals.optimal(cost, mtbf), cost, mtbf, restart) == pytest.approx(goodput, abs=1e-6)


@given(st.floats(1e-3, 1e3), st.floats(1.0, 1e6), st.floats(0.5, 2.0))
def test_optimal_is_a_maximum_of_goodput(cost: float, mtbf: float, factor: float) -> None:
    """No other interval has more goodput than the exact optimum."""
    best = intervals.optimal(cost, mtbf)
    assert intervals.goodput(best, cost, mtbf, 0.0) >= intervals.goodput(best * factor, cost, mtbf, 0.0) * (1 - 1e-9)


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


@given(st.floats(-1 / math.e, 1e300))
def test_lambert_w0_inverts_its_definition(z: float) -> None:
    """w e^w gives z back, up to the conditioning of the problem."""
    w = intervals.lambert_w0(z)
    assert w >= -1.0
    if w > 0.0:
        assert math.log(w) + w == pytest.approx(math.log(z), rel=1e-12, abs=1e-12)
    else:
        assert w * math.exp(w) == pytest.approx(z, rel=1e-12, abs=1e-15)


def test_lambert_w0_known_values_and_domain() -> None:
    """The omega constant, the branch point, e, and a refusal below -1/e."""
    assert intervals.lambert_w0(1.0) == pytest.approx(0.5671432904097838, rel=1e-15)
    assert intervals.lambert_w0(math.e) == pytest.approx(1.0, rel=1e-15)
    assert intervals.lambert_w0(-1 / math.e) == pytest.approx(-1.0, abs=1e-7)
    assert intervals.lambert_w0(math.inf) == math.inf
    with pytest.raises(ValueError, match="real from -1/e"):
        intervals.lambert_w0(-0.4)


def test_expected_loss_golden_and_limits() -> None:
    """48.612 s for s=100, M=600; half the segment when failures are rare; the MTBF when they are constant."""
    assert intervals.expected_loss(100.0, 600.0) == pytest.approx(48.612, abs=5e-4)
    assert intervals.expected_loss(100.0, 1e12) == pytest.approx(50.0, rel=1e-6)
    assert intervals.expected_loss(1e9, 60.0) == 60.0
    assert intervals.expected_loss(1e-4 * 0.9999, 1.0) == pytest.approx(
        intervals.expected_loss(1.0001e-4, 1.0), rel=1e-3
    )


def test_latency_adds_to_the_waste_but_does_not_move_the_optimum() -> None:
    """The first order waste is minimal at Young's interval whatever the latency."""
    best = intervals.young(5.0, 600.0)
    for latency in (0.0, 100.0):
        at = intervals.waste(best, 5.0, 600.0, 30.0, latency)
        assert at < intervals.waste(best * 1.05, 5.0, 600.0, 30.0, latency)
        assert at < intervals.waste(best / 1.05, 5.0, 600.0, 30.0, latency)
    assert intervals.waste(best, 5.0, 600.0, 30.0, 60.0) - intervals.waste(best, 5.0, 600.0, 30.0) == pytest.approx(0.1)


def test_goodput_agrees_with_a_simulation_of_the_model() -> None:
    """Drawing exponential failures and replaying lost work gives the formula's goodput."""
    rng = random.Random(7)
    cost, mtbf, restart, interval = 5.0, 600.0, 30.0, 74.0
    wall = work = 0.0
    while work < 4e5:
        failure = rng.expovariate(1 / mtbf)
        if failure >= interval + cost:
            wall, work = wall + interval + cost, work + interval
            continue
        wall += failure
        while (again := rng.expovariate(1 / mtbf)) < restart:  # failures hit restarts too
            wall += again
        wall += restart
    assert work / wall == pytest.approx(intervals.goodput(interval, cost, mtbf, restart), abs=0.006)
