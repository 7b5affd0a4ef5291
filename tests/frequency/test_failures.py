"""The belief about failures against golden values, as laws, and across restarts."""

from __future__ import annotations

import json
import math
import random
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.engine import Engine
from ckpt_engine.frequency.failures import (
    CLASSES,
    DOUBT,
    MOST_FACTOR,
    SCALE,
    SCALES,
    SIGNIFICANT,
    FailureBelief,
    assumed_mtbf,
    believed_shape,
    fit_weibull,
    hazard_factor,
)
from ckpt_engine.frequency.policy import FrequencySettings
from ckpt_engine.loop.rank_decisions import ended_by
from ckpt_engine.observe.events import MACHINE, PROCESS, SITE, UNKNOWN, AttemptsFound
from tests.frequency.rig import IrregularTraining, Rig
from tests.frequency.scenarios import lost_by_a_new_run

HOUR = 3600.0
KINDS = st.sampled_from([*CLASSES, UNKNOWN])
BELIEFS = st.builds(FailureBelief.prior, st.floats(60.0, 1e8), st.floats(0.5, 4.0))


@pytest.mark.parametrize(("ranks", "hours"), [(8, 12.0), (1024, 7.9), (16384, 1.8), (131072, 0.23)])
def test_what_is_assumed_is_what_was_measured_on_a_cluster(ranks: int, hours: float) -> None:
    """Meta's Research SuperCluster, HPCA 2025; small jobs fail for reasons of their own (measured there: 47.7 d)."""
    assert assumed_mtbf(ranks) / HOUR == pytest.approx(hours, rel=0.15)


@pytest.mark.parametrize(
    ("stated", "weight", "lasted", "failures", "hours"),
    [
        (12.0, 1.0, 0.0, 0, 0.056993),
        (12.0, 1.0, 8 * HOUR, 0, 30.391614),
        (12.0, 1.0, 8 * HOUR, 1, 9.024823),
        (12.0, 1.0, 8 * HOUR, 2, 5.244200),
        (12.0, 1.0, 15.0, 1, 0.005263),
        (3.0, 2.0, 15.0, 1, 0.004171),
    ],
)
def test_golden_values(stated: float, weight: float, lasted: float, failures: int, hours: float) -> None:
    """One life, and failures at its end; the density was integrated numerically over the logarithm of the rate."""
    belief = FailureBelief.prior(stated * HOUR, weight).survived(lasted)
    belief = belief.after([0.0] * failures, [PROCESS] * failures)
    assert belief.mtbf_seconds == pytest.approx(hours * HOUR, rel=1e-3)


@given(st.floats(1e3, 1e6), st.sampled_from([1.0, 2.0]), st.floats(0.001, 10.0))
def test_what_is_believed_of_a_run_that_lives_is_what_was_assumed(mtbf: float, weight: float, age: float) -> None:
    """The rate at an age is the hazard of the assumption: how much less likely it is to get older than that."""
    belief, at, step = FailureBelief.prior(mtbf, weight), age * mtbf, 1e-4 * age * mtbf

    def lives(seconds: float) -> float:
        doubt = DOUBT**weight
        scales = [weight * mtbf * SCALE**power for power in range(-SCALES, SCALES + 1)]
        others = sum((one / (one + seconds)) ** weight for one in scales) / len(scales)
        return (1.0 - doubt) * (weight * mtbf / (weight * mtbf + seconds)) ** weight + doubt * others

    hazard = math.log(lives(at - step) / lives(at + step)) / (2.0 * step)
    assert belief.survived(at).per_second == pytest.approx(hazard, rel=1e-4)


@pytest.mark.parametrize("weight", [1.0, 2.0])
@pytest.mark.parametrize("wrong", [100.0, 1000.0])
def test_an_assumption_that_is_orders_of_magnitude_wrong_gives_way_to_two_failures(wrong: float, weight: float) -> None:
    """It comes back after an accident: a day without failures weighs more than two minutes with some."""
    lasted = 12 * HOUR / wrong
    belief = FailureBelief.prior(12 * HOUR, weight).after([lasted] * 2, [PROCESS] * 2)
    assert lasted / 2 < belief.mtbf_seconds < 2 * lasted
    assert belief.survived(24 * HOUR).mtbf_seconds > 6 * HOUR


