"""Step times, slowdown under jitter, and the averages the policy gets."""

import json
import math
import random

import pytest

from ckpt_engine.frequency.account import Account
from ckpt_engine.frequency.measure import CostMeter, Ewma, Slowdown, StepTimes, high_end, quantile


def times(clean: list[float], disturbed: list[float] = []) -> StepTimes:  # noqa: B006
    steps = StepTimes()
    steps.clean.extend(clean)
    for seconds in disturbed:
        steps.add_disturbed(seconds)
    return steps


def test_slowdown_without_jitter_is_the_sum_over_the_clean_step() -> None:
    """Three steps of 1.5 next to clean steps of 1 cost 1.5; asking again gives nothing."""
    steps = times([1.0] * 10, [1.5] * 3)
    assert steps.take_slowdown() == Slowdown(seconds=1.5)
    assert steps.take_slowdown() == Slowdown()


def test_jitter_alone_is_no_slowdown_on_average() -> None:
    """The sum of positive excesses would charge 4 % of the time for 10 % of jitter; this charges nothing."""
    rng = random.Random(3)
    draw = lambda: rng.lognormvariate(0.0, 0.1)  # noqa: E731
    signed, positive = 0.0, 0.0
    for _ in range(300):
        steps = times([draw() for _ in range(512)], [])
        step_seconds = steps.step_seconds()
        for _ in range(20):
            seconds = draw()
            steps.add_disturbed(seconds)
            positive += max(0.0, seconds - step_seconds)
        signed += steps.take_slowdown().seconds
    assert positive / (300 * 20) > 0.03
    assert abs(signed / (300 * 20)) < 0.005


def test_noise_estimates_cover_the_spread_of_the_measurement() -> None:
    """The reported deviations are those of repeated measurements, within a factor."""
    rng = random.Random(4)
    sample = [times([rng.gauss(1, 0.1) for _ in range(50)], [rng.gauss(1, 0.1) for _ in range(20)]) for _ in range(400)]
    slowdowns = [steps.take_slowdown() for steps in sample]
    spread = math.sqrt(sum(one.seconds**2 for one in slowdowns) / len(slowdowns))
    claimed = math.hypot(slowdowns[0].jitter_seconds, slowdowns[0].baseline_seconds)
    assert 0.75 < spread / claimed < 1.33


def test_unknown_clean_time_gives_no_slowdown() -> None:
    """A run that takes a snapshot at each step from the start has nothing to compare with."""
    assert times([], [5.0] * 10).take_slowdown() == Slowdown()
    assert not times([1.0] * 4).known
    assert times([1.0] * 5).known
    assert StepTimes(prior=2.0).known
    assert StepTimes(prior=2.0).step_seconds() == 2.0


def test_clean_time_is_a_median_and_survives_outliers() -> None:
    """One step in ten that takes ten times as long does not move it."""
    assert times([1.0, 1.0, 1.0, 1.0, 10.0] * 4).step_seconds() == 1.0


def test_a_shift_of_step_time_replaces_the_old_steps() -> None:
    """After 16 steps at twice the time, the old ones are forgotten."""
    steps = times([1.0] * 200 + [2.0] * 16)
    assert steps.step_seconds() == 2.0
    assert len(steps.clean) == 16


def test_faster_disturbed_steps_prove_a_stale_clean_time() -> None:
    """When every step is disturbed and they became faster, the clean time follows them."""
    steps = times([1.0] * 50, [0.5] * 16)
    assert steps.step_seconds() == 0.5


def test_enough_clean_steps_depends_on_jitter_and_budget() -> None:
    """Twice the jitter needs four times the steps; a full window has to do."""
    rng = random.Random(5)
    jitter = [rng.gauss(1.0, 0.05) for _ in range(1000)]
    assert times(jitter[:100]).enough_for(0.035)
    assert not times(jitter[:100]).enough_for(0.01)
    assert times(jitter).enough_for(0.0001)
    assert times([1.0] * 5).enough_for(0.01)
    assert not times([]).enough_for(0.01)


