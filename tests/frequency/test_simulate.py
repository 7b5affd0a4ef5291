"""The simulator: it is right where that can be computed, its leaps change nothing, and its records say the truth."""

from __future__ import annotations

import math
import random
import statistics
from functools import partial
from typing import Any

import pytest

from ckpt_engine.frequency.failures import observed, poisson, weibull
from ckpt_engine.frequency.policy import FrequencySettings, MemoryRhythm
from ckpt_engine.observe.events import MACHINE, PROCESS, SITE
from ckpt_engine.tools.plan_runs import spread
from ckpt_engine.tools.simulate import FurtherTier, Restart, Ruled, SimulatedJob
from ckpt_engine.writer.attempts import AttemptHistory, encode_attempts, parse_attempts
from tests.frequency.rig import IrregularJob
from tests.frequency.scenarios import expected_goodput

HOUR = 3600.0
DAY = 24 * HOUR
LLAMA3_SECONDS = 3.09 * HOUR
RESTART = Restart({PROCESS: 10.0, MACHINE: 280.0, SITE: 280.0}, startup=15.0, restore=5.0)

OTHER_INTERVALS = ((10, 1.0), (30, 10.0), (60, 1.0))


def job(seconds: float = 3 * DAY, seed: int = 1, mtbf: float = LLAMA3_SECONDS, **options: Any) -> Any:
    """A job that fails as Llama 3 did, with the cadence of this project and a budget of 1 %."""
    how = {name: options.pop(name) for name in ("tiers", "rhythm", "failures") if name in options}
    made = options.pop("made", SimulatedJob)
    failures = how.pop("failures", poisson(mtbf, random.Random(seed), {PROCESS: 0.75, MACHINE: 0.25}))
    training = {"settings": FrequencySettings(), "slowdown": 1.05} | options
    return made(failures, seconds, RESTART, training, **how).run()


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("minutes", "cost"),
    [(10, 10.0), (30, 1.0), (60, 10.0), *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHER_INTERVALS)],
)
def test_fixed_intervals_are_as_good_as_the_exact_model_says(minutes: int, cost: float) -> None:
    """Wall by work is M e^(R/M) (e^((t + c)/M) - 1) / t (Daly 2006) where a restart takes 300 s."""
    every, mtbf = 60.0 * minutes, LLAMA3_SECONDS
    restart = Restart(dict.fromkeys((PROCESS, MACHINE, SITE), 300.0), 0.0, 0.0)
    training = {"settings": FrequencySettings(), "stall": cost, "persist": 0.0}
    failures = poisson(mtbf, random.Random(3), {MACHINE: 1.0})
    found = SimulatedJob(failures, 300 * DAY, restart, training, rhythm=partial(Ruled, every)).run()
    exact = every / (mtbf * math.exp(300.0 / mtbf) * math.expm1((every + cost) / mtbf))
    assert found.goodput == pytest.approx(exact, abs=0.008)


@pytest.mark.long
@pytest.mark.parametrize("jobs", [5, pytest.param(12, marks=pytest.mark.slow)])
def test_a_short_job_is_as_good_as_a_long_one_within_its_spread(jobs: int) -> None:
    """What ends a job early changes nothing but how sure its goodput is: of all, at most one is 1.5 spreads off."""
    training = {"settings": FrequencySettings(), "slowdown": 1.05}
    long, short = job(30 * DAY).goodput, list[SimulatedJob]()
    for seed in range(jobs):
        failures = poisson(LLAMA3_SECONDS, random.Random(seed), {PROCESS: 0.75, MACHINE: 0.25})
        short.append(SimulatedJob(failures, 300 * DAY, RESTART, training, most=5_000).run())
    assert all(DAY < one.seconds < 30 * DAY for one in short)
    spreads = [spread(one.cycles) or 1.0 for one in short]
    assert max(spreads) < 0.01
    assert sum(abs(one.goodput - long) > 1.5 * own for one, own in zip(short, spreads, strict=True)) <= 1


