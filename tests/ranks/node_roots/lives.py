"""Lives of a run whose nodes have a folder each: started, followed by what they write down, and killed."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from tests.ranks.launch import PATIENCE_SECONDS, Launcher, writers_of


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

    def until_shared(self, root: Path) -> None:
        """Until a folder that all nodes share has a snapshot."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (root.exists() and steps_of(root)):
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.002)

    def kill(self, kind: str, draw: random.Random) -> None:
        writers = [writers_of([pid]) for pid in self.pids]
        flat = [one for found in writers for one in found]
        lost = draw.choice(self.nodes)
        node = [rank for rank, name in enumerate(self.nodes) if name == lost]
        doomed = {
            "rank": [draw.choice(self.pids)],
            "leaders": [self.pids[self.nodes.index(name)] for name in dict.fromkeys(self.nodes)],
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
