"""Training processes that are signalled: they finish the batch, save it, say so, and end with a sensible status."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.lightning.test_kill import Trainers
from tests.preempt.lives import Life, uninterrupted

RARELY: dict[str, Any] = {"every_n_steps": 10**9}


def assert_continues(first: Life, second: Life, case: str) -> None:
    """Both lives together are the uninterrupted run, and not one batch is trained twice."""
    assert second.join() == 0, second.log
    assert [*first.lines, *second.lines] == list(uninterrupted(case)), first.log + second.log


@pytest.mark.parametrize(
    "case", ["accumulation of 4", pytest.param("validation within epochs", marks=pytest.mark.slow)]
)
def test_sigterm_loses_nothing(case: str, tmp_path: Path, trainers: Trainers) -> None:
    """143, as a shell reports it; the next life goes on with the next batch, bit for bit."""
    first = Life(trainers, tmp_path, case, options=RARELY, wait_after=5)
    first.reaches(5)
    os.kill(first.pid, signal.SIGTERM)
    first.go()
    assert first.join() == 143, first.log
    assert len(first.steps) == 1
    assert "SIGTERM: a snapshot at the end of this step, then training stops; 30 s left" in first.log
    assert "is durable on" in first.log
    assert_continues(first, Life(trainers, tmp_path, case, 1, options=RARELY), case)


def test_the_first_ctrl_c_saves(tmp_path: Path, trainers: Trainers) -> None:
    """Lightning ends the process with 1 after an interrupt, as always."""
    case = "shuffled"
    first = Life(trainers, tmp_path, case, options=RARELY, wait_after=5)
    first.reaches(5)
    os.kill(first.pid, signal.SIGINT)
    first.go()
    assert first.join() == 1, first.log
    assert "press it again to stop at once" in first.log
    assert_continues(first, Life(trainers, tmp_path, case, 1, options=RARELY), case)


def test_the_second_ctrl_c_waits_for_nothing(tmp_path: Path, trainers: Trainers) -> None:
    """A snapshot that takes a minute is left; what was durable before stays."""
    life = Life(
        trainers, tmp_path, "shuffled", options={**RARELY, "writer": "thread"}, write_seconds=60.0, wait_after=5
    )
    life.reaches(5)
    os.kill(life.pid, signal.SIGINT)
    life.go()
    life.until(lambda: "is tried on" in life.log)
    os.kill(life.pid, signal.SIGINT)
    assert life.join() == 1, life.log
    assert life.steps == []
    assert life.log.count("Ctrl-C again: training stops at once; no snapshot is durable on") == 1


def test_sigusr1_counts_when_it_is_asked_for(tmp_path: Path, trainers: Trainers) -> None:
    """As schedulers send it ahead of the end; 138 is 128 and its number."""
    options = {**RARELY, "preemption": {"signals": ["SIGUSR1"], "grace": "10 s"}}
    life = Life(trainers, tmp_path, "shuffled", options=options, wait_after=5)
    life.reaches(5)
    os.kill(life.pid, signal.SIGUSR1)
    life.go()
    assert life.join() == 128 + signal.SIGUSR1, life.log
    assert len(life.steps) == 1


@pytest.mark.long
def test_a_stop_file_stops_the_run(tmp_path: Path, trainers: Trainers) -> None:
    """It may stay there: the next life is not stopped by it."""
    case, file = "shuffled", tmp_path / "STOP"
    options = {**RARELY, "preemption": {"sources": [{"file": str(file), "every": 0.01}]}}
    first = Life(trainers, tmp_path, case, options=options, wait_after=5)
    first.reaches(5)
    file.touch()
    first.until(lambda: "a snapshot at the end of this step" in first.log)
    first.go()
    assert first.join() == 143, first.log
    assert_continues(first, Life(trainers, tmp_path, case, 1, options=options), case)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_job_is_survived_by_its_step(
    number: signal.Signals, tmp_path: Path, trainers: Trainers
) -> None:
    """Terminals, Slurm and systemd send it to loader workers too, which die of it: the batch that runs is finished."""
    case = "two workers"
    first = Life(trainers, tmp_path, case, options=RARELY, wait_after=5)
    first.reaches(5)
    os.killpg(first.pid, number)
    first.go()
    assert first.join() == (143 if number == signal.SIGTERM else 1), first.log
    assert_continues(first, Life(trainers, tmp_path, case, 1, options=RARELY), case)