@pytest.mark.cells(3)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"step_seconds": 0.25, "persist": 3.0, "stall": 0.01},
        {"slowdown": 1.0, "persist": 40.0},
        {"settings": FrequencySettings(max_lost_work_seconds=300.0)},
        {"settings": FrequencySettings(overhead=None, every_n_steps=100)},
        {"settings": FrequencySettings(overhead=None, every_seconds=1800.0)},
        {"rhythm": partial(Ruled, 200.0)},
        {"settings": FrequencySettings(memory=MemoryRhythm(), slots=2)},
        {"settings": FrequencySettings(memory=MemoryRhythm(every_seconds=20.0), slots=2)},
        {"settings": FrequencySettings(overhead=None, every_n_steps=90, memory=MemoryRhythm(every_n_steps=40))},
    ],
    ids=[
        "budget",
        "fast steps",
        "long persist",
        "max_lost_work",
        "each 100th step",
        "each 30 min",
        "a rule",
        "memory",
        "memory each 20 s",
        "memory each 40th step",
    ],
)
def test_leaps_change_nothing(options: dict[str, Any], seed: int) -> None:
    """Step by step, and from event to event, a job takes the same snapshots, and loses and keeps the same."""
    slow, fast = (job(DAY / 4, seed, leaps=leaps, made=IrregularJob, **options) for leaps in (False, True))
    assert (fast.goodput, fast.lost, fast.taken, fast.written) == (slow.goodput, slow.lost, slow.taken, slow.written)
    assert fast.rows == slow.rows


@pytest.mark.cells(2)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"jitter": 0.1},
        {"settings": FrequencySettings(memory=MemoryRhythm(), slots=2)},
        {"mtbf": 600.0},
        {"mtbf": 30 * DAY},
        {"slow": lambda step, _: 10.0 if step % 50 == 0 else 1.0},
        {"failures": "weibull"},
    ],
    ids=["calm", "jitter", "memory", "each 10 min", "hardly ever", "slow steps", "bursts"],
)
def test_what_a_run_records_of_itself_is_the_truth(options: dict[str, Any], seed: int) -> None:
    """`ckpt goodput` reads this record: within 0.002 of the work that was of use, and the sum is the wall time."""
    if options.get("failures"):
        options = options | {"failures": weibull(0.6, 5 * HOUR, random.Random(seed))}
    done = job(DAY, seed, made=IrregularJob, **options)
    spent = parse_attempts(encode_attempts(AttemptHistory(tuple(done.rows))), "here").spent
    assert spent.wall == pytest.approx(DAY, rel=0.002)
    assert spent.productive / DAY == pytest.approx(done.goodput, abs=0.002)
    assert spent.stall == pytest.approx(done.stalled, rel=0.001, abs=30.0 * len(done.lost) / 60.0)


def test_each_class_of_failure_goes_back_to_what_survives_it() -> None:
    """The writer of a process that died makes its newest snapshot durable; a lost nearest tier leaves the far one."""
    lost = {}
    for kind in (PROCESS, MACHINE, SITE):
        trace = observed([(10000.0, kind)])
        done = job(
            20000.0, failures=trace, stall=0.5, persist=100.0, tiers=[FurtherTier(600.0)],
            settings=FrequencySettings(overhead=None, every_n_steps=150),
        )  # fmt: skip
        ((found, lost[kind]),) = done.lost
        assert found == kind
    assert lost[PROCESS] < 151.0
    assert 100.0 <= lost[MACHINE] < 151.0 + 100.0
    assert 700.0 <= lost[SITE] < 151.0 + 100.0 + 2 * 600.0 + 151.0


@pytest.mark.long
def test_what_failures_are_expected_to_cost_is_what_they_cost_on_average() -> None:
    """So that two policies can be compared over a few days: chance has a small part in the difference."""
    mean = 2 * HOUR
    happened, expected = [], []
    for seed in range(8):
        often, seldom = (
            job(
                DAY,
                made=IrregularJob,
                failures=poisson(mean, random.Random(seed)),
                stall=4.0,
                settings=FrequencySettings(overhead=None, every_n_steps=steps, memory=MemoryRhythm(every_n_steps=60)),
            )
            for steps in (300, 1200)
        )
        happened.append(often.goodput - seldom.goodput)
        expected.append(expected_goodput(often, mean) - expected_goodput(seldom, mean))
    assert statistics.mean(expected) == pytest.approx(statistics.mean(happened), abs=statistics.stdev(happened) / 2.0)
    assert statistics.stdev(expected) < statistics.stdev(happened) / 3.0


def test_without_failures_all_that_is_lost_is_what_snapshots_cost() -> None:
    """One life, which ends with its time."""
    done = job(DAY, failures=observed([]))
    assert (len(done.rows), done.lost) == (1, [])
    assert 1.0 - done.goodput == pytest.approx((15.0 + done.stalled + done.slowed) / DAY, abs=1e-4)
    assert 0.0 < 1.0 - done.goodput < 0.011
