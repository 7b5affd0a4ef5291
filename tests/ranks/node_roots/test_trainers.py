"""Lightning and Accelerate with a folder for each rank: `kill -9` of one or of everything, and all go on exactly."""

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
from tests.ranks.test_kill import LINES, SIZE, job_of, lines, logs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module", params=["train_lightning", "train_accelerate"])
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    """Starts runs of Lightning, then of Accelerate."""
    made = Launcher(f"tests.ranks.{request.param}")
    yield made
    made.close()


def have_something(folder: Path) -> bool:
    """Whether all ranks have their shares of some snapshot."""
    found = [{path.name for path in (folder / f"run{rank}" / "snapshots").glob("*.json")} for rank in range(SIZE)]
    return bool(set.intersection(*found))


@pytest.mark.parametrize("number", range(2))
def test_a_run_with_a_folder_for_each_rank_survives_kills(number: int, tmp_path: Path, launcher: Launcher) -> None:
    """Three lives end by force; each goes on where all folders have something, and the lines are those of no kill."""
    reference = job_of(tmp_path, trace=str(tmp_path / "reference"), pace=0.0, root=str(tmp_path / "whole"))
    launcher.start(reference, SIZE, tmp_path / "log")
    assert launcher.join() == [0] * SIZE, logs(tmp_path)
    expected = [lines(reference["trace"], rank) for rank in range(SIZE)]
    draw = random.Random(number)
    reached = 0
    for life in range(4):
        seed = 1000 * life if have_something(tmp_path) else 0
        job: dict[str, Any] = job_of(
            tmp_path, trace=str(tmp_path / f"trace{life}"), seed=seed, root=str(tmp_path / "run{rank}")
        )
        pids = launcher.start(job, SIZE, tmp_path / "log")
        if life < 3:
            wanted, deadline = draw.randint(4, 12), time.monotonic() + PATIENCE_SECONDS
            while len(lines(job["trace"], 0)) < wanted and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(draw.uniform(0.0, 0.05))  # a random moment
            for pid in draw.choice([[draw.choice(pids)], pids + writers_of(pids)]):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        statuses = launcher.join()
        if life == 3:
            assert statuses == [0] * SIZE, logs(tmp_path)
        starts = set()
        for rank in range(SIZE):
            done = lines(job["trace"], rank)
            if done:
                starts.add(start := expected[rank].index(done[0]))
                assert start <= reached, f"life {life} skipped from {reached} to {start}"
                assert done == expected[rank][start : start + len(done)], (
                    f"life {life} of rank {rank}: {logs(tmp_path)}"
                )
        assert len(starts) <= 1, "the ranks resumed at different places"
        reached = max([reached, *(start + len(lines(job["trace"], 0)) for start in starts)])
    assert reached == LINES
    assert json.loads((tmp_path / "trace3.end").read_text()) == json.loads((tmp_path / "reference.end").read_text())
