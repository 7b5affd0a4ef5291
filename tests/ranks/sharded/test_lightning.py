"""Lightning's ModelParallelStrategy (FSDP2, with and without tensor parallelism): killed and resumed it is exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launch import Launcher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher("tests.ranks.sharded.train_lightning")
    yield launcher
    launcher.close()


def train(launcher: Launcher, folder: Path, name: str, size: int = 2, **job: Any) -> list[int]:
    """The exit statuses of the ranks."""
    trace = str(folder / f"trace-{name}")
    described = {"root": str(folder / name), "trace": trace, "size": size, **job}
    launcher.start(described, size, folder / f"log-{name}", 240.0)
    return launcher.join()


@pytest.mark.parametrize("tensor_parallel", [0, 1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_killed_run_ends_with_the_same_weights(
    launcher: Launcher, tmp_path: Path, tensor_parallel: int, accumulate: int
) -> None:
    """Killed in the middle of the second epoch: weights, samples, draws and losses are those of a run that was not."""
    job = {"tensor_parallel": tensor_parallel, "trainer": {"accumulate_grad_batches": accumulate}}
    assert train(launcher, tmp_path, "whole", seed=1, **job) == [0, 0], (tmp_path / "log-whole.0").read_text()[-3000:]
    assert train(launcher, tmp_path, "killed", seed=1, die_at=[1, 3], **job) == [-9, -9]
    statuses = train(launcher, tmp_path, "killed", seed=99, **job)
    log = (tmp_path / "log-killed.0").read_text()
    assert statuses == [0, 0], log[-3000:]
    assert "resumed at" in log
    assert (tmp_path / "trace-whole.end").read_text() == (tmp_path / "trace-killed.end").read_text()
    for rank in range(2):
        wanted = (tmp_path / f"trace-whole.{rank}").read_text().splitlines()
        found = (tmp_path / f"trace-killed.{rank}").read_text().splitlines()
        assert found[-1] == wanted[-1]
        assert set(found) == set(wanted), "a batch came twice with other samples, draws or losses"
        assert len(found) > len(wanted) or found == wanted


def test_another_layout_is_refused(launcher: Launcher, tmp_path: Path) -> None:
    """A resume depends on which ranks share their samples."""
    assert train(launcher, tmp_path, "run", seed=1, tensor_parallel=1, die_at=[1, 3]) == [-9, -9]
    assert 0 not in train(launcher, tmp_path, "run", seed=1, tensor_parallel=2)
    log = (tmp_path / "log-run.0").read_text()
    assert "was taken by 2 ranks with tensor_parallel_size=1, and this run has as many ranks with 2" in log, log[-2000:]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on(launcher: Launcher, tmp_path: Path, before: int, after: int) -> None:
    """With data parallelism alone: each sample that is left of the epoch comes once, and the run ends."""
    job = {"tensor_parallel": 1, "seed": 1}
    assert train(launcher, tmp_path, "run", before, die_at=[1, 3], **job) == [-9] * before
    statuses = train(launcher, tmp_path, "run", after, **job)
    log = (tmp_path / "log-run.0").read_text()
    assert statuses == [0] * after, log[-3000:]
    assert "resumed at" in log
