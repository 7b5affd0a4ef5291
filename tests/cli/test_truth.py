"""`ckpt goodput` and `ckpt plan` beside a simulated run of which all is known, given no more than its record."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from click.testing import CliRunner

from ckpt_engine.cli.main import commands
from ckpt_engine.frequency.failures import observed, poisson
from ckpt_engine.frequency.policy import FrequencySettings, MemoryRhythm
from ckpt_engine.observe.events import MACHINE, PROCESS, SITE
from ckpt_engine.store import names
from ckpt_engine.tools.simulate import Restart
from ckpt_engine.writer.attempts import AttemptHistory, encode_attempts
from tests.frequency.rig import IrregularJob

DAYS = 5
SECONDS = DAYS * 86400.0
WITHIN = 0.002
SEEDS = 6
RESTART = Restart({PROCESS: 25.0, MACHINE: 400.0, SITE: 400.0}, startup=90.0, restore=40.0)
JOBS: dict[str, tuple[float, dict[str, Any]]] = {
    "calm": (11000.0, {"step_seconds": 20.0, "stall": 0.3, "persist": 20.0}),
    "dear": (11000.0, {"step_seconds": 10.0, "stall": 8.0, "persist": 60.0}),
    "jitter and a slowdown": (11000.0, {"step_seconds": 16.0, "jitter": 0.1, "slowdown": 1.05}),
    "slow steps": (11000.0, {"step_seconds": 8.0, "slow": lambda step, _: 10.0 if step % 50 == 0 else 1.0}),
    "each half hour": (1800.0, {"step_seconds": 16.0, "stall": 0.5, "persist": 8.0}),
    "hardly ever": (40 * 86400.0, {"step_seconds": 16.0, "stall": 1.0}),
    "memory": (11000.0, {"step_seconds": 10.0, "stall": 4.0, "persist": 30.0, "memory_stall": 0.2}),
}


def errors(name: str, folder: Path, seeds: int) -> list[float]:
    """By how much the record and the plan of a job miss its true share of useful work, each: the mean of several jobs.

    Chance alone gives one job with jitter a standard deviation of 0.001: of those the quick suite has two.
    """
    found = [useful_shares(name, folder / f"{seed}", seed) for seed in range(seeds)]
    return [fmean(one[said] - one[0] for one in found) for said in (1, 2)]


def useful_shares(name: str, folder: Path, seed: int) -> tuple[float, float, float]:
    """The share of useful work of a job: in truth, by its record, and as planned for the same failures."""
    mtbf, training = JOBS[name]
    drawn = poisson(mtbf, random.Random(seed), {PROCESS: 0.75, MACHINE: 0.25})
    gaps, kinds = zip(*itertools.islice(drawn, 9 + int(2 * SECONDS / mtbf)), strict=True)
    trace = list(zip(itertools.accumulate(gaps), kinds, strict=True))
    memory = MemoryRhythm() if name == "memory" else None
    training = {"settings": FrequencySettings(memory=memory, slots=2 if memory else 1), **training}
    job = IrregularJob(observed(trace), SECONDS, RESTART, training, seed=seed).run()
    (run := folder / "run").mkdir(parents=True)
    (run / names.ATTEMPTS).write_bytes(encode_attempts(AttemptHistory(tuple(job.rows))))
    (folder / "ckpt.yaml").write_text(f"tiers: [{'memory, ' if memory else ''}{run}]")
    (folder / "failures.txt").write_text("\n".join(f"{at} {kind}" for at, kind in trace))
    same = ("--failures", f"{folder / 'failures.txt'}", "--days", f"{DAYS}", "--compare", "")
    recorded = _answer("goodput", f"{run}")["goodput"]
    return job.goodput, recorded, _answer("plan", f"{folder / 'ckpt.yaml'}", *same)["policies"][0]["goodput"]


def _answer(*arguments: str) -> Any:
    done = CliRunner().invoke(commands, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout[done.stdout.index("{") :])  # click 8.1 mixes it with the error stream


@pytest.mark.cells(2)
@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        *((name, 2 if "jitter" in options else 1) for name, (_, options) in JOBS.items()),
        *(pytest.param(name, SEEDS, marks=pytest.mark.slow) for name in JOBS),
    ],
)
def test_both_are_within_two_thousandths(name: str, seeds: int, tmp_path: Path) -> None:
    """What the record and the plan say differs from the true share of useful work by 0.002 at most, on average."""
    assert max(map(abs, errors(name, tmp_path, seeds))) <= WITHIN
