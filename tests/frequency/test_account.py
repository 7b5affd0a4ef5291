"""What the account says of a run against what is true of it, in modelled worlds where the budget decides how often."""

from __future__ import annotations

import itertools
import math
import random
import sys
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import pytest

from ckpt_engine.frequency.measure import quantile
from ckpt_engine.frequency.policy import FrequencySettings
from tests.frequency.rig import IrregularTraining
from tests.frequency.test_irregular import Slow, each, log_normal

BUDGET = 0.01
POINTS = 0.1
"""By how much what is said may differ from the truth, in points."""
SNAPSHOTS = 300
PERSIST = 14.0
STALL = 0.7
SIX_HOURS, STRIDE = 21600.0, 600.0
SURE = 3.0
"""Standard errors that count as chance: of more than a hundred runs none is beyond them by chance."""


def pareto(exponent: float) -> Slow:
    """Steps of mean 1 without a variance at 1.5, and without a third moment at 2.5."""
    return lambda _, rng: rng.paretovariate(exponent) * (exponent - 1.0) / exponent


def epochs(every: int, factor: float) -> Slow:
    """One epoch of so many is slow."""
    return lambda step, _: factor if step // 500 % every == every - 1 else 1.0


def stalls(_: int, rng: random.Random) -> float:
    """One step in a hundred waits ten to a hundred times as long as it takes."""
    return 10.0 ** rng.uniform(1.0, 2.0) if rng.random() < 0.01 else 1.0


JITTER = {"jitter": 0.05}
WORLDS: dict[str, tuple[Slow | None, dict[str, Any]]] = {
    "light tails": (None, {"jitter": 0.1}),
    "log-normal 1": (log_normal(1.0), {}),
    "Pareto 1.5": (pareto(1.5), {}),
    "Pareto 2.5": (pareto(2.5), {}),
    "each second epoch x 2": (epochs(2, 2.0), JITTER),
    "each fourth epoch x 3": (epochs(4, 3.0), JITTER),
    "validation that nothing announces": (each(500, 101.0), JITTER),
    "validation that is announced": (None, {"announced": 100.0, **JITTER}),
    "irregular stalls": (stalls, JITTER),
    "drift": (None, {"step_seconds": lambda time: 1.0 + time / 20000, **JITTER}),
}


@dataclass
class Observed(IrregularTraining):
    """Remembers what only the world knows: how long steps would be without snapshots.

    Args:
        announced: seconds that a validation takes after each 500 steps.
    """

    announced: float = 0.0
    times: list[float] = field(default_factory=list)

    def _trained(self, count: int, clean: float, end: float) -> None:
        super()._trained(count, clean, end)
        self.times.append(clean)
        if self.announced and self.step % 500 == 0:
            self.clock.now += self.announced
            self.origin += self.announced
            self.cadence.exclude(self.announced)


class Found(NamedTuple):
    """Of one run; all but the number of snapshots in points.

    Args:
        unknowable: the standard error that chance gives a slowdown where the distribution of steps without snapshots is
            known, and which steps are next to one: from the logarithms of steps, cut in their tails.
        worst: of six hours.
    """

    snapshots: int
    true: float
    said: float
    unknowable: float
    worst: float

    @property
    def bar(self) -> float:
        return max(POINTS, SURE * self.unknowable)


def run(world: str, slowdown: float, seed: int, snapshots: int = SNAPSHOTS) -> Found:
    slow, options = WORLDS[world]
    settings = FrequencySettings(overhead=BUDGET, mtbf_seconds=600.0)
    training = Observed(settings, stall=STALL, persist=PERSIST, slow=slow, slowdown=slowdown, seed=seed, **options)
    marks = [(0.0, 0.0)]
    while len(training.taken) < snapshots:
        training.run_seconds(STRIDE)
        marks.append((training.elapsed, training.clean_seconds))
    many = int(SIX_HOURS / STRIDE)
    worst = max((end - a) / (clean - b) - 1.0 for (a, b), (end, clean) in zip(marks, marks[many:], strict=False))
    values = (training.true_overhead, training.cadence.overhead_fraction, _unknowable(training), worst)
    return Found(len(training.taken), *(100.0 * one for one in values))


def _unknowable(training: Observed) -> float:
    low, high = quantile(training.times, 0.25) / 2.0, 2.0 * quantile(training.times, 0.75)
    logs = [math.log(min(max(one, low), high)) for one in training.times]
    usual, inside = fmean(logs), fmean(low <= one <= high for one in training.times)
    sums, left = [0.0], PERSIST
    for seconds, log in zip(training.times, logs, strict=True):
        sums[-1] += log - usual
        left -= seconds
        if left <= 0.0:
            sums.append(0.0)
            left = PERSIST
    spread = math.sqrt(fmean((a - b) ** 2 for a, b in itertools.pairwise(sums[:-1])) / 2.0)
    steps = len(logs) / len(sums)
    return spread / (steps * inside) * math.sqrt(len(training.taken)) * PERSIST / training.clean_seconds


def is_true(world: str, slowdown: float, seed: int) -> None:
    """What is said keeps the budget; the truth does, but for what the account may err by."""
    found = run(world, slowdown, seed)
    assert abs(found.said - found.true) <= found.bar
    assert found.said <= 102.0 * BUDGET + max(0.0, found.bar - POINTS)
    assert found.worst <= 125.0 * BUDGET + max(0.0, found.bar - POINTS)


@pytest.mark.parametrize("world", ["light tails", "log-normal 1", "Pareto 1.5", "each second epoch x 2"])
def test_the_account_says_what_a_slowdown_of_five_percent_costs(world: str) -> None:
    """Within a tenth of a point, or what chance leaves unknown, and the budget is kept."""
    is_true(world, 1.05, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 5))
@pytest.mark.parametrize("slowdown", [1.0, 1.05, 1.2])
@pytest.mark.parametrize("world", WORLDS)
def test_the_account_says_what_snapshots_cost(world: str, slowdown: float, seed: int) -> None:
    """In each world, with and without a slowdown."""
    is_true(world, slowdown, seed)


def main(parts: list[str]) -> None:
    """A table of all worlds: `python -m tests.frequency.test_account [SEEDS [WORLD]]`."""
    seeds = int(parts[0]) if parts else 3
    for world in WORLDS:
        if len(parts) > 1 and parts[1] not in world:
            continue
        for slowdown in (1.0, 1.05, 1.2):
            found = [run(world, slowdown, seed) for seed in range(1, seeds + 1)]
            errors = [one.said - one.true for one in found]
            print(
                f"{world:34} x {slowdown:<5g} {min(one.snapshots for one in found)} "
                f"true {fmean(one.true for one in found):5.3f} said {fmean(one.said for one in found):5.3f} "
                f"error {fmean(errors):+.3f}, at most {max(map(abs, errors)):.3f}, "
                f"unknowable {max(one.unknowable for one in found):.3f}, "
                f"run {max(one.true for one in found):5.3f}, six hours {max(one.worst for one in found):5.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
