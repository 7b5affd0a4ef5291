"""Accelerate with FSDP: killed and resumed it is exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launch import Launcher


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher("tests.ranks.sharded.train_accelerate")
    yield launcher
    launcher.close()


def train(launcher: Launcher, folder: Path, name: str, **job: Any) -> list[int]:
    """The exit statuses of two ranks."""
    trace = str(folder / f"trace-{name}")
    launcher.start({"root": str(folder / name), "trace": trace, **job}, 2, folder / f"log-{name}", 240.0)
    return launcher.join()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", [1, 2])
def test_a_killed_run_ends_with_the_same_weights(launcher: Launcher, tmp_path: Path, version: int) -> None:
    """Killed in the middle of the second epoch: weights, samples, draws and losses are those of a run that was not."""
    assert train(launcher, tmp_path, "whole", seed=1, version=version) == [0, 0], (
        tmp_path / "log-whole.0"
    ).read_text()[-3000:]
    assert train(launcher, tmp_path, "killed", seed=1, die_after=8, version=version) == [-9, -9]
    statuses = train(launcher, tmp_path, "killed", seed=99, version=version)
    log = (tmp_path / "log-killed.0").read_text()
    assert statuses == [0, 0], log[-3000:]
    assert "resumed at" in log
    assert (tmp_path / "trace-whole.end").read_text() == (tmp_path / "trace-killed.end").read_text()
    for rank in range(2):
        wanted = (tmp_path / f"trace-whole.{rank}").read_text().splitlines()
        found = (tmp_path / f"trace-killed.{rank}").read_text().splitlines()
        assert found[-1] == wanted[-1]
        assert set(found) == set(wanted), "a batch came twice with other samples, draws or losses"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_with_tensor_parallelism_too(launcher: Launcher, tmp_path: Path) -> None:
    """Two ranks that share each layer, and have the same samples and draws: killed and resumed it is exact."""
    assert train(launcher, tmp_path, "whole", seed=1, team=2) == [0, 0], (tmp_path / "log-whole.0").read_text()[-3000:]
    assert train(launcher, tmp_path, "killed", seed=1, die_after=14, team=2) == [-9, -9]
    statuses = train(launcher, tmp_path, "killed", seed=99, team=2)
    log = (tmp_path / "log-killed.0").read_text()
    assert statuses == [0, 0], log[-3000:]
    assert "resumed at" in log
    assert (tmp_path / "trace-whole.end").read_text() == (tmp_path / "trace-killed.end").read_text()
    traces = {
        name: [(tmp_path / f"trace-{name}.{rank}").read_text() for rank in range(2)] for name in ("whole", "killed")
    }
    for wanted, found in zip(traces["whole"], traces["killed"], strict=True):
        assert set(found.splitlines()) == set(wanted.splitlines()), "a batch came twice with other samples or draws"
    assert len(set(traces["whole"])) == len(set(traces["killed"])) == 1
