"""`kill -9` at random moments: what is left resumes to the run that was never killed."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.accelerate.runs import train_accelerate
from tests.accelerate.test_exact_resume import CASES
from tests.loop.runs import Case, train_plain
from tests.support.trainers import ForkServer, read, signal_after, wait_for_entries
from tests.support.trainers import log as log_of

EPOCHS = 3


def log(job: Mapping[str, Any]) -> str:
    """What its process has logged."""
    return log_of(str(job["trace"]))


class Trainers(ForkServer):
    """Trains loops; jobs are those of `tests.accelerate.train_script`."""

    def __init__(self) -> None:
        super().__init__("tests.accelerate.train_script")

    def live(
        self, job: Mapping[str, Any], entries: int | None, delay_seconds: float = 0.0, number: int = signal.SIGKILL
    ) -> list[str]:
        """Run one process and signal it some time after its trace has so many entries; what it wrote."""
        expected = (0,) if entries is None else (0, -number) if number == signal.SIGKILL else (128 + number,)
        status, done = self.ends(job, entries, lambda pid: signal_after(pid, delay_seconds, number))
        assert status in expected, log(job)
        return done

    def ends(self, job: Mapping[str, Any], entries: int | None, then: Callable[[int], object]) -> tuple[int, list[str]]:
        """Run one process and do something to it once its trace has so many entries; its status, and what it wrote."""
        pid, trace = self.start(job), Path(str(job["trace"]))
        if entries is not None:
            wait_for_entries(pid, trace, entries)
            then(pid)
        return self.join(), read(trace)


def assert_survives(
    loop: str, name: str, accumulate: int, kills: list[tuple[int, float]], folder: Path, trainers: Trainers
) -> None:
    """All processes together are the uninterrupted run: each continues it exactly from where it resumed."""
    case: Case = replace(CASES[name], accumulate=accumulate, epochs=EPOCHS)
    reference = {"accelerate": train_accelerate, "plain": train_plain}[loop](case, None)
    expected = [repr(entry) for entry in (*reference.trace, ("digest", reference.digest))]
    reached = 0
    for number, kill in enumerate([*kills, (None, 0.0)]):
        job = {
            "loop": loop,
            "case": name,
            "accumulate": accumulate,
            "epochs": EPOCHS,
            "root": str(folder / "run"),
            "trace": str(folder / f"{number}.trace"),
            # A script seeds itself for its fresh start; once there is a snapshot the seed must not matter.
            "seed": 1000 * number if any((folder / "run" / "snapshots").glob("*.json")) else 0,
        }
        done = trainers.live(job, *kill)
        if not done:
            continue
        start = expected.index(done[0])
        assert start <= reached, f"process {number} skipped from {reached} to {start}"
        assert done == expected[start : start + len(done)], f"process {number}, resumed at {start}"
        reached = max(reached, start + len(done))
        if reached == len(expected):
            break  # it was done before it could be killed
    assert reached == len(expected)


@pytest.mark.parametrize("loop", ["accelerate", pytest.param("plain", marks=pytest.mark.slow)])
def test_a_run_survives_two_kills(loop: str, tmp_path: Path, trainers: Trainers) -> None:
    """At moments that differ from run to run; the script that ends never calls close() by itself."""
    moment = random.SystemRandom()
    kills = [(moment.randint(8, 14), moment.uniform(0, 0.03)) for _ in range(2)]
    assert_survives(loop, "evaluation within epochs", 2, kills, tmp_path, trainers)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_randomised_kills(number: int, tmp_path: Path, trainers: Trainers) -> None:
    """Loader kind x accumulation x one to three kills."""
    draw = random.Random(number)
    # With a loader of their own iterator from `prepare`, only tracked runs are the same as each other.
    names = sorted(name for name in CASES if not CASES[name].extra.get("use_stateful_dataloader"))
    kills = [(draw.randint(1, 16), draw.uniform(0, 0.04)) for _ in range(draw.randint(1, 3))]
    assert_survives("accelerate", draw.choice(names), draw.choice((1, 1, 2, 4)), kills, tmp_path, trainers)