@given(BELIEFS, st.floats(1.0, 1e7), KINDS)
def test_surviving_lowers_every_rate_and_a_failure_raises_its_own(
    belief: FailureBelief, seconds: float, kind: str
) -> None:
    """Time without failures is evidence too; of the shares it says nothing, and a failure raises that of its class."""
    survived, failed = belief.survived(seconds), belief.failed(kind)
    assert all(survived.rates[one] < rate for one, rate in belief.rates.items())
    assert failed.per_second > belief.per_second
    raised = CLASSES if kind == UNKNOWN else (kind,)
    for one in CLASSES:
        share = belief.rates[one] / belief.per_second
        assert survived.rates[one] / survived.per_second == pytest.approx(share)
        assert failed.rates[one] > belief.rates[one] or one not in raised
        assert failed.rates[one] / failed.per_second == pytest.approx(share) or kind != UNKNOWN
        assert failed.rates[one] / failed.per_second < share or one in raised


@given(BELIEFS, st.lists(st.tuples(st.floats(0.0, 1e6), KINDS), max_size=20))
def test_the_rate_is_the_sum_of_its_classes(belief: FailureBelief, history: list[tuple[float, str]]) -> None:
    """That is so after any history of failures."""
    after = belief.after([seconds for seconds, _ in history], [kind for _, kind in history])
    assert after.per_second == pytest.approx(sum(after.rates.values()))


def test_the_rate_of_a_rare_class_is_not_known_from_its_newest_failures() -> None:
    """A regime is followed by the rate of all failures; one in four of them may come thrice in a row by chance."""
    rng, found = random.Random(3), []
    for _ in range(100):
        kinds = rng.choices((PROCESS, MACHINE), (0.75, 0.25), k=60)
        belief = FailureBelief.prior(3 * HOUR).after([rng.expovariate(1 / (3 * HOUR)) for _ in kinds], kinds)
        found.append(belief.rates[MACHINE] * 12 * HOUR)
    assert statistics.mean(found) == pytest.approx(1.0, abs=0.2)
    assert statistics.stdev(found) < 0.4


@pytest.mark.parametrize("wrong", [0.1, 10.0])
def test_a_prior_that_is_ten_times_wrong_is_corrected(wrong: float) -> None:
    """After ten failures the belief is within a factor of two of the truth, what the user has said included."""
    for weight in (1.0, 2.0):
        belief = FailureBelief.prior(wrong * 3 * HOUR, weight).after([3 * HOUR] * 10, [MACHINE] * 10)
        assert 1.5 * HOUR < belief.mtbf_seconds < 6 * HOUR


def test_a_change_of_regime_is_followed() -> None:
    """After 12 h between failures became 1 h, fifteen of them are enough."""
    belief = FailureBelief.prior(12 * HOUR).after([12 * HOUR] * 30 + [HOUR] * 15, [PROCESS] * 45)
    assert HOUR < belief.mtbf_seconds < 4.0 * HOUR


@pytest.mark.parametrize("seconds", [-5.0, math.nan, math.inf, 0.0])
def test_impossible_exposure_is_no_evidence(seconds: float) -> None:
    """A clock that went wrong cannot poison the belief."""
    assert FailureBelief.prior(HOUR).survived(seconds) == FailureBelief.prior(HOUR)


def test_json_round_trip_and_refusal() -> None:
    """The belief survives JSON; numbers that cannot be one are refused."""
    belief = FailureBelief.prior(HOUR).survived(1234.5).failed(SITE)
    assert FailureBelief.from_json(json.loads(json.dumps(belief.to_json()))) == belief
    for bad in ({"process": 0.0}, {"events": -1.0}, {"exposure_seconds": math.inf}, {"site": math.nan}, {"weight": 0}):
        with pytest.raises(ValueError, match="not a belief"):
            FailureBelief.from_json(belief.to_json() | bad)


@pytest.mark.parametrize("events", [{}, {"events": 4.0}])
def test_a_belief_of_an_older_version_is_the_assumption_now(events: dict[str, float]) -> None:
    """What was assumed was part of what was observed; without a number of failures it is that of all classes."""
    older = {"process": 2.5, "machine": 0.4, "site": 1.1, "exposure_seconds": 8 * HOUR}
    found = FailureBelief.from_json(older | events)
    assert found.typical_seconds == pytest.approx(2 * HOUR)
    assert (found.weight, found.events, found.exposure_seconds) == (4.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="not a belief"):
        FailureBelief.from_json(older | {"exposure_seconds": math.nan})


