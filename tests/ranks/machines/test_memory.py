"""The memory tier of trainers on two machines: a lost machine, or dead trainers, cost some steps and no exactness."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launch import PATIENCE_SECONDS
from tests.ranks.machines.lives import MACHINES, PER_MACHINE, SIZE, Cluster, kill, launching, machines

EPOCHS = 4
SAMPLES = 224
LINES = EPOCHS * SAMPLES // 4 // SIZE
MOST_LOST = 12
"""Steps: the one under way, the snapshot of the one before it on its way, and many while this machine is busy."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module", params=["train_lightning", "train_accelerate"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Of machines that run Lightning, then Accelerate."""
    with machines(MACHINES) as nodes, launching(f"tests.ranks.{request.param}", nodes) as made:
        yield made


class Run:
    """One run in a folder; its snapshots stay in memory, but for the last one."""

    def __init__(self, cluster: Cluster, folder: Path, **memory: Any) -> None:
        self._cluster = cluster
        self._folder = folder
        self._memory = {"url": "memory", "every_n_steps": 1, **memory}
        self._life = 0

    def start(self, pace: float = 0.1, *, fresh: bool = False) -> None:
        self._life += 1
        job = {
            "root": str(self._folder / "run"),
            "trace": str(self._folder / f"trace{self._life}"),
            "size": PER_MACHINE,
            "machines": MACHINES,
            "epochs": EPOCHS,
            "samples": SAMPLES,
            "pace": pace,
            "seed": 0 if fresh or self._life == 1 else 1000 * self._life,  # must not matter to one that resumes
            "patient": True,
            "strategy": "ddp_find_unused_parameters_true",  # else four ranks sum in another order in their first step
            "same_buckets": True,
            "options": {"tiers": [self._memory, str(self._folder / "run")], "every_n_steps": 1000, "linger": 60},
        }
        self._cluster.start(job, self._folder / "log")

    def lines(self, rank: int) -> list[str]:
        path = self._folder / f"trace{self._life}.{rank}"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def until(self, count: int) -> None:
        """So many lines of this life are there."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(self.lines(0)) < count:
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.005)

    def finish(self) -> None:
        """It ends by itself."""
        assert self._cluster.join() == [0] * SIZE, self.text()

    def weights(self) -> Any:
        return json.loads((self._folder / f"trace{self._life}.end").read_text())

    def require_exact(self, expected: list[list[str]]) -> tuple[int, int]:
        """What all ranks have trained in this life is what a run without failures trains; from where to where."""
        starts, ends = set(), []
        for rank in range(SIZE):
            done = self.lines(rank)
            assert done, self.text()
            start = expected[rank].index(done[0])
            assert done == expected[rank][start : start + len(done)], f"rank {rank}: {self.text()}"
            starts.add(start)
            ends.append(start + len(done))
        assert len(starts) == 1, "the ranks resumed at different places"
        return starts.pop(), max(ends)

    def resumed(self) -> tuple[str, list[str]]:
        """From where, and what the report has to say."""
        report = json.loads((self._folder / "run" / "resume-report.json").read_text())
        return report["url"], report["notes"]

    def text(self) -> str:
        return "".join(f"== {one}\n{one.read_text()[-3000:]}" for one in sorted(self._folder.glob("log.*")))


@pytest.fixture(scope="module")
def reference(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[str]], Any]:
    """The lines of each rank of a run without failures, and its weights."""
    run = Run(cluster, tmp_path_factory.mktemp("reference"))
    run.start(pace=0.0)
    run.finish()
    found = [run.lines(rank) for rank in range(SIZE)]
    assert [len(one) for one in found] == [LINES] * SIZE
    return found, run.weights()


@pytest.mark.parametrize("seed", range(2))
def test_a_lost_machine_is_resumed_from_the_memory_of_the_other(
    cluster: Cluster, reference: tuple[list[list[str]], Any], tmp_path: Path, seed: int
) -> None:
    """First one machine, then the other one; nothing was durable by then."""
    draw = random.Random(seed)
    run, reached = Run(cluster, tmp_path, replicate=1), 0
    lost = draw.choice((0, 1))
    for life in range(3):
        run.start()
        if life < 2:
            run.until(draw.randint(17, 20))
            time.sleep(draw.uniform(0.0, 0.1))  # a random moment
            cluster.launchers[(lost + life) % MACHINES].lose()
            cluster.join()
        else:
            run.finish()
        start, end = run.require_exact(reference[0])
        print(f"life {life}: steps {start} to {end}, {reached - start if life else 0} lost")
        if life:
            assert 0 <= reached - start <= MOST_LOST, run.text()
            assert any(note.startswith("resumed from memory") for note in run.resumed()[1]), run.text()
        reached = end
    assert reached == LINES
    assert run.weights() == reference[1]


@pytest.mark.parametrize("seed", range(2))
def test_without_replication_the_writers_of_several_machines_make_the_newest_one_durable(
    cluster: Cluster, reference: tuple[list[list[str]], Any], tmp_path: Path, seed: int
) -> None:
    """All trainers die, in any order; their writers find each other at the shared folder."""
    draw = random.Random(seed)
    run, reached = Run(cluster, tmp_path), 0
    for life in range(3):
        run.start()
        if life < 2:
            run.until(draw.randint(17, 20))
            time.sleep(draw.uniform(0.0, 0.1))
            doomed = [pid for of_machine in cluster.pids for pid in of_machine]
            draw.shuffle(doomed)
            for pid in doomed:
                kill([pid])
                time.sleep(draw.choice([0.0, 0.02]))
            cluster.join()
        else:
            run.finish()
        start, end = run.require_exact(reference[0])
        print(f"life {life}: steps {start} to {end}, {reached - start if life else 0} lost")
        if life:
            assert 0 <= reached - start <= MOST_LOST, run.text()
            assert not any(note.startswith("resumed from memory") for note in run.resumed()[1]), run.text()
        reached = end
    assert reached == LINES
    assert run.weights() == reference[1]


def test_without_replication_a_lost_machine_costs_what_was_not_durable(
    cluster: Cluster, reference: tuple[list[list[str]], Any], tmp_path: Path
) -> None:
    """The writers that are left wait for the lost ones shortly; then the run starts from what is durable."""
    run = Run(cluster, tmp_path)
    run.start()
    run.until(8)
    cluster.launchers[1].lose()
    cluster.join()
    assert run.require_exact(reference[0])[0] == 0
    run.start(pace=0.0, fresh=True)
    run.finish()
    assert run.require_exact(reference[0]) == (0, LINES)
    assert not list((tmp_path / "run" / "parts").glob("*"))
