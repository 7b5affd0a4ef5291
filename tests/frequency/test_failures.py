"""The belief about failures against golden values, as laws, and across restarts."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.frequency.failures import CLASSES, FailureBelief, assumed_mtbf
from ckpt_engine.frequency.policy import FrequencySettings
from ckpt_engine.frequency.simulate import Training
from ckpt_engine.observe.events import MACHINE, PROCESS, SITE, UNKNOWN, AttemptsFound
from tests.frequency.rig import Rig

HOUR = 3600.0
KINDS = st.sampled_from([*CLASSES, UNKNOWN])
BELIEFS = st.builds(FailureBelief.prior, st.floats(60.0, 1e8), st.floats(0.5, 4.0))


@pytest.mark.parametrize(("ranks", "hours"), [(8, 12.0), (1024, 7.9), (16384, 1.8), (131072, 0.23)])
def test_what_is_assumed_is_what_was_measured_on_a_cluster(ranks: int, hours: float) -> None:
    """Meta's Research SuperCluster, HPCA 2025; small jobs fail for reasons of their own (measured there: 47.7 d)."""
    assert assumed_mtbf(ranks) / HOUR == pytest.approx(hours, rel=0.15)


@pytest.mark.parametrize(("failures", "mtbf_hours"), [(0, 20.0), (1, 0.9 * 20 / 1.9), (2, 0.81 * 20 / 2.71)])
def test_golden_values(failures: int, mtbf_hours: float) -> None:
    """A prior of 12 h with the weight of one failure; each failure takes a tenth of the weight of what was before."""
    belief = FailureBelief.prior(12 * HOUR).survived(8 * HOUR).after([0.0] * failures, [PROCESS] * failures)
    assert belief.mtbf_seconds == pytest.approx(mtbf_hours * HOUR)


@given(BELIEFS, st.floats(1.0, 1e7), KINDS)
def test_surviving_lowers_every_rate_and_a_failure_raises_its_own(
    belief: FailureBelief, seconds: float, kind: str
) -> None:
    """Time without failures is evidence too; a failure of one class says nothing of the others, but for forgetting."""
    survived, failed = belief.survived(seconds).rates, belief.failed(kind).rates
    assert all(survived[one] < rate for one, rate in belief.rates.items())
    raised = CLASSES if kind == UNKNOWN else (kind,)
    assert all(failed[one] > belief.rates[one] for one in raised)
    assert all(failed[one] == pytest.approx(belief.rates[one]) for one in CLASSES if one not in raised)


@given(BELIEFS, st.lists(st.tuples(st.floats(0.0, 1e6), KINDS), max_size=20))
def test_the_rate_is_the_sum_of_its_classes(belief: FailureBelief, history: list[tuple[float, str]]) -> None:
    """Whatever has happened."""
    after = belief.after([seconds for seconds, _ in history], [kind for _, kind in history])
    assert after.per_second == pytest.approx(sum(after.rates.values()))


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
    for bad in ({"process": 0.0}, {"exposure_seconds": math.inf}, {"site": math.nan}):
        with pytest.raises(ValueError, match="not a belief"):
            FailureBelief.from_json(belief.to_json() | bad)


def test_crashes_before_the_first_snapshot_move_the_belief() -> None:
    """The nearest tier knows of them: twenty crashes a minute after the start, where half a day was assumed."""
    rig = Rig(start=None, overhead=0.05)
    rig.cadence.emit(AttemptsFound((60.0,) * 20, (MACHINE,) * 20))
    assert belief_of(rig).mtbf_seconds < HOUR
    assert belief_of(rig).rates[MACHINE] > 10 * belief_of(rig).rates[PROCESS]


def test_what_the_nearest_tier_knows_counts_more_than_what_a_snapshot_remembers() -> None:
    """But where the tier is new, because the one before was lost, the snapshot is all there is."""
    first = Rig(overhead=0.05)
    first.clock.now += 30 * HOUR
    state = first.cadence.state()
    known, lost = Rig(start=None, overhead=0.05), Rig(start=None, overhead=0.05)
    known.cadence.emit(AttemptsFound((30 * HOUR,), ("",)))
    for rig in (known, lost):
        rig.cadence.restore(state)
    assert belief_of(known) == belief_of(first)
    assert belief_of(lost) == belief_of(first).failed(UNKNOWN)


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
        training = Training(
            settings, step_seconds=lambda _: 5.0, stall=lambda _: 1.0, persist=lambda _: 10.0, certain=False
        )
        if lasted:
            training.cadence.emit(AttemptsFound(tuple(lasted), (PROCESS,) * len(lasted)))
        if state is not None:
            training.cadence.restore(state)
        training.run_seconds(ends)
        safe = [one for one in training.taken if one.instant <= training.safe_instant]
        useful += safe[-1].step * 5.0 if safe else 0.0
        lasted.append(ends)
        state = training.cadence.state()
    return useful / sum(lasted)


@pytest.mark.parametrize("wrong", [0.1, 10.0])
@pytest.mark.parametrize("mtbf", [1.0 * HOUR, pytest.param(3.0 * HOUR, marks=pytest.mark.slow)])
def test_a_stated_mtbf_that_is_ten_times_wrong_costs_next_to_nothing(mtbf: float, wrong: float) -> None:
    """Over fifty failures, beside the best fixed interval that keeps the budget."""
    best = max(goodput(mtbf, fixed=steps) for steps in (12, 17, 24, 34, 48, 68))
    assert goodput(mtbf, stated=wrong * mtbf) >= best - 0.002


@pytest.mark.parametrize("mtbf", [1.2 * HOUR, pytest.param(120.0 * HOUR, marks=pytest.mark.slow)])
def test_an_assumption_that_is_ten_times_wrong_costs_next_to_nothing(mtbf: float) -> None:
    """Half a day is assumed."""
    best = max(goodput(mtbf, fixed=steps, failures=20) for steps in (12, 17, 24, 34, 48, 68, 136, 190, 270))
    assert goodput(mtbf, failures=20) >= best - 0.002