@pytest.mark.parametrize(("lives", "most"), [([30.0], 3.0), ([14.0] * 2, 1.0), ([14.0] * 4, 1.0)])
def test_a_run_that_is_killed_soon_loses_little(lives: list[float], most: float) -> None:
    """As by a person who tries it out; in intervals that the budget pays for."""
    assert lost_by_a_new_run(lives) < most


def test_crashes_before_the_first_snapshot_move_the_belief() -> None:
    """The nearest tier knows of them: twenty crashes a minute after the start, where half a day was assumed."""
    rig = Rig(start=None, overhead=0.05)
    rig.cadence.emit(AttemptsFound((60.0,) * 20, (MACHINE,) * 20))
    assert belief_of(rig).mtbf_seconds < HOUR
    assert belief_of(rig).rates[MACHINE] > 10 * belief_of(rig).rates[PROCESS]


def test_what_the_nearest_tier_knows_counts_more_than_what_a_snapshot_remembers() -> None:
    """Where the tier is new, because the one before was lost, only the snapshot knows something."""
    first = Rig(overhead=0.05)
    first.clock.now += 30 * HOUR
    state = first.cadence.state()
    known, lost = Rig(start=None, overhead=0.05), Rig(start=None, overhead=0.05)
    known.cadence.emit(AttemptsFound((30 * HOUR,), ("",)))
    for rig in (known, lost):
        rig.cadence.restore(state)
    assert belief_of(known) == belief_of(first)
    assert belief_of(lost) == belief_of(first).failed(UNKNOWN)


@pytest.mark.parametrize("resumed_first", [True, False])
def test_a_lost_tier_is_a_failure_of_its_class_and_stays_known(resumed_first: bool) -> None:
    """The new nearest tier knows of no attempt before; snapshots that are made there do."""
    first = Rig(overhead=0.05)
    first.clock.now += 30 * HOUR
    second = Rig(start=None, overhead=0.05)
    second.cadence.restore(first.cadence.state(), failure=SITE)
    before = belief_of(first).failed(SITE)
    assert belief_of(second) == before
    third = Rig(start=None, overhead=0.05)
    found = AttemptsFound((2 * HOUR, HOUR), (PROCESS, MACHINE))
    if resumed_first:
        third.cadence.restore(second.cadence.state())
        third.cadence.emit(found)
    else:
        third.cadence.emit(found)
        third.cadence.restore(second.cadence.state())
    assert belief_of(third) == before.after(found.lasted, found.failures)
    fourth = Rig(start=None, overhead=0.05)
    fourth.cadence.emit(found)
    fourth.cadence.restore(third.cadence.state())
    assert belief_of(fourth) == belief_of(third)


def test_a_writer_that_is_replaced_does_not_forget_how_long_the_run_has_lasted() -> None:
    """The next one says so."""
    rig = Rig(overhead=0.05)
    rig.clock.now += 5 * HOUR
    before = belief_of(rig)
    rig.cadence.emit(AttemptsFound((), (), 5 * HOUR))
    assert belief_of(rig) == before


def belief_of(rig: Rig) -> FailureBelief:
    return FailureBelief.from_json(rig.cadence.state()["failures"])


def goodput(mtbf: float, *, stated: float | None = None, fixed: int | None = None, failures: int = 50) -> float:
    """Useful work by time of a run that fails so often, each time back to its newest durable snapshot.

    Steps take 5 s and stalls 1 s; each attempt learns from the record and from the snapshot that it goes on from.
    """
    rng = random.Random(4)
    lasted: list[float] = []
    useful, state = 0.0, None
    settings = FrequencySettings(overhead=0.05, mtbf_seconds=stated)
    if fixed is not None:
        settings = FrequencySettings(overhead=None, every_n_steps=fixed)
    for _ in range(failures):
        ends = rng.expovariate(1.0 / mtbf)
        training = IrregularTraining(
            settings, step_seconds=lambda _: 5.0, stall=lambda _: 1.0, persist=lambda _: 10.0, certain=False
        )
        if lasted:
            training.cadence.emit(AttemptsFound(tuple(lasted), (PROCESS,) * len(lasted)))
        if state is not None:
            training.cadence.restore(state)
        training.run_seconds(ends)
        safe = [one for one in training.taken if one.instant <= training.durable.instant]
        useful += safe[-1].step * 5.0 if safe else 0.0
        lasted.append(ends)
        state = training.cadence.state()
    return useful / sum(lasted)


BEST = {(1.0, 50): 0.973835, (1.2, 20): 0.974457}
"""The goodput of the best fixed interval that keeps the budget, by hours between failures and how many there are."""


