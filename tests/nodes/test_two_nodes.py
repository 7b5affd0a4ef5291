"""Two nodes with two ranks each: ranks, writers, nodes and links fail at random; the run resumes exactly every time."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.open import open_storage
from tests.nodes.netns import NodeLauncher, Nodes
from tests.nodes.train import Expected, said
from tests.ranks.launch import PATIENCE_SECONDS, free_port, writers_of

NODES = 2
PER_NODE = 2
SIZE = NODES * PER_NODE
KINDS = ("rank", "writer", "writers", "node", "link", "all")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    try:
        with Nodes(NODES) as made:
            yield made
    except PermissionError as err:
        pytest.skip(str(err))


@pytest.fixture(scope="module")
def launchers(nodes: Nodes) -> Iterator[list[NodeLauncher]]:
    made = [NodeLauncher("tests.nodes.train", nodes, node) for node in range(NODES)]
    yield made
    for one in made:
        one.close()


class Life:
    """One start of all ranks."""

    def __init__(self, nodes: Nodes, launchers: list[NodeLauncher], folder: Path, number: int, steps: int) -> None:
        self._nodes = nodes
        self._launchers = launchers
        self._trace = folder / f"trace{number}"
        self._log = folder / "log"
        common: dict[str, Any] = {
            "root": str(folder / "run"),
            "trace": str(self._trace),
            "steps": steps,
            "world": SIZE,
            "master": nodes.address(0),
            "port": free_port(),
            "link": "eth0",
        }
        self.pids = [
            one.start({**common, "first": node * PER_NODE}, PER_NODE, self._log.with_suffix(f".{node}"))
            for node, one in enumerate(launchers)
        ]

    def lines(self, rank: int) -> list[list[str]]:
        path = Path(f"{self._trace}.{rank}")
        return [line.split() for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def wait(self, durable: int) -> None:
        """Until so many snapshots are durable."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while sum(line[0] == "durable" for line in self.lines(0)) < durable and time.monotonic() < deadline:
            time.sleep(0.005)

    def fail(self, kind: str, draw: random.Random) -> Callable[[], None]:
        """Let something happen; returns what undoes it afterwards."""
        node = draw.randrange(NODES)
        writers = [writers_of(pids) for pids in self.pids]
        if kind == "link":
            self._nodes.cut(node)
            return lambda: self._nodes.mend(node)
        doomed = {
            "rank": [draw.choice(self.pids[node])],
            "writer": writers[node][:1],
            "writers": [pid for of_node in writers for pid in of_node],
            "node": self.pids[node] + writers[node],
            "all": [pid for of_node in self.pids + writers for pid in of_node],
        }[kind]
        kill(doomed)
        if kind in ("writer", "writers"):  # its trainer starts another one, and goes on
            time.sleep(draw.uniform(0.0, 1.0))
            kill([draw.choice(self.pids[node])])
        return lambda: None

    def end(self) -> list[int]:
        """The exit statuses of all ranks, which end by themselves: only on its own node a rank takes others along."""
        began = time.monotonic()
        statuses = [status for one in self._launchers for status in one.join()]
        assert time.monotonic() - began < PATIENCE_SECONDS, f"a rank hangs: {self.text()}"
        return statuses

    def text(self) -> str:
        return "".join(path.read_text()[-2000:] for path in sorted(self._log.parent.glob("log.*")))


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def sweep(nodes: Nodes, launchers: list[NodeLauncher], folder: Path, kinds: list[str], seed: int) -> None:
    """One life per kind of failure, and one that ends by itself."""
    draw = random.Random(seed)
    durable = 0
    wanted = Expected(SIZE)
    for number, kind in enumerate([*kinds, ""]):
        life = Life(nodes, launchers, folder, number, steps=100_000 if kind else 3)
        undo: Callable[[], None] = lambda: None  # noqa: E731
        if kind:
            life.wait(draw.randint(1, 8))
            time.sleep(draw.uniform(0.0, 0.05))  # a random moment
            undo = life.fail(kind, draw)
        try:
            statuses = life.end()
        finally:
            undo()
        if not kind:
            assert statuses == [0] * SIZE, life.text()
        starts = set()
        for rank in range(SIZE):
            for line in life.lines(rank):
                if line[0] in ("resumed", "step"):
                    assert line[2] == wanted[int(line[1])], f"{kind}: rank {rank} has other weights: {line}"
                if line[0] == "resumed":
                    starts.add(int(line[1]))
        assert len(starts) <= 1, f"{kind}: the ranks resumed at different steps: {starts}"
        if starts:
            assert starts.pop() >= durable, f"{kind}: what was durable is gone: {life.text()}"
        durable = max([durable, *(int(line[1]) for line in life.lines(0) if line[0] == "durable")])
        print(f"seed {seed} life {number} {kind or 'ends'}: durable {durable}, statuses {statuses}")
    with Checkpointer(folder / "run") as alone:
        for info in alone.snapshots():
            state = alone.load(step=info.step)
            assert state is not None
            assert said(state["model"]["weights"]) == wanted[info.step]
    repository = Repository(open_storage(folder / "run"))
    needed = {name for parsed in repository.ids() for name in repository.files_of(parsed.id)}
    there = (folder / "run" / "data").iterdir()
    assert {f"data/{file.name}" for file in there if not file.name.startswith(".")} == needed


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_two_nodes_survives(kind: str, nodes: Nodes, launchers: list[NodeLauncher], tmp_path: Path) -> None:
    """One failure of each kind, and then the run ends by itself with the exact weights."""
    sweep(nodes, launchers, tmp_path, [kind], 1)


@pytest.mark.parametrize("seed", range(4))
def test_many_failures(seed: int, nodes: Nodes, launchers: list[NodeLauncher], tmp_path: Path) -> None:
    """Eight random ones in a row."""
    draw = random.Random(seed)
    sweep(nodes, launchers, tmp_path, [draw.choice(KINDS) for _ in range(8)], seed)
