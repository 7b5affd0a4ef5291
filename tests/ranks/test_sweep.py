"""Ranks and writers killed at random moments, again and again: every snapshot is whole or absent, and nothing hangs."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from tests.ranks.launch import PATIENCE_SECONDS, Launcher, writers_of
from tests.ranks.train_plain import check

SIZE = 2


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    made = Launcher("tests.ranks.train_plain")
    yield made
    made.close()


def sweep(launcher: Launcher, folder: Path, lives: int, seed: int, size: int = SIZE) -> None:
    """Lives that end by force, each of which must begin no earlier than where the one before was durable."""
    draw = random.Random(seed)
    root = folder / "run"
    durable = 0
    for life in range(lives):
        last = life == lives - 1
        trace = folder / f"trace{life}"
        job = {"root": str(root), "trace": str(trace), "steps": 3 if last else 10_000, "wait_seconds": 8.0}
        pids = launcher.start(job, size, folder / "log")
        if not last:
            wanted, deadline = draw.randint(1, 6), time.monotonic() + PATIENCE_SECONDS
            while said(trace, "durable") < wanted and time.monotonic() < deadline:
                time.sleep(0.002)
            time.sleep(draw.uniform(0.0, 0.03))  # a random moment: in a copy, a write, or between parts and manifest
            kill(pids, draw)
        statuses = launcher.join()
        text = "".join(path.read_text()[-3000:] for path in sorted(folder.glob("log.*")))
        if last:
            assert statuses == [0] * size, text
        lines = Path(f"{trace}.0").read_text().split("\n")[:-1] if Path(f"{trace}.0").exists() else []
        if lines:
            resumed = int(lines[0].split()[1])
            assert resumed >= durable, f"life {life} resumed at {resumed}, and {durable} was durable: {text}"
        durable = max([durable, *(int(line.split()[1]) for line in lines if line.startswith("durable"))])
    with Checkpointer(root) as alone:
        for info in alone.snapshots():
            state = alone.load(step=info.step)
            assert state is not None
            assert check(state, 0) == info.step
    repository = Repository(open_storage(root))
    needed = {name for parsed in repository.ids() for name in repository.files_of(parsed.id)}
    assert {f"data/{file.name}" for file in (root / "data").iterdir() if not file.name.startswith(".")} == needed


def said(trace: Path, word: str) -> int:
    path = Path(f"{trace}.0")
    return path.read_text().count(word) if path.exists() else 0


def kill(pids: list[int], draw: random.Random) -> None:
    """A rank, a writer, both writers, or all; then whatever is left of the ranks, as a launcher does."""
    writers = writers_of(pids)
    kind = draw.choice(["rank", "writer", "writers", "all"])
    doomed = {
        "rank": [draw.choice(pids)],
        "writer": [draw.choice(writers)] if writers else [],
        "writers": writers,
        "all": pids + writers,
    }[kind]
    for pid in doomed:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(draw.choice([0.0, 0.05, 0.5]))
    with suppress(ProcessLookupError):
        os.kill(draw.choice(pids), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_of_two_ranks_survives_kills(launcher: Launcher, tmp_path: Path) -> None:
    """Two lives that end by force, and one that ends by itself."""
    sweep(launcher, tmp_path, 3, 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(10, 15))
def test_many_kills(launcher: Launcher, tmp_path: Path, seed: int) -> None:
    """Each run has ten lives."""
    sweep(launcher, tmp_path, 10, seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(20, 23))
def test_many_kills_of_four_ranks(launcher: Launcher, tmp_path: Path, seed: int) -> None:
    """Each run has eight lives."""
    sweep(launcher, tmp_path, 8, seed, 4)
