"""Two ranks whose disk is full at the end: both say what is lost, after all of their steps, and none ends with 0."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.checkpointer import Checkpointer
from tests.ranks.launch import Launcher
from tests.ranks.train_full_disk import KINDS, STEPS

SIZE = 2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    made = Launcher("tests.ranks.train_full_disk")
    yield made
    made.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False, timeout=60).returncode:
        pytest.skip("needs to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=60)


def _run(launcher: Launcher, kind: str, disk: Path, tmp_path: Path, **options: Any) -> tuple[list[int], list[str]]:
    """The exit statuses, and the logs."""
    job = {
        "kind": kind,
        "root": str(disk / "run"),
        "trace": str(tmp_path / "trace"),
        "options": {"keep": {"last": 1}, **options},
    }
    launcher.start(job, SIZE, tmp_path / "log", lets_end=True)
    statuses = launcher.join()
    for rank in range(SIZE):
        assert (tmp_path / f"trace.{rank}").read_text().split() == [str(step) for step in range(1, STEPS + 1)]
    return statuses, [(tmp_path / f"log.{rank}").read_text() for rank in range(SIZE)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_ends_with_an_error(kind: str, launcher: Launcher, disk: Path, tmp_path: Path) -> None:
    """The last step is durable nowhere: the rank whose share failed, or else the one that commits, ends with an error
    that says so. An older snapshot is there for the next start.
    """
    statuses, logs = _run(launcher, kind, disk, tmp_path)
    assert any(statuses), logs
    for status, log in zip(statuses, logs, strict=True):
        assert status == int(f"[CKPT602] step {STEPS} is lost, its state is durable nowhere" in log), logs
    with Checkpointer(disk / "run", writer="thread") as ckpt:
        assert [one.step for one in ckpt.snapshots()], "nothing is left"


def test_warn_only_says_it(launcher: Launcher, disk: Path, tmp_path: Path) -> None:
    """On the rank that lost something."""
    statuses, logs = _run(launcher, "plain", disk, tmp_path, on_error="warn")
    assert statuses == [0] * SIZE, logs
    assert any(f"[CKPT602] step {STEPS} is lost" in log for log in logs), logs
