"""Step times, slowdown under jitter, and the averages the policy gets."""

import json
import math
import random

import pytest

from ckpt_engine.frequency.measure import (
    CostMeter,
    Outliers,
    RobustBaseline,
    Slowdown,
    StepTimes,
    middle_mean,
    quantile,
    second_highest,
)
from ckpt_engine.frequency.triggers import Account


def times(clean: list[float], disturbed: list[float] = []) -> StepTimes:  # noqa: B006
    steps = StepTimes()
    steps.clean.extend(clean)
    for seconds in disturbed:
        steps.add_disturbed(seconds)
    return steps


def cost(slowdown: Slowdown) -> float:
    """Seconds that training has lost."""
    return slowdown.share * slowdown.seconds


def slowed(seconds: float, jitter: float = 0.0) -> Slowdown:
    """Steps of a second next to a snapshot that takes 100 s, of which so many are slowdown."""
    growth, steps = -math.log1p(-seconds / 100.0), 100.0 - seconds
    return Slowdown(steps * growth, steps, steps, 0.0, 1e9, steps * jitter**2, (steps * growth) ** 2, 1, 100.0)


def test_slowdown_without_jitter_is_the_sum_over_the_clean_step() -> None:
    """Three steps of 1.5 next to clean steps of 1 cost 1.5; asking again gives nothing."""
    steps = times([1.0] * 10, [1.5] * 3)
    assert cost(steps.take_slowdown()) == pytest.approx(1.5)
    assert steps.take_slowdown() == Slowdown()


def test_the_part_of_a_step_that_came_after_a_snapshot_is_no_evidence() -> None:
    """A step that is half as long again for half of its time was slowed down by two, for as long as that."""
    found = times([1.0] * 10, [1.5, 1.25]).take_slowdown(late_seconds=0.5)
    assert found.seconds == 2.25
    assert found.steps == pytest.approx(1.6)
    assert cost(found) == pytest.approx(2.25 * (1.0 - 1.0 / 1.5**1.0), rel=0.1)


def test_a_slow_step_next_to_a_snapshot_counts_apart() -> None:
    """Of a step that takes twenty times as long, what exceeds four usual steps is no slowdown of all steps."""
    measured = times([1.0] * 10, [1.5, 20.0]).take_slowdown()
    assert (measured.slow, measured.slow_seconds) == (1, 16.0)
    assert measured.growth == pytest.approx(math.log(1.5) + math.log(4.0))


def test_slow_steps_that_come_anyway_are_no_slowdown_on_average() -> None:
    """One step in thirty takes fifteen times as long, near snapshots and elsewhere."""
    rng = random.Random(6)
    draw = lambda: 15.0 if rng.random() < 0.03 else 1.0  # noqa: E731
    found = [times([draw() for _ in range(512)], [draw() for _ in range(20)]).take_slowdown() for _ in range(400)]
    assert abs(Slowdown.of_all(found).factor) < 0.01
    assert abs(sum(one.slow - one.slow_expected for one in found)) / (400 * 20) < 0.01


def test_steps_that_get_longer_steadily_are_no_slowdown() -> None:
    """The mean of the last 512 steps is that of half an hour ago; those right after a snapshot are not."""
    steady = [1.0 + n / 5000 for n in range(700)]
    steps = times(steady[:512], steady[512:540])
    first = steps.take_slowdown()
    for seconds in steady[540:]:
        steps.add_clean(seconds)
    steps.add_disturbed(steady[-1])
    second = steps.take_slowdown()
    assert abs(first._replace(clean=second.clean, clean_growth=second.clean_growth).factor) < 0.02


def test_clean_steps_count_for_a_time_right_after_a_snapshot() -> None:
    """For three times the time of the steps next to it, and not until they have come."""
    steps = times([1.0, 1.1] * 50, [1.0] * 10)
    assert steps.take_slowdown().clean_growth == pytest.approx(30 * math.log(1.1) / 2)
    for _ in range(100):
        steps.add_clean(2.0)
    steps.add_disturbed(2.0)
    assert steps.take_slowdown().clean == 15


@pytest.mark.parametrize(
    ("first", "counted"), [((1.3, 1.2, 1.25, 1.3, 1.25), [1, 1, 1, 3, 3]), ((1.1, 1.0, 1.0, 1.1, 1.0), [1] * 5)]
)
def test_the_first_steps_after_a_snapshot_count_for_it_where_they_are_longer(
    first: tuple[float, ...], counted: list[int]
) -> None:
    """Two of them, with the next snapshot, once that is believed of those so far. Until then they are clean."""
    steps, found = times([1.0] * 100), []
    for seconds in first:
        steps.add_disturbed(1.5)
        found.append(steps.take_slowdown())
        for one in (seconds, seconds, 1.0, 1.0):
            steps.add_clean(one)
    assert [one.number for one in found] == counted
    assert [one.clean for one in found[1:]] == [5 - count for count in counted[1:]]


