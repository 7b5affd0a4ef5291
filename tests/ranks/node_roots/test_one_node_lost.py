"""Two nodes with a folder each lose one, once. The slow suite kills ranks, writers, leaders and nodes by chance."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.launch import Launcher
from tests.ranks.node_roots.lives import Life, steps_of

NODES = ("n0", "n1")


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    made = Launcher("tests.ranks.node_roots.train")
    yield made
    made.close()


@pytest.mark.long
def test_a_node_that_comes_back_empty_costs_what_the_shared_tier_has_not(launcher: Launcher, tmp_path: Path) -> None:
    """Its rank and its writer die and its folder is gone: all ranks resume at one step, with the bytes of that step."""
    shared = tmp_path / "shared"
    life = Life(launcher, tmp_path, 0, NODES, further=[str(shared)])
    life.until_shared(shared)
    life.kill("node", random.Random(1))
    life.join()
    newest = max(steps_of(shared))
    shutil.rmtree(tmp_path / random.Random(1).choice(NODES))
    life = Life(launcher, tmp_path, 1, NODES, further=[str(shared)], steps=2)
    assert life.join() == [0, 0], life.logs()
    resumed = life.resumed()
    assert resumed is not None and resumed >= newest > 0
    assert life.durable() == {resumed + 1, resumed + 2}
