"""DDP in two processes: `kill -9` of a random rank or writer, and all ranks go on exactly."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launch import PATIENCE_SECONDS, Launcher, writers_of

SIZE = 2
EPOCHS = 3
LINES = EPOCHS * 8

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module", params=["train_lightning", "train_accelerate"])
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    """Starts runs of Lightning, then of Accelerate."""
    made = Launcher(f"tests.ranks.{request.param}")
    yield made
    made.close()


def job_of(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "root": str(folder / "run"),
        "trace": str(folder / "trace"),
        "size": SIZE,
        "epochs": EPOCHS,
        "pace": 0.02,
        "seed": 0,
        **changes,
    }


def lines(trace: str, rank: int) -> list[str]:
    path = Path(f"{trace}.{rank}")
    return path.read_text().split("\n")[:-1] if path.exists() else []


def logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-4000:] for path in sorted(folder.glob("log.*")))


@pytest.fixture(scope="module")
def reference(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[str]], Any]:
    """The lines of each rank of a run that is not killed, and its weights."""
    folder = tmp_path_factory.mktemp("reference")
    job = job_of(folder, pace=0.0)
    launcher.start(job, SIZE, folder / "log")
    assert launcher.join() == [0] * SIZE, logs(folder)
    found = [lines(job["trace"], rank) for rank in range(SIZE)]
    assert [len(one) for one in found] == [LINES] * SIZE
    return found, json.loads(Path(job["trace"] + ".end").read_text())


@pytest.mark.parametrize("number", range(6))
def test_a_run_survives_random_kills(
    number: int, tmp_path: Path, launcher: Launcher, reference: tuple[list[list[str]], Any]
) -> None:
    """Two lives end by force: a rank, a writer and then the ranks, or everything at once. The third ends by itself."""
    draw = random.Random(number)
    expected, weights = reference
    reached = 0
    for life in range(3):
        # A script seeds itself for its fresh start; once there is a snapshot the seed must not matter.
        seed = 1000 * life if any((tmp_path / "run" / "snapshots").glob("*.json")) else 0
        job = job_of(tmp_path, trace=str(tmp_path / f"trace{life}"), seed=seed)
        pids = launcher.start(job, SIZE, tmp_path / "log")
        if life < 2:
            wanted = draw.randint(4, 12)
            deadline = time.monotonic() + PATIENCE_SECONDS
            while len(lines(job["trace"], 0)) < wanted and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(draw.uniform(0.0, 0.05))  # a random moment
            victims = draw.choice(["rank", "writers", "all"])
            doomed = {"rank": [draw.choice(pids)], "writers": writers_of(pids), "all": pids + writers_of(pids)}[victims]
            for pid in doomed:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if victims == "writers":
                time.sleep(0.2)
                with suppress(ProcessLookupError):
                    os.kill(draw.choice(pids), signal.SIGKILL)
        statuses = launcher.join()
        if life == 2:
            assert statuses == [0] * SIZE, logs(tmp_path)
        starts = set()
        for rank in range(SIZE):
            done = lines(job["trace"], rank)
            if not done:
                continue
            start = expected[rank].index(done[0])
            starts.add(start)
            assert start <= reached, f"life {life} skipped from {reached} to {start}"
            assert done == expected[rank][start : start + len(done)], f"life {life} of rank {rank}: {logs(tmp_path)}"
        assert len(starts) <= 1, "the ranks resumed at different places"
        reached = max([reached, *(start + len(lines(job["trace"], 0)) for start in starts)])
    assert reached == LINES
    assert json.loads((tmp_path / "trace2.end").read_text()) == weights
