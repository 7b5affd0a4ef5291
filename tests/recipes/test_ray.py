"""Ray Train: a worker is killed, Ray starts another one, and the run goes on exactly."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.recipes.lives import Life, arguments, lines, pid, trained, unbroken, until
from tests.support.curves import need

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_ray_starts_a_killed_worker_again(tmp_path: Path) -> None:
    """Twice, and each step that was trained again was the same."""
    need("ray")
    command = [sys.executable, "-m", "tests.recipes.ray_driver", tmp_path / "ray", *arguments(tmp_path)]
    life = Life(command, tmp_path, RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="300")
    for number in (1, 2):
        until(lambda number=number: sum("process" in line for line in lines(tmp_path)) == number, life.log)
        begun = len(lines(tmp_path))
        until(lambda begun=begun: len(lines(tmp_path)) >= begun + 8, life.log)
        os.kill(pid(tmp_path), signal.SIGKILL)
    assert life.ends() == 0, life.log.read_text()
    assert sum("process" in line for line in lines(tmp_path)) == 3
    assert trained(tmp_path) == unbroken()
