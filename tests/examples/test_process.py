"""The demo's training processes: failures are reported with their output, and nothing is left running."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from demo.process import TrainingFailedError, TrainingProcess

DEADLINE_SECONDS = 60.0

FAMILY = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
print("ready", flush=True)
time.sleep(600)
"""


def wait_for(condition: Callable[[], bool], process: TrainingProcess) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, process.log_tail()
        time.sleep(0.01)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_a_training_that_fails_is_reported_with_the_end_of_its_output(tmp_path: Path) -> None:
    """The reason is in the message, not only in a log file."""
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    failure = pytest.raises(TrainingFailedError, match="status 1:\nno such model")
    with TrainingProcess(command, tmp_path) as process, failure:
        wait_for(lambda: not process.running(), process)


def test_kill_takes_the_group_and_those_that_are_named(tmp_path: Path) -> None:
    """Without being named, a child in a session of its own survives, as the snapshot writer does."""
    with TrainingProcess([sys.executable, "-c", FAMILY], tmp_path) as process:
        wait_for(lambda: "ready" in process.log_tail(), process)
        children = process.descendants()
        assert len(children) == 2
        process.kill()
        wait_for(lambda: len(alive(children)) == 1, process)
        (survivor,) = alive(children)
        survivor.kill()
        with pytest.raises(TrainingFailedError, match=f"status -{signal.SIGKILL.value}"):
            process.running()


def test_leaving_the_context_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C of the demo must not leave trainings behind."""
    with TrainingProcess([sys.executable, "-c", FAMILY], tmp_path) as process:
        wait_for(lambda: "ready" in process.log_tail(), process)
        children = process.descendants()
    assert len(children) == 2
    assert alive(children) == []