def test_ewma_starts_as_a_mean_and_then_forgets() -> None:
    """An untypical first value has lost its weight after a few."""
    value = Ewma()
    for sample in (10.0, 0.0, 0.0):
        value = value.add(sample)
    assert value.value == pytest.approx(10 / 3)
    assert value.add(0.0).value == pytest.approx(10 / 3 * 0.7)


def test_meter_averages_stall_and_slowdown_and_keeps_the_high_latency() -> None:
    """Without jitter the EWMA weight is 0.3."""
    meter = CostMeter()
    for latency in (10.0, 14.0, 10.0, 10.0):
        meter.add_cost(0.5, Slowdown(1.0))
        meter.add_durable(latency, latency / 2, 1e9)
    meter.add_cost(1.5, Slowdown(2.0))
    costs = meter.costs(1.0)
    assert costs.stall_seconds == pytest.approx(0.8)
    assert costs.slowdown_seconds == pytest.approx(1.3)
    assert costs.latency_seconds == pytest.approx(10 + 0.85 * 4)
    assert costs.busy_seconds == pytest.approx(5 + 0.85 * 2)
    assert costs.written_bytes == 1e9


def test_slowdown_within_noise_counts_as_none() -> None:
    """One standard deviation is subtracted; what jitter explains moves the average slowly."""
    meter = CostMeter()
    meter.add_cost(0.0, Slowdown(0.1, jitter_seconds=0.5))
    assert meter.costs(1.0).slowdown_seconds == 0.0
    slow = CostMeter()
    for _ in range(5):
        slow.add_cost(0.0, Slowdown(0.0, jitter_seconds=0.5))
    slow.add_cost(0.0, Slowdown(0.9, jitter_seconds=0.5))
    unexpected = CostMeter()
    for _ in range(5):
        unexpected.add_cost(0.0, Slowdown(0.0, jitter_seconds=0.5))
    unexpected.add_cost(0.0, Slowdown(9.0, jitter_seconds=0.5))
    assert slow.costs(1.0).slowdown_seconds == 0.0
    assert unexpected.costs(1.0).slowdown_seconds > 2.0


def test_meter_round_trip() -> None:
    """What was learned survives JSON; what cannot have been measured is refused."""
    meter = CostMeter()
    meter.add_cost(0.5, Slowdown(1.0))
    meter.add_durable(9.0, 8.0, 1e9)
    data = json.loads(json.dumps(meter.to_json()))
    assert CostMeter.from_json(data).costs(2.0) == meter.costs(2.0)
    with pytest.raises(ValueError, match="not measured costs"):
        CostMeter.from_json(data | {"latency_seconds": -1.0})


def test_quantiles_and_high_end() -> None:
    """Linear interpolation; the last latency always counts."""
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.95) == pytest.approx(9.5)
    assert high_end([]) == 0.0
    assert high_end([1.0, 1.0, 5.0]) == 5.0


def test_account_credit_is_earned_spent_and_lost() -> None:
    """5 % of clean time is earned, overhead is paid from it, and a long surplus cannot be hoarded."""
    account = Account()
    account.training_seconds = 100.0
    assert account.credit(0.05, 1e9) == pytest.approx(5.0)
    account.paused_seconds = 8.0
    assert account.credit(0.05, 1e9) == pytest.approx(-3.0)
    assert account.overhead_fraction == pytest.approx(0.08)
    account.training_seconds = 1e6
    assert account.credit(0.05, 2.0) == 2.0


def test_account_slowdown_is_signed_but_never_a_profit() -> None:
    """Jitter cancels; a stale baseline does not pay for stalls."""
    account = Account()
    account.training_seconds = 100.0
    account.add_slowdown(2.0)
    account.add_slowdown(-1.0)
    assert account.spent_seconds == pytest.approx(1.0)
    assert account.overhead_fraction == pytest.approx(1.0 / 99.0)
    account.add_slowdown(-50.0)
    assert account.spent_seconds == 0.0
