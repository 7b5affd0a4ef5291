"""A machine is lost with its trainers and their writers: all ranks resume from the memory of the others."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from tests.memory.lives import ENTRY
from tests.ranks.launch import REPOSITORY

MOST_LOST = 3
"""The step under way, and the snapshot that was on its way to the partners, with the step it was taken after."""


class Node:
    """One machine: a process, its ranks, and their writers."""

    def __init__(self, job: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "tests.peers.node_host", json.dumps(job)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
        self.resumed: list[str] = []

    def line(self) -> list[str]:
        assert self.process.stdout is not None
        found = self.process.stdout.readline().split()
        assert found, "the node has ended"
        return found

    def until_step(self, step: int) -> None:
        while int(self.line()[1]) < step:
            pass

    def kill(self, *, writers: bool) -> int:
        """End it; the last step that it had begun, if that is known."""
        found = psutil.Process(self.process.pid).children() if writers else []
        self.process.kill()
        for child in found:
            with suppress(psutil.NoSuchProcess):
                if any(word.endswith(ENTRY) for word in child.cmdline()):
                    child.kill()
        assert self.process.stdout is not None
        rest = [line.split() for line in self.process.stdout.read().splitlines()]
        self.process.wait(60)
        self.process.stdout.close()
        return int(rest[-1][1]) if rest else -1


class Cluster:
    """Two machines with as many ranks each."""

    def __init__(self, root: Path, store: TCPStore, size: int, durable_every: int = 10**6) -> None:
        self.job = {"root": str(root), "size": size, "port": store.port, "durable_every": durable_every, "pace": 0.1}
        self.life = 0
        self.nodes: list[Node] = []

    def start(self) -> list[str]:
        """Start all ranks; where the first one resumed."""
        self.life += 1
        half = self.job["size"] // 2
        ranks = [list(range(half)), list(range(half, 2 * half))]
        self.nodes = [Node({**self.job, "node": f"node{n}", "ranks": ranks[n], "life": self.life}) for n in range(2)]
        found = [node.line() for node in self.nodes]
        assert found[0] == found[1]
        return found[0]


@pytest.fixture
def store() -> Iterator[TCPStore]:
    """Where the ranks of all lives meet."""
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("size", "seed"), [(2, 0), (2, 1), (4, 2), (4, 3), (4, 4)])
def test_a_lost_machine_costs_a_step(tmp_path: Path, store: TCPStore, size: int, seed: int) -> None:
    """Each life loses one machine at a random moment, and no durable snapshot was taken by then."""
    draw = random.Random(seed)
    cluster = Cluster(tmp_path / "run", store, size)
    begun = 0
    for life in range(3):
        what, step, place = cluster.start()
        assert what == "resumed"
        if life:
            assert place == "memory", (life, step, place)
            assert 0 <= begun - int(step) <= MOST_LOST
        cluster.nodes[0].until_step(int(step) + draw.randint(5, 12))
        time.sleep(draw.uniform(0.0, 0.05))  # a random moment
        lost = draw.choice((0, 1))
        begun = max(cluster.nodes[lost].kill(writers=True), cluster.nodes[1 - lost].kill(writers=False))
