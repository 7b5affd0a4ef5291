"""The failure rate posterior against golden values and across restarts."""

import json
import math

import pytest

from ckpt_engine.frequency.measure import FailureRate

HOUR = 3600.0


@pytest.mark.parametrize(("failures", "hours", "mtbf_hours"), [(0, 0, 12.0), (3, 20, 8.0), (10, 30, 42 / 11)])
def test_golden_values(failures: int, hours: float, mtbf_hours: float) -> None:
    """A prior of 12 h with the weight of one failure, without discount, gives the known posterior means."""
    rate = FailureRate.prior(12 * HOUR, discount=1.0).survived(hours * HOUR)
    for _ in range(failures):
        rate = rate.failed()
    assert rate.mtbf_seconds == pytest.approx(mtbf_hours * HOUR)
    assert rate.per_second == pytest.approx(1 / (mtbf_hours * HOUR))


def test_surviving_lowers_the_rate_and_failing_raises_it() -> None:
    """Time without failures is evidence too."""
    rate = FailureRate.prior()
    assert rate.survived(HOUR).per_second < rate.per_second < rate.failed().per_second


def test_discount_follows_a_change_of_regime_faster() -> None:
    """After 12 h between failures became 1 h, the discounted posterior is nearer to 1 h than the undiscounted one."""
    means = {}
    for discount in (0.9, 1.0):
        rate = FailureRate.prior(discount=discount)
        for gap_hours in [12.0] * 30 + [1.0] * 15:
            rate = rate.survived(gap_hours * HOUR).failed()
        means[discount] = rate.mtbf_seconds / HOUR
    assert 1.0 < means[0.9] < 4.0 < means[1.0]


@pytest.mark.parametrize("seconds", [-5.0, math.nan, math.inf, 0.0])
def test_impossible_exposure_is_no_evidence(seconds: float) -> None:
    """A clock that went wrong cannot poison the posterior."""
    assert FailureRate.prior().survived(seconds) == FailureRate.prior()


def test_json_round_trip_and_refusal() -> None:
    """The posterior survives JSON; numbers that cannot be one are refused."""
    rate = FailureRate.prior().survived(1234.5).failed()
    assert FailureRate.from_json(json.loads(json.dumps(rate.to_json()))) == rate
    for bad in ({"events": 0.0}, {"exposure_seconds": math.inf}, {"discount": 1.5}, {"events": math.nan}):
        with pytest.raises(ValueError, match="not a failure rate"):
            FailureRate.from_json(rate.to_json() | bad)
