"""The lives of a run of several ranks whose losses diverge, and what they have left."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from tests.ranks.launch import PATIENCE_SECONDS, Launcher

BATCHES = 8
"""Of an epoch, on each of two ranks."""


class Life:
    """What the ranks of one life have written."""

    def __init__(self, job: dict[str, Any], log: Callable[[], str]) -> None:
        self.job, self.log = job, log
        self.statuses: list[int] = []

    def lines(self, rank: int) -> list[dict[str, Any]]:
        path = Path(f"{self.job['trace']}.{rank}")
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def of(self, rank: int, key: str) -> list[dict[str, Any]]:
        return [line for line in self.lines(rank) if key in line]

    def batches(self, rank: int) -> list[tuple[int, int]]:
        """Epoch and number of all that were trained."""
        return [(line["epoch"], line["batch"]) for line in self.of(rank, "batch")]

    def samples(self) -> list[int]:
        """All that any rank has trained on, sorted."""
        return sorted(one for rank in range(self.job["size"]) for line in self.of(rank, "ids") for one in line["ids"])

    def error(self) -> tuple[str, str]:
        """What has ended all ranks: the same error everywhere."""
        found = [self.of(rank, "error") for rank in range(self.job["size"])]
        assert all(len(one) == 1 for one in found), self.log()
        (error,) = {(one[0]["error"], one[0]["text"]) for one in found}
        return error

    def weights(self) -> dict[str, Any]:
        """At the end, the same on all ranks."""
        found = [self.of(rank, "end") for rank in range(self.job["size"])]
        assert all(len(one) == 1 for one in found), self.log()
        assert all(one[0] == found[0][0] for one in found)
        weights: dict[str, Any] = found[0][0]["end"]
        return weights

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for something; fails with the log."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.002)


class Lives:
    """Those of one run, forked from one server."""

    def __init__(self, launcher: Launcher, folder: Path, **job: Any) -> None:
        self._launcher, self.folder = launcher, folder
        self._job = {"root": str(folder / "run"), "size": 2, "epochs": 2, **job}
        self._count = 0
        self._running: list[int] = []

    def start(self, **changes: Any) -> Life:
        """One that is not waited for, see `join`. Its seed must not matter once it resumes."""
        number, self._count = self._count, self._count + 1
        trace, log = str(self.folder / f"trace{number}"), self.folder / f"log{number}"
        job: dict[str, Any] = {**self._job, "trace": trace, "seed": 1000 * number, **changes}
        self._running = self._launcher.start(job, job["size"], log, lets_end=True)
        return Life(job, lambda: "".join(Path(f"{log}.{rank}").read_text() for rank in range(job["size"])))

    def join(self, life: Life) -> Life:
        """Its ranks have ended."""
        life.statuses, self._running = self._launcher.join(), []
        return life

    def run(self, **changes: Any) -> Life:
        return self.join(self.start(**changes))

    def whole(self, **changes: Any) -> Life:
        """One that comes to its end."""
        life = self.run(**changes)
        assert life.statuses == [0] * life.job["size"], f"{life.statuses}\n{life.log()}"
        return life

    def without(self, *leave: list[int], **changes: Any) -> dict[str, Any]:
        """The weights of a run that never had these batches: rows of epoch, first batch, batches."""
        return self.whole(seed=0, leave=leave, **changes).weights()

    def close(self) -> None:
        """End what a failed test has left."""
        if self._running:
            for pid in self._running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._launcher.join()

    def steps(self) -> list[int]:
        """Of all snapshots, oldest first."""
        return [info.step for info in Repository(open_storage(self.folder / "run")).list()]

    def rollback(self) -> dict[str, Any]:
        """What the run remembers."""
        found: dict[str, Any] = json.loads((self.folder / "run" / "rollback.json").read_text())
        return found

    def notes(self) -> list[str]:
        """Of the resume report."""
        found: list[str] = json.loads((self.folder / "run" / "resume-report.json").read_text())["notes"]
        return found
