"""Nodes with a folder each: ranks, writers, leaders and whole nodes are killed, and all ranks resume at one place."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.open import open_storage
from tests.ranks.launch import PATIENCE_SECONDS, Launcher, writers_of

NODES = ("n0", "n0", "n1", "n1")
KINDS = ("rank", "leaders", "writer", "writers", "node", "all")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    made = Launcher("tests.places.train")
    yield made
    made.close()


class Life:
    """One start of all ranks."""

    def __init__(self, launcher: Launcher, folder: Path, number: int, nodes: tuple[str, ...], **changes: Any) -> None:
        self.nodes, self._folder, self._launcher = nodes, folder, launcher
        self.trace = folder / f"trace{number}"
        job = {
            "folder": str(folder),
            "nodes": nodes,
            "further": [],
            "trace": str(self.trace),
            "steps": 10_000,
            "wait_seconds": 8.0,
            "saved_size": None,
            **changes,
        }
        self.pids = launcher.start(job, len(nodes), folder / "log")

    def lines(self, rank: int) -> list[list[str]]:
        path = Path(f"{self.trace}.{rank}")
        return [line.split() for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def durable(self) -> set[int]:
        """The steps that all ranks have called durable."""
        said = [{int(line[1]) for line in self.lines(rank) if line[0] == "durable"} for rank in range(len(self.nodes))]
        return set.intersection(*said)

    def until(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(self.durable()) < count and time.monotonic() < deadline:
            time.sleep(0.002)
        assert len(self.durable()) >= count, self.logs()

    def kill(self, kind: str, draw: random.Random) -> None:
        writers = [writers_of([pid]) for pid in self.pids]
        flat = [one for found in writers for one in found]
        lost = draw.choice(self.nodes)
        node = [rank for rank, name in enumerate(self.nodes) if name == lost]
        doomed = {
            "rank": [draw.choice(self.pids)],
            "leaders": [self.pids[0], self.pids[2]],
            "writer": [draw.choice(flat)] if flat else [],
            "writers": flat,
            "node": [pid for rank in node for pid in [self.pids[rank], *writers[rank]]],
            "all": [*self.pids, *flat],
        }[kind]
        for pid in doomed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if kind in ("writer", "writers"):
            time.sleep(draw.uniform(0.0, 0.3))
            with suppress(ProcessLookupError):
                os.kill(draw.choice(self.pids), signal.SIGKILL)

    def join(self) -> list[int]:
        return self._launcher.join()

    def resumed(self) -> int | None:
        """Where all ranks that got so far have resumed: at one step."""
        found = {int(self.lines(rank)[0][1]) for rank in range(len(self.nodes)) if self.lines(rank)}
        assert len(found) <= 1, f"the ranks resumed at {found}: {self.logs()}"
        return found.pop() if found else None

    def logs(self) -> str:
        return "".join(path.read_text()[-3000:] for path in sorted(self._folder.glob("log.*")))


def steps_of(root: Path) -> set[int]:
    return {parsed.step for parsed in Repository(open_storage(root)).ids()}


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
