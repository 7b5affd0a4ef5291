"""Two machines with two ranks each: ranks, writers, machines and links fail at random; the run resumes exactly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.machines.lives import MACHINES, Cluster, Place, launching, machines, sweep

KINDS = ("rank", "writer", "writers", "node", "moved", "link", "all")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with machines(MACHINES) as nodes, launching("tests.ranks.machines.train", nodes) as made:
        yield made


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_two_nodes_survives(kind: str, cluster: Cluster, tmp_path: Path) -> None:
    """One failure of each kind, and then the run ends by itself with the exact weights."""
    sweep(cluster, Place(str(tmp_path / "run")), tmp_path, [kind], 1)


@pytest.mark.parametrize("seed", range(4))
def test_many_failures(seed: int, cluster: Cluster, tmp_path: Path) -> None:
    """Eight random ones in a row."""
    draw = random.Random(seed)
    sweep(cluster, Place(str(tmp_path / "run")), tmp_path, [draw.choice(KINDS) for _ in range(8)], seed)
