"""`kill -9` of loops with a memory tier: they resume from memory, to the run that was never killed."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.accelerate.runs import train_accelerate
from tests.accelerate.test_exact_resume import CASES
from tests.accelerate.test_kill import Trainers, log
from tests.loop.runs import EPOCHS, train_plain

MOST_LOST = 2
"""Steps, at the seam of two epochs."""
LOOPS = {"accelerate": train_accelerate, "plain": train_plain}


@pytest.fixture(scope="module")
def loop_trainers() -> Iterator[Trainers]:
    server = Trainers()
    yield server
    server.close()


def survive(
    loop: str, name: str, accumulate: int, kills: list[tuple[int, float]], folder: Path, trainers: Trainers
) -> list[str]:
    """Live through the kills (entries written before, seconds after that); the places each life resumed from."""
    case = replace(CASES[name], accumulate=accumulate, epochs=EPOCHS)
    reference = LOOPS[loop](case, None)
    expected = [repr(entry) for entry in (*reference.trace, ("digest", reference.digest))]
    reached, resumed = 0, []
    for life, kill in enumerate([*kills, (None, 0.0)]):
        job: dict[str, Any] = {
            "loop": loop,
            "case": name,
            "accumulate": accumulate,
            "epochs": EPOCHS,
            "root": "",
            "trace": str(folder / f"{life}.trace"),
            "seed": 1000 * life if reached else 0,
            "options": {
                "tiers": [{"url": "memory", "every_n_steps": 1}, str(folder / "run")],
                "every_n_steps": 10**9,
            },
        }
        done = trainers.live(job, *kill)
        found = re.search(r"resumed from memory, (\d+) steps? lost", log(job))
        resumed.append(found[0] if found else "")
        if not done:
            continue
        start = expected.index(done[0])
        assert start <= reached, f"life {life} skipped from {reached} to {start}"
        lost = sum(line.startswith("('train'") for line in expected[start:reached])
        assert lost <= MOST_LOST * accumulate, f"life {life} lost {lost} batches: {log(job)}"
        assert done == expected[start : start + len(done)], f"life {life}, resumed at {start}: {log(job)}"
        reached = max(reached, start + len(done))
        if reached == len(expected):
            break  # it was done before it could be killed
    assert reached == len(expected)
    return resumed


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["accelerate", "plain"])
def test_a_loop_loses_one_step_and_resumes_exactly_from_memory(
    loop: str, tmp_path: Path, loop_trainers: Trainers
) -> None:
    """Nothing was durable when it was killed: the next life has all from the writer's memory, and says so.

    At the seam of two epochs it is two steps, because no snapshot is taken there.
    """
    moment = random.SystemRandom()
    kills = [(moment.randint(8, 12), moment.uniform(0, 0.02))]
    resumed = survive(loop, "shuffled", 1, kills, tmp_path, loop_trainers)
    assert resumed[-1].startswith("resumed from memory")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_random_kills_of_loops(number: int, tmp_path: Path, loop_trainers: Trainers) -> None:
    """Loaders with workers, evaluations, accumulation: all of them from memory."""
    draw = random.Random(number)
    name = draw.choice(["two workers", "evaluation within epochs", "shuffled", "own generator"])
    kills = [(draw.randint(6, 14), draw.uniform(0, 0.04)) for _ in range(draw.randint(1, 2))]
    survive(draw.choice(sorted(LOOPS)), name, draw.choice((1, 2)), kills, tmp_path, loop_trainers)
