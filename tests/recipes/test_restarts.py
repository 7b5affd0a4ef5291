"""What starts a run again: torchrun after a dead rank."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.recipes.lives import SCRIPT, Life, arguments, lines, pid, trained, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_torchrun_starts_all_ranks_again(tmp_path: Path) -> None:
    """A rank is killed, and all go on from the newest snapshot that is whole."""

    def torchrun(folder: Path, pace_seconds: float) -> Life:
        folder.mkdir()
        how = ["--standalone", "--nproc-per-node", 2, "--max-restarts", 3]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *how, "-m", SCRIPT]
        new_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see tests/ranks/machines/test_torchrun.py
        return Life([*torchrun, *arguments(folder, pace_seconds)], folder, **new_store)

    reference = torchrun(tmp_path / "unbroken", 0.0)
    assert reference.ends() == 0, reference.log.read_text()
    life = torchrun(tmp_path / "killed", 0.1)
    life.reaches(6, rank=1)
    os.kill(pid(life.folder, 1), signal.SIGKILL)
    until(lambda: sum("process" in line for line in lines(life.folder)) == 2, life.log)
    assert life.ends() == 0, life.log.read_text()
    assert [trained(life.folder, rank) for rank in (0, 1)] == [trained(reference.folder, rank) for rank in (0, 1)]
