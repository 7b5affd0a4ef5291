"""Kills while parity is made, and in a repair, a scrub and a copy: nothing is lost, and the next one ends the work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 70
"""Of each kind; with those of `tests/store/test_rotation_killed*.py` there are more than 300."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("kind", ["run", "repair", "scrub", "cp"])
def test_kills_lose_nothing_and_the_next_one_ends_the_work(tmp_path: Path, kind: str) -> None:
    """Drawn from all calls to the disk: of a run that makes parity, and of commands at a place with damage."""
    command = [sys.executable, "-m", "tests.parity.kills", kind, str(KILLS), "1", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600)
    log = (tmp_path / "log").read_text()
    assert done.returncode == 0, f"{done.stderr}{log}"
    count = json.loads(done.stdout)
    assert count["kills"] >= KILLS * 0.9, count
    assert (count["lost"], count["wrong"], count["stuck"]) == (0, 0, 0), f"{count}{log}"
