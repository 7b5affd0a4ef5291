"""Each bar of the adaptive frequency beside its target, on seeded scenarios: `python -m tests.frequency.scenarios`.

Regret is how much less useful work than with the best fixed intervals that keep the budget, found by search, levels
together. Where nothing is irregular whole jobs are simulated, with failures and restarts; else the work that failures
would take is counted to first order. Arguments: parts of the names of the rows to measure; none: all.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_engine.frequency.failures import SHARES, Failures, observed, poisson, weibull
from ckpt_engine.frequency.intervals import optimal
from ckpt_engine.frequency.policy import FrequencySettings, MemoryRhythm
from ckpt_engine.observe.events import MACHINE, PROCESS, SITE
from ckpt_engine.tools.simulate import FurtherTier, Restart
from tests.cli.test_truth import JOBS, WITHIN, errors
from tests.frequency.rig import IrregularJob, IrregularTraining
from tests.frequency.test_irregular import (
    BUDGET,
    MTBF_SECONDS,
    WORLDS,
    World,
    best_fixed,
    each,
    epochs,
    log_normal,
    settled,
    share,
)

HOUR, DAY = 3600.0, 86400.0
SIX_HOURS = 6 * HOUR
BACK = {PROCESS: 60.0, MACHINE: 300.0, SITE: 900.0}


@dataclass(frozen=True)
class Row:
    """One bar: what is measured, and the most that is good."""

    name: str
    most: float
    measure: Callable[[], float]


# ---------------------------------------------------------------- whole jobs


def expected_goodput(job: IrregularJob, mtbf: float) -> float:
    """Useful work by time where failures had cost what their constant rate makes likely: on average that is equal to
    what there was, and has less chance in it. What failures cost that need a further tier counts as it was."""
    counted = [one for one in SHARES if not (one == SITE and job.tiers)]
    likely = sum(SHARES[one] / mtbf * job.exposed[PROCESS if one == PROCESS else MACHINE] for one in counted)
    return job.goodput + (sum(lost for one, lost in job.lost if one in counted) - likely) / job.seconds


@dataclass(frozen=True)
class Plan:
    """A job, its failures, and the fixed intervals to beat.

    Args:
        failures: a number: so many seconds between them, at a constant rate. Then what they are expected to cost
            counts, and not what they have cost by chance.
    """

    failures: float | Callable[[random.Random], Failures]
    days: float
    step_seconds: float
    stall: float
    persist: float
    durable: Sequence[int]
    memory: Sequence[int] = ()
    memory_stall: float = 0.1
    tiers: Sequence[FurtherTier] = ()
    mtbf: float | None = None
    seeds: int = 1
    restart: Restart = field(default_factory=lambda: Restart(BACK, 30.0, 30.0))

    def drawn(self, seed: int) -> Failures:
        """The failures of one job."""
        rng = random.Random(seed)
        return poisson(self.failures, rng) if isinstance(self.failures, float) else self.failures(rng)

    def goodput(self, seed: int, settings: FrequencySettings) -> tuple[float, float]:
        """The share of useful work, and the overhead on what was trained: restarts pay for no snapshots."""
        training: dict[str, Any] = {
            "settings": settings,
            "step_seconds": self.step_seconds,
            "stall": self.stall,
            "persist": self.persist,
            "memory_stall": self.memory_stall,
        }
        job = IrregularJob(self.drawn(seed), self.days * DAY, self.restart, training, self.tiers).run()
        found = job.goodput
        if isinstance(self.failures, float):
            found = expected_goodput(job, self.failures)
        trained = sum(row.times.get("training", 0.0) + row.times.get("replay", 0.0) for row in job.rows)
        return found, job.stalled / max(1.0, trained)

    def regret(self) -> float:
        rhythm = MemoryRhythm() if self.memory else None
        ours, _ = self.mean(FrequencySettings(overhead=BUDGET, mtbf_seconds=self.mtbf, memory=rhythm))
        fixed = []
        for durable, memory in itertools.product(self.durable, self.memory or (0,)):
            every = MemoryRhythm(every_n_steps=memory) if memory else None
            found, overhead = self.mean(FrequencySettings(overhead=None, every_n_steps=durable, memory=every))
            if overhead <= 1.02 * BUDGET:
                fixed.append(found)
        return max(fixed) - ours

    def mean(self, settings: FrequencySettings) -> tuple[float, float]:
        """As `goodput`, over all seeds."""
        found = [self.goodput(seed, settings) for seed in range(self.seeds)]
        return sum(one for one, _ in found) / self.seeds, sum(one for _, one in found) / self.seeds


def bursts(rng: random.Random) -> Failures:
    """Once in 16 hours, then three more within minutes."""
    while True:
        yield rng.expovariate(1.0 / (16 * HOUR)), PROCESS
        for _ in range(3):
            yield rng.expovariate(1.0 / 900.0), rng.choice((PROCESS, MACHINE))


def around(middle: float, count: int = 7) -> list[int]:
    return sorted({max(1, round(middle * 1.3**power)) for power in range(-(count // 2), count // 2 + 1)})


PLANS = {
    "Llama-3 (3.1 h)": (0.001, Plan(11124.0, 20, 5.0, 0.7, 14.0, around(25, 5))),
    "Llama-3 with memory": (
        0.001,
        Plan(11124.0, 10, 5.0, 4.0, 30.0, around(120, 3), around(14, 3), 0.2, seeds=4),
    ),
    "Weibull 0.7": (
        0.001,
        Plan(lambda rng: weibull(0.7, 7.5 * HOUR / 1.2658, rng), 30, 5.0, 2.0, 20.0, around(66, 5)),
    ),
    "bursts": (0.001, Plan(bursts, 20, 5.0, 1.0, 15.0, around(35, 5))),
    "spot (2 h)": (0.001, Plan(7200.0, 8, 2.0, 0.5, 10.0, around(42, 5))),
    "workstation (47 d), memory": (
        0.001,
        Plan(47 * DAY, 60, 1.0, 0.3, 5.0, around(3000, 3), around(1000, 3), 0.1),
    ),
    "three tiers": (
        0.0015,
        Plan(
            11124.0,
            10,
            5.0,
            4.0,
            30.0,
            around(120, 3),
            around(14, 3),
            0.2,
            tiers=(FurtherTier(120.0),),
            seeds=3,
        ),
    ),
    "100,000 GPUs (0.23 h)": (
        0.0015,
        Plan(
            828.0,
            3,
            5.0,
            0.5,
            8.0,
            around(10, 5),
            mtbf=828.0,
            seeds=2,
            restart=Restart(dict.fromkeys(BACK, 60.0), 30.0, 10.0),
        ),
    ),
}
for _wrong in (0.1, 10.0):
    PLANS[f"mtbf stated {_wrong:g} x"] = (
        0.002,
        Plan(3 * HOUR, 8, 5.0, 1.0, 10.0, around(30, 5), mtbf=_wrong * 3 * HOUR, seeds=2),
    )
    PLANS[f"assumed 12 h, true {12 / _wrong:g} h"] = (
        0.002,
        Plan(
            12 / _wrong * HOUR,
            60 if _wrong < 1 else 4,
            5.0,
            1.0,
            10.0,
            around(18 / _wrong**0.5 * 3.2, 5),
            seeds=2,
        ),
    )


# ---------------------------------------------------------------- irregular steps

THROTTLED = World(
    "S3 throttling",
    0.0015,
    options=lambda: {"persist": lambda at: 140.0 if at % 20000 > 18000 else 14.0, "jitter": 0.05},
)


def stalls(_: int, rng: random.Random) -> float:
    """One step in a hundred waits ten to a hundred times as long as it takes."""
    return 10.0 ** rng.uniform(1.0, 2.0) if rng.random() < 0.01 else 1.0


SLOWED = {
    "log-normal steps": log_normal(1.0),
    "Pareto 1.5": lambda _, rng: rng.paretovariate(1.5) / 3.0,
    "Pareto 2.5": lambda _, rng: rng.paretovariate(2.5) * 0.6,
    "slow epochs": epochs(500, 3.0),
    "validation that nothing announces": each(500, 101.0),
    "irregular stalls": stalls,
}
"""Steps that a persist makes longer by 5 %."""
BARS = {
    "3 % of steps x 15": 0.004,
    "3 % of stalls x 80": 0.006,
    "slow epochs": 0.003,
    "contention": 0.0015,
    "drift": 0.0015,
}
STEPS = 40000


def regret(world: World) -> float:
    ours = world.train(FrequencySettings(overhead=BUDGET, mtbf_seconds=MTBF_SECONDS), STEPS).goodput(MTBF_SECONDS)
    best, _ = best_fixed(world, STEPS, [int(40 * 1.25**power) for power in range(13)])
    return best - ours


DISTRIBUTIONS: Mapping[str, tuple[Callable[[int, random.Random], float], float]] = {
    "constant": (lambda _, rng: 1.0, 0.0),
    "jitter 5 %": (lambda _, rng: 1.0, 0.05),
    "jitter 20 %": (lambda _, rng: 1.0, 0.2),
    "each 10th x 3": (each(10, 3.0), 0.05),
    "each 50th x 10": (each(50, 10.0), 0.05),
    "each 100th x 50": (each(100, 50.0), 0.05),
    "each 1000th x 300": (each(1000, 300.0), 0.05),
    "1 % x 30": (share(0.01, 30.0), 0.05),
    "3 % x 15": (share(0.03, 15.0), 0.05),
    "20 % x 4": (share(0.2, 4.0), 0.05),
    "half x 3": (share(0.5, 3.0), 0.05),
    "log-normal 0.5": (log_normal(0.5), 0.0),
    "log-normal 1.2": (log_normal(1.2), 0.0),
    "Pareto 1.5": (lambda _, rng: rng.paretovariate(1.5) / 3.0, 0.0),
    "exponential": (lambda _, rng: rng.expovariate(1.0), 0.0),
}


def off(slow: Callable[[int, random.Random], float], jitter: float) -> float:
    """How far the distance of snapshots is from the optimum, as a factor of at least 1."""
    training = IrregularTraining(
        FrequencySettings(overhead=BUDGET, mtbf_seconds=MTBF_SECONDS), slow=slow, jitter=jitter, seed=3
    ).run(6000)
    before, clean = len(training.taken), training.useful
    training.run(24000)
    each_seconds = (training.useful - clean) / max(1, len(training.taken) - before)
    found = each_seconds / max(optimal(0.7, MTBF_SECONDS), 0.7 / BUDGET)
    return max(found, 1.0 / found)


# ---------------------------------------------------------------- what is promised


def windows(world: World) -> tuple[float, float]:
    """The highest true overhead of six hours by the budget, and by how many points the reported one errs."""
    training = IrregularTraining(
        FrequencySettings(overhead=BUDGET, mtbf_seconds=600.0), slow=world.slow, seed=1, **world.options()
    )
    marks = [(0.0, 0.0)]
    for _ in range(120):
        training.run_seconds(600.0)
        marks.append((training.elapsed, training.useful))
    worst = max(
        (end - begin) / (clean - before) - 1.0 for (begin, before), (end, clean) in zip(marks, marks[36:], strict=False)
    )
    return worst / BUDGET, 100.0 * abs(training.cadence.overhead_fraction - training.true_overhead)


def biased(slow: Callable[[int, random.Random], float], jitter: float) -> float:
    """By how many points the reported overhead errs where a persist makes steps longer by 5 %: the mean of six runs.

    After 550 snapshots chance alone gives one run with log-normal steps a standard deviation of 0.15.
    """
    errors = []
    for seed in range(1, 7):
        settings = FrequencySettings(overhead=BUDGET, mtbf_seconds=600.0)
        training = IrregularTraining(settings, slow=slow, slowdown=1.05, jitter=jitter, seed=seed).run_seconds(72000.0)
        errors.append(training.cadence.overhead_fraction - training.true_overhead)
    return 100.0 * abs(sum(errors)) / len(errors)


def lost_per_class() -> float:
    """By how many steps the limits are missed at worst, each fifth snapshot failing."""
    limits = {PROCESS: 30.0, MACHINE: 120.0}
    settings = FrequencySettings(overhead=0.05, mtbf_seconds=1e9, max_lost_work_seconds=limits, memory=MemoryRhythm())
    training = IrregularTraining(
        settings,
        stall=0.2,
        persist=lambda _: 10.0,
        jitter=0.1,
        seed=5,
        fails=lambda number: number % 5 == 4,
        memory_stall=0.02,
    ).run(60)
    worst, training.durable.worst = 0.0, 0.0
    for _ in range(6000):
        training.run(1)
        at = training.in_memory.instant if training.in_memory is not None else training.origin
        worst = max(worst, training.clock.now - at - limits[PROCESS])
    training.goodput(1e9)
    return max(worst, training.durable.worst - limits[MACHINE])


def lost_by_a_new_run(lives: Sequence[float]) -> float:
    """What the last failure of a script costs that somebody tries out, `kill -9` after so many seconds of training
    each, by the interval that the budget pays for: about a half is the least. The mean of ten seeds."""
    return sum(_lost_by_a_new_run(lives, random.Random(seed)) for seed in range(10)) / 10


def _lost_by_a_new_run(lives: Sequence[float], rng: random.Random) -> float:
    stall, restart = 0.02, Restart(dict.fromkeys(BACK, 1.0), 3.0, 0.1)
    gaps = [restart.startup + seconds * rng.uniform(0.9, 1.1) for seconds in lives]
    failures = observed([(at, PROCESS) for at in itertools.accumulate(one + restart.down[PROCESS] for one in gaps)])
    often = {"settings": FrequencySettings(), "step_seconds": 0.01, "stall": stall, "persist": 0.06}
    job = IrregularJob(failures, sum(gaps) + 5.0 * len(gaps), restart, often).run()
    return job.lost[len(lives) - 1][1] / (stall / BUDGET)


def misjudged(job: str) -> float:
    """By how much `ckpt goodput` and `ckpt plan`, whichever errs more, miss the share of useful work on average."""
    with tempfile.TemporaryDirectory() as folder:
        return max(map(abs, errors(job, Path(folder))))


def rows() -> Iterator[Row]:
    for name, (most, plan) in PLANS.items():
        yield Row(f"job: {name}", most, plan.regret)
    yield Row("lost by the first kill, after 30 s, in intervals of the budget", 3.0, lambda: lost_by_a_new_run([30.0]))
    for many in (2, 3, 4, 6):
        name = f"lost by kill {many}, after 14 s each, in intervals of the budget"
        yield Row(name, 1.0, lambda many=many: lost_by_a_new_run([14.0] * many))
    for world in (*WORLDS, THROTTLED):
        most = min(world.regret, BARS.get(world.name, 1.0))
        yield Row(f"regret: {world.name}", most, lambda world=world: regret(world))
    for name, (slow, jitter) in DISTRIBUTIONS.items():
        yield Row(f"interval / optimum: {name}", 1.3, lambda slow=slow, jitter=jitter: off(slow, jitter))
    for what in ("stall", "persist"):
        for factor in (2.0, 3.0, 5.0, 10.0, 30.0):
            yield Row(
                f"snapshots until settled: {what} x {factor:g}",
                6,
                lambda what=what, factor=factor: settled(factor, what),
            )
    for world in (*WORLDS, THROTTLED):
        yield Row(f"overhead of six hours / budget: {world.name}", 1.15, lambda world=world: windows(world)[0])
        yield Row(f"reported less true overhead, points: {world.name}", 0.05, lambda world=world: windows(world)[1])
    for name, slow in SLOWED.items():
        jitter = 0.0 if "Pareto" in name or "log" in name else 0.05
        row = f"reported less true overhead, points, slowed, mean: {name}"
        yield Row(row, 0.1, lambda slow=slow, jitter=jitter: biased(slow, jitter))
    for job in JOBS:
        yield Row(f"ckpt goodput and ckpt plan less the truth: {job}", WITHIN, lambda job=job: misjudged(job))
    yield Row("max_lost_work per class, each fifth failing: steps beyond", 1.2, lost_per_class)


def main(wanted: Sequence[str]) -> int:
    missed = 0
    for row in rows():
        if wanted and not any(part in row.name for part in wanted):
            continue
        began = time.monotonic()
        found = row.measure()
        missed += found > row.most
        mark = "  missed" if found > row.most else ""
        print(f"{row.name:62} {found:9.4f}  at most {row.most:<7g} {time.monotonic() - began:5.1f} s{mark}", flush=True)
    print(f"{missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
