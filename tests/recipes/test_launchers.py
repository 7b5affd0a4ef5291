"""Real launchers that are stopped or killed, and what becomes of the training they have started."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.recipes.lives import SCRIPT, Life, arguments, gone, lines, pid, trained, unbroken, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", 1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_accelerate_launch_leaves_no_orphan(number: signal.Signals, tmp_path: Path) -> None:
    """It dies of the signal and says nothing to its child, which saves its last step and ends with 143."""
    command = [*ACCELERATE, "--module", SCRIPT, *arguments(tmp_path)]
    life = Life(command, tmp_path)
    life.reaches(6)
    os.kill(life.process.pid, number)
    assert life.ends() == -number
    until(lambda: gone(pid(tmp_path)), life.log)
    assert lines(tmp_path)[-1] == "exit 143", life.log.read_text()
    assert "the end of accelerate" in life.log.read_text()
    stopped = max(trained(tmp_path))
    assert Life(command, tmp_path).ends() == 0, life.log.read_text()
    assert trained(tmp_path) == unbroken()
    steps = [int(line.split()[0]) for line in lines(tmp_path) if line[0].isdigit()]
    assert steps == sorted(set(steps)), f"no step is lost after {stopped}"


def test_the_first_process_of_a_container_stops_in_time(tmp_path: Path) -> None:
    """A process with the number 1 gets no signal that it does not handle; ours handles SIGTERM, as of Kubernetes."""
    if shutil.which("unshare") is None or os.geteuid():
        pytest.skip("unshare(1) as root makes the namespace of process numbers: apt install util-linux")
    script = [sys.executable, "-m", SCRIPT, *arguments(tmp_path)]
    life = Life(["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *script], tmp_path)
    life.reaches(6)
    assert pid(tmp_path) == 1
    (child,) = Path(f"/proc/{life.process.pid}/task/{life.process.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGTERM)
    assert life.ends() == 143, life.log.read_text()
    assert Life(script, tmp_path).ends() == 0, life.log.read_text()
    assert trained(tmp_path) == unbroken()
