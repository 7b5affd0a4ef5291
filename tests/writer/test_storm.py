"""Real `kill -9` of trainers and writers at random moments: no bad state, and nothing acknowledged is lost."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import interpreters
from tests.writer.staged import WAIT_SECONDS, check_all
from tests.writer.test_process import REPOSITORY, gone
from tests.writer.trainer import STORM_KEEP


def rows(log: Path) -> list[dict[str, Any]]:
    """The whole lines of a log."""
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def storm(folder: Path, kills: int, seed: int, *, far: Path | None = None) -> None:
    """Kill the trainer, the writer, or both, at random moments, and check the run each time no process writes it.

    Args:
        far: root of a further tier.
    """
    plan = ["storm"] if far is None else ["storm-tiers", str(far)]
    copied = set()
    chance = random.Random(seed)
    root, log = folder / "run", folder / "log"
    done = acknowledged = 0
    while done < kills:
        begun = len(rows(log))
        with (folder / "stderr").open("w") as stderr:
            command = [sys.executable, "-m", "tests.writer.trainer", str(root), str(log), *plan]
            trainer = interpreters.Popen(command, cwd=REPOSITORY, stdout=stderr, stderr=stderr)
        try:
            while trainer.poll() is None and done < kills:
                # A moment counted in what has happened, plus a little time: random on a machine of any speed.
                seen, wanted = len(rows(log)), chance.choice([0, 1, 2, 4, 8, 16])
                while trainer.poll() is None and len(rows(log)) < seen + wanted:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        trainer.wait(0.002)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    trainer.wait(chance.uniform(0.0, 0.03))
                writers = [row["writer"] for row in rows(log)[begun:] if "writer" in row]
                victims = chance.choice([[trainer.pid], writers[-1:], [*writers[-1:], trainer.pid]])
                for pid in victims:
                    kill(pid)
                done += bool(victims)
                if trainer.pid in victims:
                    break
        finally:
            kill(trainer.pid)
            assert trainer.wait(WAIT_SECONDS) == -signal.SIGKILL, (folder / "stderr").read_text()
        for row in rows(log)[begun:]:
            assert "writer" not in row or gone(row["writer"])
        infos = check_all(root)
        ids = [info.id for info in infos]
        acks = [row["id"] for row in rows(log) if "id" in row]
        for snapshot in acks[-STORM_KEEP:]:
            newer = sum(1 for other in ids if other > snapshot)
            assert snapshot in ids or newer >= STORM_KEEP, f"{snapshot} was acknowledged and is lost: {ids}"
        acknowledged = len(acks)
        copied |= {info.id for info in check_all(far)} if far else set()
    assert far is None or len(copied) > kills / 4
    assert acknowledged > kills / 4  # else the storm never let anything happen


def test_ten_kills(tmp_path: Path) -> None:
    """A short storm of kills."""
    storm(tmp_path, kills=10, seed=1)


@pytest.mark.slow
def test_ten_kills_with_a_further_tier(tmp_path: Path) -> None:
    """Copies that are interrupted leave whole snapshots only, on each tier."""
    storm(tmp_path, kills=10, seed=3, far=tmp_path / "far")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_kills_with_a_further_tier(tmp_path: Path) -> None:
    """A long storm over two tiers."""
    storm(tmp_path, kills=240, seed=4, far=tmp_path / "far")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_kills(tmp_path: Path) -> None:
    """A long storm of kills."""
    storm(tmp_path, kills=240, seed=2)
