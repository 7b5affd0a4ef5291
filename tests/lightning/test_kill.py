"""`kill -9` at random moments: what is left resumes to the run that was never killed."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.lightning import loader_cases
from tests.lightning.cases import CASES, LOADERS
from tests.lightning.runs import fit
from tests.support.trainers import ForkServer, signal_after, wait_for_entries
from tests.support.trainers import log as log
from tests.support.trainers import read as read

PACE_SECONDS = 0.01


class Trainers(ForkServer):
    """Trains with Lightning; jobs are those of `tests.lightning.train_script`."""

    def __init__(self) -> None:
        super().__init__("tests.lightning.train_script")


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    server = Trainers()
    yield server
    server.close()


def kill_after(pid: int, path: Path, entries: int, delay_seconds: float) -> None:
    """Kill the trainer some time after its trace has so many entries, or when it is done before."""
    wait_for_entries(pid, path, entries)
    signal_after(pid, delay_seconds)


@dataclass(frozen=True)
class Plan:
    """One life of a run.

    Args:
        case: of `CASES`, or of those of `loader_cases`.
        kills: (entries written before the kill, seconds after that) for each process that dies.
        trainer: more arguments of the trainer.
    """

    case: str
    kills: tuple[tuple[int, float], ...]
    trainer: dict[str, Any]


def assert_survives(plan: Plan, folder: Path, trainers: Trainers) -> None:
    """All processes together are the uninterrupted run: each continues it exactly from where it resumed."""
    case = {**CASES, **loader_cases.CASES}[plan.case]
    case = replace(case, trainer={**case.trainer, **plan.trainer})
    reference = fit(case)
    expected = [repr(entry) for entry in reference.trace]
    expected.append(repr(("digest", json.dumps(reference.digest, sort_keys=True))))
    reached = 0
    for life, kill in enumerate([*plan.kills, None]):
        trace = folder / f"{life}.trace"
        job = {
            "case": plan.case,
            "trainer": plan.trainer,
            "root": str(folder / "run"),
            "trace": str(trace),
            # A script seeds itself for its fresh start; once there is a snapshot the seed must not matter.
            "seed": 1000 * life if any((folder / "run" / "snapshots").glob("*.json")) else 0,
            "pace": PACE_SECONDS,
        }
        pid = trainers.start(job)
        try:
            if kill is not None:
                kill_after(pid, trace, *kill)
        finally:
            status = trainers.join()
        assert status in ((-signal.SIGKILL, 0) if kill is not None else (0,)), log(trace)
        done = read(trace)
        if not done:
            continue
        start = next(i for i, line in enumerate(expected) if line == done[0])
        assert start <= reached, f"life {life} skipped from {reached} to {start}"
        assert done == expected[start : start + len(done)], f"life {life}, resumed at {start}: {log(trace)}"
        reached = max(reached, start + len(done))
        if reached == len(expected):
            break  # it was done before it could be killed
    assert reached == len(expected)


@pytest.mark.parametrize(
    "name",
    [
        "two workers",
        pytest.param("validation within epochs", marks=pytest.mark.slow),
        pytest.param("accumulation of 2", marks=pytest.mark.slow),
    ],
)
def test_a_run_survives_two_kills(name: str, tmp_path: Path, trainers: Trainers) -> None:
    """Killed in the first and in the second epoch, at moments that differ from run to run."""
    moment = random.SystemRandom()
    kills = tuple((moment.randint(4, 14), moment.uniform(0, 0.03)) for _ in range(2))
    assert_survives(Plan(name, kills, {}), tmp_path, trainers)


def randomised(number: int) -> Plan:
    """Loader kind x accumulation x one to three kills."""
    draw = random.Random(number)
    name = draw.choice(sorted(LOADERS))
    accumulate = draw.choice((1, 1, 2, 4))
    kills = tuple((draw.randint(1, 16), draw.uniform(0, 0.04)) for _ in range(draw.randint(1, 3)))
    return Plan(name, kills, {"accumulate_grad_batches": accumulate})


@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_randomised_kills(number: int, tmp_path: Path, trainers: Trainers) -> None:
    """Forty lives with one to three kills each."""
    assert_survives(randomised(number), tmp_path, trainers)
