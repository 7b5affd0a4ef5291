"""Lives of one run of a `Trainer` with several ranks, and what they add up to."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from tests.ranks.launch import PATIENCE_SECONDS, Launcher, writers_of

Line = dict[str, Any]


class Life:
    """What one life has written so far."""

    def __init__(self, job: dict[str, Any], size: int, log: Path) -> None:
        self.job, self.size, self._log = job, size, log
        self.pids: list[int] = []

    def lines(self, rank: int) -> list[Line]:
        """All of a rank, in order."""
        path = Path(f"{self.job['trace']}.{rank}")
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def batches(self, rank: int) -> list[Line]:
        return [line for line in self.lines(rank) if "samples" in line]

    def trained(self, rank: int) -> list[Line]:
        """Batches and logs."""
        return [line for line in self.lines(rank) if "samples" in line or "log" in line]

    def exit(self, rank: int) -> Any:
        """How the rank has ended, as it has said itself; None: it came to its end."""
        return next((line["exit"] for line in self.lines(rank) if "exit" in line), None)

    def end(self, rank: int) -> dict[str, str]:
        """Digests of what a rank has at its end."""
        found: dict[str, str] = json.loads(Path(f"{self.job['trace']}.end.{rank}").read_text())
        return found

    def log(self) -> str:
        """The ends of what all ranks have printed."""
        return "\n".join(path.read_text()[-4000:] for path in sorted(self._log.parent.glob(self._log.name + "*")))

    @property
    def is_whole(self) -> bool:
        """Whether no rank has ended."""
        return all(psutil.pid_exists(pid) for pid in self.pids)

    def until(self, condition: Any) -> None:
        """Wait for something; fails with the log."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.005)

    def reach(self, batches: int) -> None:
        """Wait until every rank has begun so many batches, or one has ended."""
        self.until(lambda: not self.is_whole or all(len(self.batches(rank)) >= batches for rank in range(self.size)))


class Lives:
    """The lives of the run in `folder`, one after another. Each seeds itself in its own way."""

    def __init__(self, launcher: Launcher, folder: Path, **job: Any) -> None:
        self._launcher, self.folder, self._job = launcher, folder, job
        self.lives: list[Life] = []
        self._launched: Life | None = None
        folder.mkdir(exist_ok=True)

    def job(self, **changes: Any) -> dict[str, Any]:
        """Of the next life. Once there is a snapshot the seed must not matter."""
        number = len(self.lives)
        seed = 1000 * number if self.snapshots() else 0
        where = {"root": str(self.folder / "run"), "trace": str(self.folder / f"trace{number}")}
        return {**where, "seed": seed, **self._job, **changes}

    def start(self, size: int = 2, *, lets_end: bool = False, **changes: Any) -> Life:
        """Of several ranks each gets what launchers tell them; one process is alone."""
        job = self.job(**changes, **({"alone": True} if size == 1 else {}))
        life = Life(job, size, self.folder / f"log{len(self.lives)}")
        self.lives.append(life)
        self._launched = life
        life.pids = self._launcher.start(job, size, life._log, lets_end=lets_end)
        return life

    def join(self) -> list[int]:
        """The exit statuses."""
        self._launched = None
        return self._launcher.join()

    def end(self) -> None:
        """Kill a life that was not joined: its test has failed."""
        if self._launched is not None:
            kill(self._launched.pids)
            self.join()

    def whole(self, size: int = 2, **changes: Any) -> Life:
        """A life that comes to its end."""
        life = self.start(size, **changes)
        assert self.join() == [0] * size, life.log()
        return life

    def snapshots(self) -> list[tuple[int, str]]:
        """Step and reason of all that exist, oldest first."""
        if not (self.folder / "run" / "snapshots").exists():
            return []
        return [(info.step, info.reason) for info in Repository(open_storage(self.folder / "run")).list()]

    def report(self) -> dict[str, Any]:
        """Of the last resume."""
        found: dict[str, Any] = json.loads((self.folder / "run" / "resume-report.json").read_text())
        return found


def kill(pids: Sequence[int], *, writers: bool = False) -> None:
    """With -9, and their writers too."""
    for pid in [*pids, *(writers_of(list(pids)) if writers else [])]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def require_continuation(life: Life, reference: Life) -> int:
    """All ranks of a life have trained and logged what the reference did, from one step on; that step.

    -1: nothing was trained.
    """
    steps = set()
    for rank in range(life.size):
        done, expected = life.trained(rank), reference.trained(rank)
        if not life.batches(rank):
            continue
        first = next(line for line in done if "samples" in line)
        done = done[done.index(first) :]
        start = expected.index(first)
        assert done == expected[start : start + len(done)], f"rank {rank}: {life.log()}"
        steps.add(first["step"])
    assert len(steps) <= 1, f"the ranks resumed at different steps: {steps}"
    return steps.pop() if steps else -1


def require_same_end(life: Life, reference: Life) -> None:
    """Weights, optimizer, scheduler, random streams and history of every rank are bitwise those of the reference."""
    for rank in range(life.size):
        assert life.end(rank) == reference.end(rank), f"rank {rank}: {life.log()}"


def require_each_sample_once(lives: Sequence[Life], samples: int, *, padding: int = 0) -> None:
    """What the lives have trained and did not lose has each sample of each epoch once, but for some that came again."""
    seen: dict[int, Counter[int]] = {}
    for number, life in enumerate(lives):
        later = [one.batches(0)[0]["step"] for one in lives[number + 1 :] if one.batches(0)]
        for rank in range(life.size):
            for line in life.batches(rank):
                if not later or line["step"] < later[0]:
                    # The epoch that a state has is that of the step before.
                    seen.setdefault(int(line["epoch"] or 0), Counter()).update(line["samples"])
    for epoch, found in seen.items():
        assert set(found) == set(range(samples)), f"epoch {epoch} lacks samples"
        assert sum(found.values()) - samples <= padding, f"epoch {epoch}: {found.most_common(3)}"
