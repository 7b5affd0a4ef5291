"""Machines of a run as processes, each with its ranks and their writers, that are killed with or without those."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
from torch.distributed import TCPStore

from tests.ranks.launch import REPOSITORY
from tests.support import interpreters
from tests.support.writers import writers_of


class Node:
    """One machine: a process, its ranks, and their writers. What it logs is in the file `log`.

    Attributes:
        taken: the steps whose snapshots it has begun to take, as far as its lines were read.
    """

    def __init__(self, job: dict[str, Any], log: Path) -> None:
        command = [sys.executable, "-m", "tests.restore.peers.node_host", json.dumps(job)]
        with log.open("a") as errors:
            self.process = interpreters.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=REPOSITORY)

        self.taken: list[int] = []

    def resumed(self) -> list[str]:
        """Its first line."""
        assert self.process.stdout is not None
        found = self.process.stdout.readline().split()
        assert found, "the node has ended"
        return found

    def until_taken(self, count: int) -> None:
        """Wait until it has begun to take so many snapshots."""
        assert self.process.stdout is not None
        while len(self.taken) < count:
            line = self.process.stdout.readline()
            assert line, "the node has ended"
            self._read(line)

    def until_idle(self) -> None:
        """Wait until it saves nothing any more."""
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()).strip() != "idle":
            assert line, "the node has ended"
            self._read(line)

    def kill(self, *, writers: bool) -> None:
        """End it; its lines are read to the end."""
        found = writers_of(self.process.pid) if writers else []
        self.process.kill()
        _end(found)
        assert self.process.stdout is not None
        for line in self.process.stdout.read().splitlines(keepends=True):
            self._read(line)
        self.process.wait(60)
        self.process.stdout.close()

    def kill_writers(self) -> None:
        """End only those; the trainers go on."""
        _end(writers_of(self.process.pid))

    def _read(self, line: str) -> None:
        what, *rest = line.split()
        if line.endswith("\n") and what == "begin" and rest[1] != "no":
            self.taken.append(int(rest[0]))


def _end(processes: list[psutil.Process]) -> None:
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            one.kill()


class Cluster:
    """Machines with as many ranks each; in the end none is left.

    Args:
        memory: the memory tier.
    """

    def __init__(
        self,
        root: Path,
        store: TCPStore,
        size: int,
        memory: dict[str, Any],
        machines: int = 2,
        durable_every: int = 10**6,
    ) -> None:
        self.log = root.with_name("nodes.log")
        self.job = {"root": str(root), "size": size, "port": store.port, "durable_every": durable_every, "pace": 0.1}
        self.job["memory"] = memory
        self.machines = machines
        self.life = 0
        self.nodes: list[Node] = []

    def start(self) -> list[str]:
        """Start all ranks; where the first one resumed."""
        self.life += 1
        each = self.job["size"] // self.machines
        self.nodes = []
        for n in range(self.machines):
            ranks = list(range(n * each, (n + 1) * each))
            self.nodes.append(Node({**self.job, "node": f"node{n}", "ranks": ranks, "life": self.life}, self.log))
        found = [node.resumed() for node in self.nodes]
        assert all(one == found[0] for one in found)
        return found[0]

    def kill(self, lost: set[int]) -> list[int]:
        """End all trainers, and the writers of the lost machines; the steps whose snapshots were begun."""
        nodes, self.nodes = self.nodes, []
        for n, node in enumerate(nodes):
            node.kill(writers=n in lost)
        return max((node.taken for node in nodes), key=len)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.nodes:
            self.kill(set(range(self.machines)))
