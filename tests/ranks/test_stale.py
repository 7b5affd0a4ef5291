"""Snapshots of two ranks that have old weights or moments are reported; those of healthy ranks are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launch import Launcher
from tests.ranks.test_one_kill import FSDP2

FRESH = 2
SAID = (": the snapshot has the ", "nothing is trained")


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    made = Launcher("tests.ranks.train_stale")
    yield made
    made.close()


@pytest.fixture
def heard(launcher: Launcher, tmp_path: Path) -> Callable[..., list[str]]:
    """What rank 0 says of the freshness of its snapshots, up to the arrow."""

    def run(**job: Any) -> list[str]:
        given = {"root": str(tmp_path / "run"), "stale": [], "fresh": FRESH, "ends": 6, "rate": 0.01, **job}
        launcher.start(given, 2, tmp_path / "log")
        assert launcher.join() == [0, 0], (tmp_path / "log.0").read_text() + (tmp_path / "log.1").read_text()
        lines = (tmp_path / "log.0").read_text().splitlines()
        return [line.partition("step ")[2] for line in lines if any(one in line for one in SAID)]

    return run


@pytest.mark.cells(1)
@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp2", marks=FSDP2)])
@pytest.mark.parametrize("what", ["weights", "moments"])
def test_old_bytes_of_all_ranks_are_named(heard: Callable[..., list[str]], layout: str, what: str) -> None:
    """At the first snapshot, once, also where each rank has a part of each tensor."""
    (line,) = heard(layout=layout, what=what, stale=[0, 1])
    assert line.startswith(f"3: the snapshot has the {what} of step {FRESH} for group 0 of optimizer: ")


@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp2", marks=FSDP2)])
def test_ranks_that_save_what_they_train_give_no_alarm(heard: Callable[..., list[str]], layout: str) -> None:
    """All of the run's snapshots are compared."""
    assert heard(layout=layout, what="weights") == []


@pytest.mark.long
@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp2", marks=FSDP2)])
def test_a_learning_rate_of_0_is_reported_by_one_rank(heard: Callable[..., list[str]], layout: str) -> None:
    """Once."""
    (line,) = heard(layout=layout, what="weights", rate=0.0)
    assert line.startswith("4: nothing is trained: the learning rate of every group is 0")
