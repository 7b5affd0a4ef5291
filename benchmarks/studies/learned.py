"""Whether a policy that learns beats the controller: examples/plugins/learned_policy.py, on seeds new to it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.run import Bench, Scale
from benchmarks.studies.hidden_rates import SIX_HOURS_MOST, Policy
from benchmarks.studies.hidden_rates import WORLDS as HIDDEN
from benchmarks.values import BarResult, Check, Grid, Series
from ckpt_engine.frequency.policy import FrequencySettings, MemoryRhythm
from ckpt_engine.tools.simulate import SimulatedJob
from tests.frequency.rig import IrregularTraining
from tests.frequency.scenarios import BUDGET, DAY, PLANS, THROTTLED, Plan
from tests.frequency.test_irregular import MTBF_SECONDS, WORLDS, World

TITLE = "A policy that learns, beside the controller"
PLUGINS = Path(__file__).resolve().parents[2] / "examples" / "plugins"
POLICIES = ("Learned", "Sampled")
"""Of learned_policy.py; beside them the cadence of this project."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is simulated: seeds, at most so many days of a job, and steps."""

    seeds: tuple[int, ...]
    days: float
    steps: int


SIZES = {
    Scale.FULL: Size((100, 101, 102), 8.0, 15000),
    Scale.QUICK: Size((100,), 2.0, 5000),
    Scale.TINY: Size((100,), 0.2, 500),
}


def run(bench: Bench) -> BarResult:
    """All scenarios, each policy with the same seeds."""
    size = SIZES[bench.scale]
    found = {
        name: {policy: _all(measure, policy, size.seeds) for policy in ("", *POLICIES)}
        for name, measure in _with(bench, _scenarios(size))
    }
    gains = {
        name: {one: [b - a for a, b in zip(by[""], by[one], strict=True)] for one in POLICIES}
        for name, by in found.items()
    }
    rows = tuple(
        (name, f"{mean(found[name]['']):.4f}", *(_signed(gains[name][one]) for one in POLICIES)) for name in found
    )
    hidden = [_hidden(name, size) for name, _ in _with(bench, HIDDEN)]
    better = {one: sum(mean(each[one]) > 0.0 for each in gains.values()) for one in POLICIES}
    return BarResult(
        "study-learned",
        TITLE,
        {
            "scenarios": "of tests/frequency/scenarios.py: whole jobs with failures and restarts, and irregular steps",
            "seeds": f"{', '.join(map(str, size.seeds))}; the policy was made with others. Jobs of {size.days:g} days "
            f"at most, {size.steps} irregular steps",
            "gain": "share of useful work, less that of the controller with the same seed: mean (least to most)",
        },
        tuple(
            Check(f"{one}: scenarios in which it is better", f"of {len(found)}", "at least", len(found), (better[one],))
            for one in POLICIES
        ),
        tuple(
            Series(f"gain of {one}, all scenarios", "points", tuple(100 * mean(each[one]) for each in gains.values()))
            for one in POLICIES
        ),
        (
            "Only a policy that is better in all scenarios would take the place of the controller.",
            "The oracles know each failure rate and each cost, now and later: the most that learning could win. One "
            "spends the budget whenever that is best, as long as the whole run keeps it; the other one never more than "
            "1.25 times the budget, which is promised of any six hours.",
        ),
        (
            Grid("Goodput", ("scenario", "controller", *(f"{one}: gain" for one in POLICIES)), rows),
            Grid(
                "Goodput where rates follow what no rule can know",
                (
                    *("scenario", "controller", "oracle: gain", "oracle within the promise: gain"),
                    *(f"{one}: gain" for one in POLICIES),
                ),
                tuple(hidden),
            ),
        ),
    )


def _hidden(name: str, size: Size) -> tuple[str, ...]:
    policies: tuple[Policy | float, ...] = (
        lambda _: None,
        1.0,
        SIX_HOURS_MOST,
        *(partial(_rhythm, one) for one in POLICIES),
    )
    found = [[HIDDEN[name](size.days, policy, seed) for seed in size.seeds] for policy in policies]
    gains = [[b - a for a, b in zip(found[0], one, strict=True)] for one in found[1:]]
    return name, f"{mean(found[0]):.4f}", *map(_signed, gains)


def _signed(gains: list[float]) -> str:
    return f"{mean(gains):+.4f} ({min(gains):+.4f} to {max(gains):+.4f})"


def _with(bench: Bench, scenarios: Mapping[str, Any]) -> Any:
    for number, (name, measure) in enumerate(scenarios.items(), 1):
        bench.say(f"{number}/{len(scenarios)} {name}")
        yield name, measure


def _scenarios(size: Size) -> dict[str, Callable[[str, int], float]]:
    jobs = {f"job: {name}": partial(_job, plan, size.days) for name, (_, plan) in PLANS.items()}
    return jobs | {f"steps: {world.name}": partial(_world, world, size.steps) for world in (*WORLDS, THROTTLED)}


def _all(measure: Callable[[str, int], float], policy: str, seeds: tuple[int, ...]) -> list[float]:
    return [measure(policy, seed) for seed in seeds]


def _job(plan: Plan, days: float, policy: str, seed: int) -> float:
    """The share of useful work of a whole job."""
    memory = MemoryRhythm() if plan.memory else None
    settings = FrequencySettings(overhead=BUDGET, mtbf_seconds=plan.mtbf, memory=memory)
    training = {
        "settings": settings,
        "step_seconds": plan.step_seconds,
        "stall": plan.stall,
        "persist": plan.persist,
        "memory_stall": plan.memory_stall,
    }
    seconds = min(plan.days, days) * DAY
    rhythm = _rhythm(policy, settings)
    return SimulatedJob(plan.drawn(seed), seconds, plan.restart, training, plan.tiers, rhythm).run().goodput


def _world(world: World, steps: int, policy: str, seed: int) -> float:
    settings = FrequencySettings(overhead=BUDGET, mtbf_seconds=MTBF_SECONDS)
    rhythm = _rhythm(policy, settings)
    training = IrregularTraining(settings, slow=world.slow, seed=seed, rhythm=rhythm, **world.options()).run(steps)
    return training.goodput(MTBF_SECONDS)


def _rhythm(policy: str, settings: FrequencySettings) -> Any:
    """What drives: None is the cadence."""
    if not policy:
        return None
    if str(PLUGINS) not in sys.path:
        sys.path.append(str(PLUGINS))
    return partial(getattr(importlib.import_module("learned_policy"), policy), settings)