@pytest.mark.long
@pytest.mark.parametrize("wrong", [0.1, 10.0])
def test_a_stated_mtbf_that_is_ten_times_wrong_costs_next_to_nothing(wrong: float) -> None:
    """Over fifty failures, beside the best fixed interval, whose trainings the slow test below repeats."""
    assert goodput(1.0 * HOUR, stated=wrong * HOUR) >= BEST[1.0, 50] - 0.002


def test_an_assumption_that_is_ten_times_wrong_costs_next_to_nothing() -> None:
    """Half a day is assumed."""
    assert goodput(1.2 * HOUR, failures=20) >= BEST[1.2, 20] - 0.002


@pytest.mark.slow
def test_no_fixed_interval_is_better_than_what_follows_failures() -> None:
    """The trainings that the tests above remember, and longer ones."""

    def best(mtbf: float, failures: int) -> float:
        fixed = (12, 17, 24, 34, 48, 68, 136, 190, 270)
        return max(goodput(mtbf, fixed=steps, failures=failures) for steps in fixed)

    for (hours, failures), known in BEST.items():
        assert best(hours * HOUR, failures) == pytest.approx(known, abs=1e-5)
    few_and_far = best(120.0 * HOUR, 20)
    assert goodput(120.0 * HOUR, failures=20) >= few_and_far - 0.002
    for wrong in (0.1, 10.0):
        assert goodput(3.0 * HOUR, stated=wrong * 3.0 * HOUR) >= best(3.0 * HOUR, 50) - 0.002


def quantiles(shape: float, count: int, scale: float = 10 * HOUR) -> list[float]:
    """Times that a Weibull distribution of that shape gives, spread evenly over its probabilities."""
    return [scale * (-math.log(1.0 - (number + 0.5) / count)) ** (1.0 / shape) for number in range(count)]


@pytest.mark.parametrize("shape", [0.5, 0.7, 1.0, 1.5])
def test_the_shape_of_many_failures_is_found(shape: float) -> None:
    """It is found within what four hundred failures can show."""
    fit = fit_weibull(quantiles(shape, 400), [True] * 400)
    assert fit.shape == pytest.approx(shape, rel=0.02)
    assert (fit.evidence > SIGNIFICANT) == (shape != 1.0)


@given(st.lists(st.floats(1e3, 1e6), min_size=3, max_size=30, unique=True), st.floats(1.0, 100.0), st.data())
def test_no_other_distribution_explains_the_times_better(
    times: list[float], factor: float, data: st.DataObject
) -> None:
    """It is the most likely one, units do not matter, and a time that no failure has ended is a lower bound."""
    failed = data.draw(st.lists(st.booleans(), min_size=len(times), max_size=len(times)).filter(any))
    fit, scaled = fit_weibull(times, failed), fit_weibull([factor * one for one in times], failed)
    assert scaled.shape == pytest.approx(fit.shape, rel=1e-6)
    if 0.06 < fit.shape < 19.0:
        fitted = (sum(one**fit.shape for one in times) / sum(failed)) ** (1.0 / fit.shape)
        best = likelihood(times, failed, fit.shape, fitted)
        for shape, scale in ((1.01, 1.0), (0.99, 1.0), (1.0, 1.01), (1.0, 0.99)):
            assert likelihood(times, failed, shape * fit.shape, scale * fitted) <= best + 1e-6
        mean = sum(times) / sum(failed)
        assert fit.evidence == pytest.approx(2 * (best - likelihood(times, failed, 1.0, mean)), abs=1e-6)


def likelihood(times: list[float], failed: list[bool], shape: float, scale: float) -> float:
    """Its logarithm: density where a failure has ended the time, survival where none has."""
    ended = sum(
        math.log(shape / scale) + (shape - 1.0) * math.log(one / scale)
        for one, end in zip(times, failed, strict=True)
        if end
    )
    return ended - sum((one / scale) ** shape for one in times)


def test_a_shape_is_believed_after_twenty_failures_that_chance_does_not_explain() -> None:
    """Lives that ended without a failure are none of them."""
    early, none = quantiles(0.5, 19), [PROCESS] * 19
    assert believed_shape([*early, *early], [*none, *([""] * 19)]) == 1.0
    assert believed_shape(quantiles(0.5, 20), [PROCESS] * 20) == pytest.approx(0.5, abs=0.05)
    assert believed_shape(quantiles(1.0, 200), [MACHINE] * 200) == 1.0
    assert believed_shape(quantiles(0.9, 30), [MACHINE] * 30) == 1.0  # too few for so small a difference


