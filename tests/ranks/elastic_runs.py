"""Lives of one run with other numbers of ranks one after the other, and what they must add up to."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.store import names
from tests.ranks.launch import PATIENCE_SECONDS, Launcher, writers_of
from tests.ranks.train_elastic import digest

SAMPLES = 192


class Lives:
    """The lives of the run in `folder`. Each seeds itself in its own way, which must not matter once it resumes."""

    def __init__(self, launcher: Launcher, folder: Path, trainer: str, **job: Any) -> None:
        self._launcher = launcher
        self.folder = folder
        self._job = {"trainer": trainer, "epochs": 2, "samples": SAMPLES, "pace": 0.0, **job}
        self.sizes: list[int] = []
        self.teams: list[int] = []

    def run(self, size: int, *, kill_after: int | None = None, victim: int | None = None, **changes: Any) -> list[int]:
        """One life, killed with its writers once it has a snapshot of so many steps after its start; its statuses.

        Args:
            victim: the only rank that is killed; its launcher ends the others.
        """
        life = len(self.sizes)
        self.sizes.append(size)
        job = {
            **self._job,
            "root": str(self.folder / "run"),
            "trace": str(self.folder / f"trace{life}"),
            "size": size,
            "seed": life,
            **changes,
        }
        self.teams.append(job.get("team", 1) if size > 1 else 1)
        pids = self._launcher.start(job, size, self.folder / "log")
        if kill_after is not None:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not self._reached(life, kill_after) and time.monotonic() < deadline and psutil.pid_exists(pids[0]):
                time.sleep(0.005)
            for pid in pids + writers_of(pids) if victim is None else [pids[victim]]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return self._launcher.join()

    def lines(self, life: int, rank: int) -> list[dict[str, Any]]:
        """What a rank has trained on."""
        path = self.folder / f"trace{life}.{rank}"
        found = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in found]

    def start(self, life: int) -> int:
        """The step at which a life began."""
        return int(self.lines(life, 0)[0]["step"])

    def trained(self) -> dict[int, Counter[int]]:
        """By epoch, how often each sample was trained on; what a life did after the start of the next one is lost."""
        seen: dict[int, Counter[int]] = {}
        for life, size in enumerate(self.sizes):
            end = self.start(life + 1) if life + 1 < len(self.sizes) else None
            for rank in range(0, size, self.teams[life]):  # the ranks of a team have the same samples
                for line in self.lines(life, rank):
                    if "samples" in line and (end is None or line["step"] < end):
                        seen.setdefault(line["epoch"], Counter()).update(line["samples"])
        return seen

    def require_whole_epochs(self, padding: int = 0) -> None:
        """Each sample of each epoch came once, but for so many that came again."""
        for epoch, seen in self.trained().items():
            assert set(seen) == set(range(self._job["samples"])), f"epoch {epoch} lacks samples"
            assert sum(seen.values()) - self._job["samples"] <= padding, f"epoch {epoch}: {seen.most_common(3)}"

    def require_saved_state(self, life: int) -> None:
        """All ranks of a life began with bitwise the weights and the optimizer state of the snapshot."""
        step = self.start(life)
        with Checkpointer(self.folder / "run", writer="thread") as ckpt:
            state = ckpt.load(step)
        assert state is not None
        if "state_dict" in state:
            model = {name.removeprefix("net."): value for name, value in state["state_dict"].items()}
            optimizer = state["optimizer_states"][0]
        else:
            model, optimizer = state["model"], state["optimizer"]
        expected = digest(model, optimizer)
        for rank in range(self.sizes[life]):
            first = self.lines(life, rank)[0]
            assert (first["step"], first["shared"]) == (step, expected), f"life {life}, rank {rank}"

    def require_teams(self, life: int) -> None:
        """The ranks that share a model had the same samples and draws."""
        for rank in range(self.sizes[life]):
            lines = [self.lines(life, one) for one in (rank, rank // self.teams[life] * self.teams[life])]
            both = min(map(len, lines))
            assert both
            assert lines[0][:both] == lines[1][:both], f"life {life}, rank {rank}"

    def report(self) -> dict[str, Any]:
        """Of the last resume."""
        found: dict[str, Any] = json.loads((self.folder / "run" / "resume-report.json").read_text())
        return found

    def logs(self) -> str:
        """The ends of all logs, for the message of a failing test."""
        return "\n".join(log[-4000:] for log in self.whole_logs().split("\0"))

    def whole_logs(self) -> str:
        return "\0".join(path.read_text() for path in sorted(self.folder.glob("log.*")))

    def _reached(self, life: int, steps: int) -> bool:
        done = self.lines(life, 0)
        if not done:
            return False
        names = [path.name for path in (self.folder / "run" / "snapshots").glob("[!.]*.json")]
        newest = max((step_of(name) for name in names), default=0)
        return newest >= int(done[0]["step"]) + steps


def step_of(name: str) -> int:
    """The step of a manifest's file."""
    parsed = names.parse_id(name.removesuffix(".json"))
    assert parsed is not None
    return parsed.step
