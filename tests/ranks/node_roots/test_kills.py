"""Nodes with a folder each: ranks, writers, leaders and whole nodes are killed, and all ranks resume at one place."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.launch import Launcher
from tests.ranks.node_roots.lives import Life, steps_of

NODES = ("n0", "n0", "n1", "n1")
KINDS = ("rank", "leaders", "writer", "writers", "node", "all")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    made = Launcher("tests.ranks.node_roots.train")
    yield made
    made.close()


def sweep(launcher: Launcher, folder: Path, lives: int, seed: int, further: list[str]) -> None:
    """Lives that end by force, each of which begins no earlier than where the one before was durable at all nodes.

    With a further tier a node's folder may be lost too: then no earlier than what that tier has.
    """
    draw = random.Random(seed)
    wanted = 0
    for number in range(lives):
        last = number == lives - 1
        life = Life(launcher, folder, number, NODES, further=further, steps=3 if last else 10_000)
        if not last:
            life.until(draw.randint(1, 5))
            time.sleep(draw.uniform(0.0, 0.03))  # a random moment: in a copy, a write, or between parts and manifest
            life.kill(draw.choice(KINDS), draw)
        statuses = life.join()
        if last:
            assert statuses == [0] * len(NODES), life.logs()
        resumed = life.resumed()
        if resumed is not None:
            assert resumed >= wanted, f"life {number} resumed at {resumed}, and {wanted} was durable: {life.logs()}"
        wanted = max([wanted, *life.durable()])
        if further and not last and steps_of(Path(further[0])) and draw.random() < 0.5:
            shutil.rmtree(folder / draw.choice(NODES))
            wanted = max(steps_of(Path(further[0])), default=0)


@pytest.mark.parametrize("seed", range(3))
def test_kills_lose_nothing_that_all_nodes_have(launcher: Launcher, tmp_path: Path, seed: int) -> None:
    """Four lives; only the folders of the nodes."""
    sweep(launcher, tmp_path, 4, seed, [])


@pytest.mark.parametrize("seed", range(3))
def test_kills_and_lost_folders_lose_nothing_that_a_further_tier_has(
    launcher: Launcher, tmp_path: Path, seed: int
) -> None:
    """Four lives; a shared second tier, and every other time a node comes back empty."""
    sweep(launcher, tmp_path, 4, seed, [str(tmp_path / "shared")])


def test_other_numbers_of_ranks_and_nodes(launcher: Launcher, tmp_path: Path) -> None:
    """2 x 2 ranks, then 2 x 1, then 3 nodes with one rank each: the same bytes."""
    layouts = (NODES, ("n0", "n1"), ("n1", "n2", "n0"))
    step, size = 0, None
    for number, nodes in enumerate(layouts):
        life = Life(launcher, tmp_path, number, nodes, steps=3, saved_size=size)
        assert life.join() == [0] * len(nodes), life.logs()
        assert life.resumed() == step
        step, size = step + 3, len(nodes)