@given(st.floats(0.3, 2.0), st.floats(0.0, 1e7), st.floats(1.0, 100.0))
def test_the_rate_falls_or_rises_with_the_time_since_the_last_failure(
    shape: float, seconds: float, factor: float
) -> None:
    """As the shape says, and not by more than the cap."""
    sooner, later = (hazard_factor(shape, at, 10 * HOUR) for at in (seconds, factor * seconds))
    assert (later <= sooner) if shape <= 1.0 else (later >= sooner)
    assert 1 / MOST_FACTOR <= sooner <= MOST_FACTOR


@pytest.mark.parametrize("shape", [0.8, 1.0, 1.3])
def test_the_factor_is_one_on_average(shape: float) -> None:
    """Over all the time that runs train: each life ends with one failure."""
    scale, step = 10 * HOUR / math.gamma(1.0 + 1.0 / shape), 60.0
    alive = ((at, math.exp(-((at / scale) ** shape))) for at in (step * (number + 0.5) for number in range(20000)))
    assert sum(hazard_factor(shape, at, 10 * HOUR) * left * step for at, left in alive) == pytest.approx(
        10 * HOUR, rel=0.02
    )


@pytest.mark.parametrize(
    ("shape", "fixed", "young", "fewer"),
    [(0.5, 0.935, 0.939, 0.89), (0.6, 0.933, 0.936, 0.95), (0.7, 0.932, 0.933, 0.98)],
)  # fmt: skip
def test_intervals_that_follow_the_hazard_lose_less_with_fewer_snapshots(
    shape: float, fixed: float, young: float, fewer: float
) -> None:
    """Values of the literature: 7.5 h between failures, snapshots of 60 s, restarts of 120 s."""
    mean = 7.5 * HOUR
    every = math.sqrt(2 * 60.0 * mean)
    plain = lives(shape, mean, lambda _: every)
    following = lives(shape, mean, lambda at: every / math.sqrt(hazard_factor(shape, at, mean)))
    assert plain[0] == pytest.approx(fixed, abs=0.002)
    assert following[0] == pytest.approx(young, abs=0.002)
    assert following[1] / plain[1] == pytest.approx(fewer, abs=0.05)


def lives(shape: float, mean: float, every: Callable[[float], float]) -> tuple[float, int]:
    """Useful work by time over many failures, and the snapshots taken."""
    rng, useful, time, taken = random.Random(7), 0.0, 0.0, 0
    for _ in range(6000):
        ends, at = rng.weibullvariate(mean / math.gamma(1.0 + 1.0 / shape), shape), 0.0
        time += ends + 120.0
        while at + (work := every(at)) + 60.0 <= ends:
            at, useful, taken = at + work + 60.0, useful + work, taken + 1
    return useful / time, taken


def test_a_run_that_fails_in_bursts_takes_fewer_snapshots_the_longer_it_lives() -> None:
    """Once its attempts prove it."""
    rig = Rig(start=None, overhead=0.5)
    rig.cadence.emit(AttemptsFound(tuple(quantiles(0.5, 40)), (PROCESS,) * 40))
    rig.cadence.start(0)
    intervals = []
    for _ in range(2):
        assert rig.go(5000) is not None
        rig.take(stall=5.0, latency=6.0)
        rig.go(1)
        intervals.append(rig.cadence.interval_steps or 0)
        rig.clock.now += 20 * HOUR
        rig.cadence.exclude(20 * HOUR)
    assert intervals[1] > 1.5 * intervals[0]


@pytest.mark.parametrize(
    ("reason", "lost", "failure"), [("manual", True, SITE), ("manual", False, UNKNOWN), ("end", True, "")]
)
def test_the_place_that_serves_a_snapshot_tells_whether_the_nearest_tier_was_lost(
    reason: str, lost: bool, failure: str, tmp_path: Path
) -> None:
    """A run that has ended by itself has not failed, wherever its last snapshot comes from."""
    tiers = {"tiers": [str(tmp_path / "near"), f"{(tmp_path / 'far away').as_uri()}/"], "writer": "thread"}
    engine = Engine(tiers)
    engine.save({"step": 7}, step=7, reason=reason)
    engine.close()
    if lost:
        shutil.rmtree(tmp_path / "near")
    again = Engine(tiers)
    assert again.load() == {"step": 7}
    assert ended_by(again) == failure