@pytest.mark.long
def test_what_ends_an_interval_is_no_evidence() -> None:
    """An interval that is over at a time ends with a long step; without it all others are shorter than usual."""
    rng = random.Random(7)
    draw = lambda: rng.lognormvariate(-0.5, 1.0)  # noqa: E731
    steps, found = times([draw() for _ in range(512)]), []
    for _ in range(6000):
        for seconds, add in ((14.0, steps.add_disturbed), (42.0, lambda one: steps.add_clean(one))):
            while seconds > 0.0:
                add(step := draw())
                seconds -= step
            if add == steps.add_disturbed:
                found.append(steps.take_slowdown())
    every = Slowdown.of_all(found)
    assert abs(every.factor) < 3.0 * every.factor_error < 0.0125


def test_jitter_alone_is_no_slowdown_on_average() -> None:
    """The sum of positive excesses would charge 4 % of the time for 10 % of jitter; this charges nothing."""
    rng = random.Random(3)
    draw = lambda: rng.lognormvariate(0.0, 0.1)  # noqa: E731
    found = [times([draw() for _ in range(512)], [draw() for _ in range(20)]).take_slowdown() for _ in range(300)]
    assert abs(Slowdown.of_all(found).factor) < 0.005


def test_noise_estimates_cover_the_spread_of_the_measurement() -> None:
    """The reported deviations are those of repeated measurements, within a factor."""
    rng = random.Random(4)
    sample = [times([rng.gauss(1, 0.1) for _ in range(50)], [rng.gauss(1, 0.1) for _ in range(20)]) for _ in range(400)]
    slowdowns = [steps.take_slowdown() for steps in sample]
    spread = math.sqrt(sum(one.factor**2 for one in slowdowns) / len(slowdowns))
    assert 0.75 < spread / slowdowns[0].factor_error < 1.33
    assert 0.6 < math.sqrt(len(slowdowns)) * Slowdown.of_all(slowdowns).factor_error / spread < 1.5


def test_unknown_clean_time_gives_no_slowdown() -> None:
    """A run that takes a snapshot at each step from the start has nothing to compare with."""
    assert times([], [5.0] * 10).take_slowdown() == Slowdown(seconds=50.0)
    assert not times([1.0] * 4).known
    assert times([1.0] * 5).known
    assert StepTimes(prior=2.0).known
    assert StepTimes(prior=2.0).step_seconds() == 2.0


def test_clean_time_counts_slow_steps_in_full() -> None:
    """It converts seconds to steps: one step in five that takes ten times as long is in the mean."""
    assert times([1.0, 1.0, 1.0, 1.0, 10.0] * 4).step_seconds() == pytest.approx(2.8)


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


def usual(*values: float) -> float:
    one = RobustBaseline()
    for value in values:
        one.add(value)
    return one.value


def test_one_outlier_moves_no_usual_value() -> None:
    """An outlier may be the first value of all or one in the middle."""
    assert usual(5.0, 1.0) == 1.0
    assert usual(1.0, 1.0, 40.0, 1.0) == 1.0
    assert usual(*[1.0] * 30, 40.0) == 1.0
    assert usual(*[1.0] * 30, 40.0, 1.0, 40.0) == 1.0


def test_a_lasting_change_is_followed() -> None:
    """Upwards with the third value, downwards with the second: accidents only make things slower."""
    assert usual(*[1.0] * 30, 2.0, 2.1) == 1.0
    assert usual(*[1.0] * 30, 2.0, 2.1, 2.0) == 2.0
    assert usual(*[2.0] * 30, 1.0) == 2.0
    assert usual(*[2.0] * 30, 1.0, 1.0) == 1.0


def test_the_usual_value_is_efficient_where_nothing_is_unusual() -> None:
    """Of 32 normal values its deviation is some 1.2 times that of the mean."""
    rng = random.Random(8)
    series = []
    for _ in range(600):
        one = RobustBaseline()
        for _ in range(32):
            one.add(rng.gauss(1.0, 0.1), 0.1)
        series.append(one.value)
    assert math.sqrt(sum((value - 1.0) ** 2 for value in series) / len(series)) < 1.3 * 0.1 / math.sqrt(32)


def test_rare_large_values_count_from_the_second_on() -> None:
    """Their share is that of the mean which a robust estimate does not see; two early ones are not the rule."""
    outliers = Outliers()
    found = []
    for number in range(200):
        outliers.add(81.0 if number in (10, 20) else 1.0, 1.0)
        found.append(outliers.mean)
    assert found[19] == 0.0
    assert found[20] == pytest.approx(2 * 80 / 100)
    assert found[199] == pytest.approx(2 * 80 / 200)


