"""`kill -9` of a Lightning run with a memory tier: it resumes from memory, to the run that was never killed."""

from __future__ import annotations

import json
import random
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lightning.cases import CASES
from tests.lightning.runs import fit
from tests.lightning.test_kill import Trainers, kill_after, log, read
from tests.preempt.waiting import WaitingTrainers

MOST_LOST = 2
PACE_SECONDS = 0.01


@pytest.fixture(scope="module")
def lightning_trainers() -> Iterator[Trainers]:
    server = WaitingTrainers()
    yield server
    server.close()


def survive(name: str, kills: list[tuple[int, float]], folder: Path, trainers: Trainers) -> list[str]:
    """Live through the kills (entries written before, seconds after that); the places each life resumed from."""
    case = CASES[name]
    reference = fit(replace(case))
    expected = [repr(entry) for entry in reference.trace]
    expected.append(repr(("digest", json.dumps(reference.digest, sort_keys=True))))
    tiers: list[Any] = [{"url": "memory", "every_n_steps": 1}, str(folder / "run")]
    reached, resumed = 0, []
    for life, kill in enumerate([*kills, None]):
        trace = folder / f"{life}.trace"
        job = {
            "case": name,
            "root": "",
            "options": {"tiers": tiers, "every_n_steps": 5},
            "trace": str(trace),
            "seed": 1000 * life if reached else 0,
            "pace": PACE_SECONDS,
            "patient": True,
        }
        if kill is not None:
            job["wait_after"] = kill[0] + 4  # a busy machine may kill it late
        pid = trainers.start(job)
        try:
            if kill is not None:
                kill_after(pid, trace, *kill)
        finally:
            status = trainers.join()
        assert status in ((-signal.SIGKILL, 0) if kill is not None else (0,)), log(trace)
        found = re.search(r"resumed from memory, (\d+) steps? lost", log(trace))
        resumed.append(found[0] if found else "")
        done = read(trace)
        if not done:
            continue
        start = next(i for i, line in enumerate(expected) if line == done[0])
        assert start <= reached, f"life {life} skipped from {reached} to {start}"
        lost = sum(line.startswith("('train'") for line in expected[start:reached])
        assert lost <= MOST_LOST, f"life {life} lost {lost} steps: {log(trace)}"
        if found:
            assert int(found[1]) in (lost, lost + 1), log(trace)
        assert done == expected[start : start + len(done)], f"life {life}, resumed at {start}: {log(trace)}"
        reached = max(reached, start + len(done))
        if reached == len(expected):
            break
    assert reached == len(expected)
    return resumed


@pytest.mark.timeout(900)
def test_a_lightning_run_loses_one_batch_and_resumes_exactly(tmp_path: Path, lightning_trainers: Trainers) -> None:
    """Killed twice; the second life says where it comes from, and the report beside the snapshots does too."""
    moment = random.SystemRandom()
    kills = [(moment.randint(6, 12), moment.uniform(0, 0.02)) for _ in range(2)]
    resumed = survive("validation within epochs", kills, tmp_path, lightning_trainers)
    assert any(resumed), "no life has resumed from memory"
    report = json.loads((tmp_path / "run" / "resume-report.json").read_text())
    assert not resumed[-1] or resumed[-1] in report["notes"]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_random_lightning_kills(number: int, tmp_path: Path, lightning_trainers: Trainers) -> None:
    """Loaders with workers, averaged weights, schedules, metrics: all of them from memory."""
    draw = random.Random(number)
    name = draw.choice(["two workers", "stateful loader", "scheduler per step", "fused optimizer", "shuffled"])
    kills = [(draw.randint(5, 14), draw.uniform(0, 0.04)) for _ in range(draw.randint(1, 3))]
    survive(name, kills, tmp_path, lightning_trainers)
