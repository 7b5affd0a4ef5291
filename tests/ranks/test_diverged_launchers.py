"""A loss that is lost on one rank, under real launchers: who restarts a failed job has it go on by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from tests.ranks.diverged import Life, Lives
from tests.ranks.launch import Launcher

REPOSITORY = Path(__file__).parents[2]
PATIENCE_SECONDS = 240.0
SKIP = 2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    """For the reference."""
    made = Launcher("tests.ranks.train_diverging")
    yield made
    made.close()


def run(folder: Path, size: int, how: list[str], **changes: Any) -> tuple[int, Life]:
    """One start by that launcher: its status, and what the ranks have written in all starts."""
    job: dict[str, Any] = {"root": str(folder / "run"), "trace": str(folder / "trace"), "size": size, "epochs": 2}
    job |= {"seed": 0, "samples": 32 * size, "options": {"rollback": {"on": "nan", "skip_batches": SKIP}}, **changes}
    log = folder / "log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, *how, "-m", "tests.ranks.train_diverging", json.dumps(job)],
            stdout=file,
            stderr=file,
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            start_new_session=True,
        )
        try:
            return process.wait(PATIENCE_SECONDS), Life(job, log.read_text)
        finally:
            process.kill()


def torchrun(size: int, restarts: int) -> list[str]:
    how = ["-m", "torch.distributed.run", "--nproc-per-node", str(size), "--standalone"]
    return [*how, "--max-restarts", str(restarts)]


def check(folder: Path, life: Life, launcher: Launcher, first: int, rank: int) -> None:
    """All ranks have ended once with the same error, and the rest is that of a run without these batches."""
    size = life.job["size"]
    kind, text = life.error()
    assert kind == "RollbackRequestedError"
    assert f"the loss of step {first} is nan on rank {rank}" in text
    assert [info.step for info in Repository(open_storage(folder / "run")).list()][: first - 1] == [*range(1, first)]
    batches = life.batches(0)
    assert all(life.batches(one) == batches for one in range(size))
    assert batches[: first - 1] == [(at // 8, at % 8) for at in range(first - 1)]
    assert batches[-(16 - SKIP - first + 1) :] == [(at // 8, at % 8) for at in range(first - 1 + SKIP, 16)]
    lives = Lives(launcher, folder / "reference", size=size, samples=32 * size)
    (folder / "reference").mkdir()
    assert life.weights() == lives.without([(first - 1) // 8, (first - 1) % 8, SKIP])


@pytest.mark.parametrize(("size", "rank", "first"), [(2, 1, 11), (4, 3, 5)])
def test_torchrun_starts_it_again_and_it_goes_on(
    size: int, rank: int, first: int, launcher: Launcher, tmp_path: Path
) -> None:
    """Without any action of a person the run ends with status 0, and lacks these batches."""
    sick = [[rank, (first - 1) // 8, (first - 1) % 8, 1, "nan"]]
    status, life = run(tmp_path, size, torchrun(size, 1), sick=sick)
    assert status == 0, life.log()
    check(tmp_path, life, launcher, first, rank)
    assert "SIGKILL" not in life.log()


@pytest.mark.parametrize("how", [[], torchrun(2, 0)], ids=["script", "torchrun"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_launcher_that_does_not_start_again(how: list[str], rank: int, launcher: Launcher, tmp_path: Path) -> None:
    """It ends with 1 when all ranks have said why; the next start is by hand."""
    sick = [[rank, 1, 2, 1, "nan"]]
    status, life = run(tmp_path, 2, how, sick=sick)
    assert status == 1, life.log()
    assert [len(life.of(one, "error")) for one in range(2)] == [1, 1], life.log()
    status, life = run(tmp_path, 2, how, sick=sick)
    assert status == 0, life.log()
    check(tmp_path, life, launcher, 11, rank)