def test_meter_estimates_stall_slowdown_and_latencies() -> None:
    """A persist that was slow once does not count, but in a promise about lost work."""
    meter = CostMeter()
    for latency in (10.0, 14.0, 10.0, 10.0):
        meter.add_cost(0.5, slowed(1.0))
        meter.add_durable(latency, latency / 2, 1e9)
    meter.add_cost(1.5, slowed(1.0))
    costs = meter.costs(1.0)
    assert (costs.stall_seconds, costs.slowdown_seconds) == (0.5, pytest.approx(1.0))
    assert (costs.latency_seconds, costs.busy_seconds, costs.worst_latency_seconds) == (10.0, 5.0, 14.0)
    assert costs.written_bytes == 1e9


def test_slow_steps_next_to_each_snapshot_are_a_cost() -> None:
    """Of one snapshot they are chance, of three they are not; they are forgotten where they do not come any more."""
    meter = CostMeter()
    calm, slow = Slowdown(slow_expected=0.01), Slowdown(slow=1, slow_expected=0.01, slow_seconds=9.0)
    found = []
    for slowdown in (calm, slow, calm, calm, slow, slow, slow, slow, slow, calm, calm, calm):
        meter.add_cost(0.5, slowdown)
        found.append(meter.costs(1.0).slowdown_seconds)
    assert found[:5] == [0.0] * 5
    assert 5.0 < found[8] <= 9.0
    assert found[-1] == 0.0


def test_slow_steps_that_come_anyway_need_more_evidence() -> None:
    """One of thirty is slow: five of five snapshots meet one in any long run, sixteen of sixteen do not."""
    meter = CostMeter()
    found = []
    for _ in range(16):
        meter.add_cost(0.5, Slowdown(slow=2, slow_expected=0.4, slow_seconds=9.0))
        found.append(meter.costs(1.0).slowdown_seconds)
    assert found[:5] == [0.0] * 5
    assert found[-1] == pytest.approx(9.0)


def test_a_burst_of_slow_steps_next_to_one_snapshot_is_chance() -> None:
    """A data loader that waits for minutes makes many steps slow, and they are not independent."""
    meter = CostMeter()
    for slow in (0, 0, 0, 14, 0, 0):
        meter.add_cost(0.5, Slowdown(slow=slow, slow_expected=0.1, slow_seconds=14.0 * slow))
    assert meter.costs(1.0).slowdown_seconds == 0.0


def test_what_is_charged_is_the_mean_of_all_and_what_decides_that_of_late() -> None:
    """A lasting change is followed with the third snapshot; those before it have cost what they have."""
    meter = CostMeter()
    charged = sum(meter.add_cost(0.5, slowed(seconds)) for seconds in [1.0] * 10 + [5.0] * 10)
    assert charged == pytest.approx(60.0, rel=0.05)
    assert charged == pytest.approx(meter.slowdown_of_all[0], rel=0.01)
    assert meter.costs(1.0).slowdown_seconds == pytest.approx(5.0)


def test_slowdown_within_noise_counts_as_none() -> None:
    """What jitter explains is no cost; what is far above it counts nearly in full."""
    within, above = CostMeter(), CostMeter()
    for _ in range(5):
        within.add_cost(0.0, slowed(0.1, jitter=0.05))
        above.add_cost(0.0, slowed(5.0, jitter=0.05))
    assert within.costs(1.0).slowdown_seconds == 0.0
    assert 4.9 < above.costs(1.0).slowdown_seconds <= 5.0 + 1e-9


def test_meter_round_trip() -> None:
    """What was learned survives JSON; what cannot have been measured is refused."""
    meter = CostMeter()
    meter.add_cost(0.5, slowed(1.0))
    meter.add_durable(9.0, 8.0, 1e9)
    data = json.loads(json.dumps(meter.to_json()))
    assert CostMeter.from_json(data).costs(2.0) == meter.costs(2.0)
    assert CostMeter.from_json(data).slowdown_of_all == (0.0, 0.0)
    with pytest.raises(ValueError, match="not measured costs"):
        CostMeter.from_json(data | {"latency_seconds": -1.0})


def test_quantiles_and_means() -> None:
    """Linear interpolation; the middle half; the second of the highest."""
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.95) == pytest.approx(9.5)
    assert middle_mean([1.0, 9.0]) == 1.0
    assert middle_mean([0.0, 1.0, 2.0, 99.0]) == 1.5
    assert second_highest([]) == 0.0
    assert second_highest([7.0]) == 7.0
    assert second_highest([1.0, 1.0, 5.0, 4.0]) == 4.0


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
