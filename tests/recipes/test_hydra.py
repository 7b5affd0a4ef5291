"""Hydra makes a folder for each start, with files of its own: docs/launchers.md says where the root is then."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.recipes.lives import REPOSITORY, Life, lines, trained, unbroken
from tests.support.curves import need

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def start(folder: Path, root: Path, pace: float = 0.0) -> Life:
    app = [sys.executable, REPOSITORY / "tests" / "recipes" / "hydra_app.py", f"hydra.run.dir={folder / 'run'}"]
    return Life([*app, f"+root={root}", f"+lines={folder / 'lines'}", f"+pace={pace}"], folder)


def test_a_root_below_the_folder_of_the_run_goes_on(tmp_path: Path) -> None:
    """Killed and started again: `hydra.run.dir` is the same, and so is the root in it."""
    need("hydra")
    life = start(tmp_path, tmp_path / "run" / "ckpt", 0.05)
    while len(lines(tmp_path)) < 8 or not any((tmp_path / "run" / "ckpt" / "snapshots").glob("*.json")):
        assert life.process.poll() is None, life.log.read_text()
    os.kill(life.process.pid, signal.SIGKILL)
    assert life.ends() == -signal.SIGKILL
    assert start(tmp_path, tmp_path / "run" / "ckpt").ends() == 0, life.log.read_text()
    assert "resumed at step" in life.log.read_text()
    assert trained(tmp_path) == unbroken()


def test_the_folder_of_the_run_itself_is_refused_with_the_one_to_take(tmp_path: Path) -> None:
    """Because Hydra's files are in it."""
    need("hydra")
    life = start(tmp_path, tmp_path / "run")
    assert life.ends() == 1
    assert f"give the run a folder of its own, such as file://{tmp_path}/run/ckpt" in life.log.read_text()
