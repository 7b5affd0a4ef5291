"""DDP in two processes with a memory tier: after `kill -9` all ranks go on from memory, exactly."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.writer import control
from tests.ranks.launch import PATIENCE_SECONDS, Launcher, writers_of

SIZE = 2
EPOCHS = 3
LINES = EPOCHS * 8
MOST_LOST = 3
"""Lines: the step that was under way, the one whose snapshot was being taken, and none is taken at an epoch's end."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module", params=["train_lightning", "train_accelerate"])
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    """Starts runs of Lightning, then of Accelerate."""
    made = Launcher(f"tests.ranks.{request.param}")
    yield made
    made.close()


def job_of(folder: Path, *, memory: bool = True, **changes: Any) -> dict[str, Any]:
    root = str(folder / "run")
    tiers = [{"url": "memory", "every_n_steps": 1}, root] if memory else root
    options = {"tiers": tiers, "every_n_steps": 5}
    trace = str(folder / "trace")
    run = {"root": root, "trace": trace, "options": options, "patient": memory}
    return {**run, "size": SIZE, "epochs": EPOCHS, "pace": 0.03, "seed": 0, **changes}


def lines(trace: str, rank: int) -> list[str]:
    path = Path(f"{trace}.{rank}")
    return path.read_text().split("\n")[:-1] if path.exists() else []


def newest(job: dict[str, Any], rank: int) -> int:
    """The step of the newest snapshot in the memory of a rank's writer; -1: none."""
    reply = control.ask(job["root"], {"what": control.Question.STATUS}, 5.0, rank)
    snapshot = reply.body["held"] if reply is not None else None
    return int(snapshot["step"]) if snapshot is not None else -1


def logs(folder: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text()[-4000:]}" for path in sorted(folder.glob("log*")))


@pytest.fixture(scope="module")
def reference(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[str]], Any]:
    """The lines of each rank of a run that is not killed, and its weights."""
    folder = tmp_path_factory.mktemp("reference")
    job = job_of(folder, pace=0.0, memory=False)
    launcher.start(job, SIZE, folder / "log")
    assert launcher.join() == [0] * SIZE, logs(folder)
    found = [lines(job["trace"], rank) for rank in range(SIZE)]
    assert [len(one) for one in found] == [LINES] * SIZE
    return found, json.loads(Path(job["trace"] + ".end").read_text())


@pytest.mark.parametrize("number", range(8))
def test_ranks_that_die_lose_a_step_and_resume_exactly(
    number: int, tmp_path: Path, launcher: Launcher, reference: tuple[list[list[str]], Any]
) -> None:
    """Two lives end by force: one rank, then the others by their launcher; or all at once. The third ends by itself."""
    draw = random.Random(number)
    expected, weights = reference
    reached, places = 0, []
    for life in range(3):
        job = job_of(tmp_path, trace=str(tmp_path / f"trace{life}"), seed=1000 * life if reached else 0)
        log = tmp_path / f"log{life}"
        pids = launcher.start(job, SIZE, log)
        if life < 2:
            wanted, deadline = draw.randint(5, 9), time.monotonic() + PATIENCE_SECONDS
            # A busy machine takes some steps until all ranks have room for a snapshot.
            while time.monotonic() < deadline:
                begun = len(lines(job["trace"], 0))
                if begun >= wanted and all(newest(job, rank) >= reached + begun - 3 for rank in range(SIZE)):
                    break
                time.sleep(0.005)
            time.sleep(draw.uniform(0.0, 0.05))  # a random moment
            for pid in draw.choice([pids, [draw.choice(pids)]]):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        statuses = launcher.join()
        if life == 2:
            assert statuses == [0] * SIZE, logs(tmp_path)
        found = re.search(r"resumed from memory, (\d+) steps? lost", Path(f"{log}.0").read_text())
        places.append(found[0] if found else "")
        starts = set()
        for rank in range(SIZE):
            done = lines(job["trace"], rank)
            if not done:
                continue
            start = expected[rank].index(done[0])
            starts.add(start)
            assert start <= reached, f"life {life} skipped from {reached} to {start}"
            assert reached - start <= MOST_LOST, f"life {life} lost {reached - start} steps: {logs(tmp_path)}"
            assert done == expected[rank][start : start + len(done)], f"life {life} of rank {rank}: {logs(tmp_path)}"
        assert len(starts) <= 1, "the ranks resumed at different places"
        reached = max([reached, *(start + len(lines(job["trace"], 0)) for start in starts)])
    assert reached == LINES
    assert json.loads((tmp_path / "trace2.end").read_text()) == weights
    print("resumed:", places)


def test_with_a_writer_dead_the_durable_tier_has_the_run(
    tmp_path: Path, launcher: Launcher, reference: tuple[list[list[str]], Any]
) -> None:
    """A share is missing: no rank gets a part of a snapshot, and the last durable one serves."""
    expected, weights = reference
    job = job_of(tmp_path, trace=str(tmp_path / "trace0"))
    pids = launcher.start(job, SIZE, tmp_path / "log0")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(lines(job["trace"], 0)) < 14 and time.monotonic() < deadline:
        time.sleep(0.005)
    for pid in [*writers_of(pids)[:1], *pids]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    launcher.join()
    job = job_of(tmp_path, trace=str(tmp_path / "trace1"), seed=5)
    launcher.start(job, SIZE, tmp_path / "log1")
    assert launcher.join() == [0] * SIZE, logs(tmp_path)
    assert "from memory" not in logs(tmp_path)
    for rank in range(SIZE):
        done = lines(job["trace"], rank)
        start = expected[rank].index(done[0])
        assert start >= 5
        assert done == expected[rank][start:]
    assert json.loads((tmp_path / "trace1.end").read_text()) == weights
