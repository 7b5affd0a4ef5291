"""Two machines on a network, with a folder each: what one needs of the other comes over the wire."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ranks.launch import PATIENCE_SECONDS
from tests.ranks.machines.lives import MACHINES, SIZE, Cluster, Life, Place, launching, machines
from tests.ranks.machines.test_two_nodes import KINDS
from tests.ranks.machines.train import Expected

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with machines(MACHINES) as nodes, launching("tests.ranks.machines.train", nodes) as made:
        yield made


def durable(life: Life) -> set[int]:
    """The steps that all ranks have called durable."""
    said = [{int(line[1]) for line in life.lines(rank) if line[0] == "durable"} for rank in range(SIZE)]
    return set.intersection(*said)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_survives(kind: str, cluster: Cluster, tmp_path: Path) -> None:
    """One failure of each kind, another one, and then the run ends with the exact weights.

    Links are cut among them, and machines change their numbers.
    """
    draw = random.Random(kind)
    wanted, reached, lead = Expected(SIZE), 0, 0
    place = Place(str(tmp_path / "run-{machine}"))
    for number, failure in enumerate((kind, draw.choice(KINDS), "")):
        life = Life(cluster, place, tmp_path, number, 100_000 if failure else 3, lead)
        undo: Callable[[], None] = lambda: None  # noqa: E731
        try:
            if failure:
                count, deadline = draw.randint(1, 8), time.monotonic() + PATIENCE_SECONDS
                while len(durable(life)) < count:
                    assert time.monotonic() < deadline, f"{count} snapshots do not become durable: {life.text()}"
                    time.sleep(0.005)
                time.sleep(draw.uniform(0.0, 0.05))  # a random moment
                undo = life.fail(failure, draw)
            statuses = life.end()
        finally:
            undo()
        lead = (lead + (failure == "moved")) % MACHINES
        if not failure:
            assert statuses == [0] * SIZE, life.text()
        starts = set()
        for rank in range(SIZE):
            for line in life.lines(rank):
                if line[0] in ("resumed", "step"):
                    assert line[2] == wanted[int(line[1])], f"{failure}: rank {rank} has other weights: {line}"
                if line[0] == "resumed":
                    starts.add(int(line[1]))
        assert len(starts) == 1, f"{failure}: the ranks resumed at different steps: {starts}"
        assert starts.pop() >= reached, f"{failure}: what was durable at all nodes is gone: {life.text()}"
        reached = max([reached, *durable(life)])
    assert len(list(tmp_path.glob("run-*"))) == MACHINES
