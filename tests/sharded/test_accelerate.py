"""Accelerate with FSDP2: killed and resumed it is exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from accelerate.utils import DistributedType

from accelerate_ckpt.ranks import ranks_of
from ckpt_engine.errors import ConfigError
from tests.ranks.launch import Launcher


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher("tests.sharded.train_accelerate")
    yield launcher
    launcher.close()


def train(launcher: Launcher, folder: Path, name: str, **job: Any) -> list[int]:
    """The exit statuses of two ranks."""
    trace = str(folder / f"trace-{name}")
    launcher.start({"root": str(folder / name), "trace": trace, **job}, 2, folder / f"log-{name}", 240.0)
    return launcher.join()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_ends_with_the_same_weights(launcher: Launcher, tmp_path: Path) -> None:
    """Killed in the middle of the second epoch: weights, samples, draws and losses are those of a run that was not."""
    assert train(launcher, tmp_path, "whole", seed=1) == [0, 0], (tmp_path / "log-whole.0").read_text()[-3000:]
    assert train(launcher, tmp_path, "killed", seed=1, die_after=8) == [-9, -9]
    statuses = train(launcher, tmp_path, "killed", seed=99)
    log = (tmp_path / "log-killed.0").read_text()
    assert statuses == [0, 0], log[-3000:]
    assert "resumed at" in log
    assert (tmp_path / "trace-whole.end").read_text() == (tmp_path / "trace-killed.end").read_text()
    for rank in range(2):
        wanted = (tmp_path / f"trace-whole.{rank}").read_text().splitlines()
        found = (tmp_path / f"trace-killed.{rank}").read_text().splitlines()
        assert found[-1] == wanted[-1]
        assert set(found) == set(wanted), "a batch came twice with other samples, draws or losses"


@pytest.mark.parametrize(
    ("kind", "hint"), [(DistributedType.FSDP, "fsdp_version=2"), (DistributedType.DEEPSPEED, "or FSDP2")]
)
def test_others_are_refused_with_a_way_out(kind: DistributedType, hint: str) -> None:
    """FSDP1 and DeepSpeed."""
    accelerator = cast(Any, SimpleNamespace(num_processes=2, distributed_type=kind, is_fsdp2=False))
    with pytest.raises(ConfigError) as error:
        ranks_of(accelerator, cast(Any, None))
    assert hint in str(error.value)
