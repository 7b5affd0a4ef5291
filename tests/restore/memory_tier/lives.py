"""One run that lives several times: starts trainers, kills them or their writers, and follows what they write down."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests.support.trainers import ForkServer, log
from tests.support.writers import writers_of

PATIENCE_SECONDS = 120.0


class Trainers(ForkServer):
    """Trains plain loops; jobs are those of `tests.restore.memory_tier.plain_trainer`."""

    def __init__(self) -> None:
        super().__init__("tests.restore.memory_tier.plain_trainer")


def until(condition: Callable[[], object], what: Callable[[], str], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for a condition.

    Raises:
        AssertionError: it does not come true.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.001)


@dataclass
class Life:
    """One trainer process.

    Args:
        trace: what it writes down.
        pid: of the trainer.
        writers: the writers it has had, as far as somebody looked.
    """

    trace: Path
    pid: int
    writers: list[psutil.Process] = field(default_factory=list)

    def lines(self) -> list[list[str]]:
        """The complete lines of its trace."""
        if not self.trace.exists():
            return []
        return [line.split() for line in self.trace.read_text().split("\n")[:-1]]

    def log(self) -> str:
        return log(self.trace)

    def steps(self, what: str) -> list[int]:
        return [int(line[1]) for line in self.lines() if line[0] == what]

    @property
    def over(self) -> bool:
        return bool(self.steps("digest")) or not psutil.pid_exists(self.pid)

    @property
    def resumed(self) -> tuple[int, str, int | None] | None:
        """Step, place, and the steps that were said to be lost."""
        found = [line for line in self.lines() if line[0] == "resumed"]
        if not found:
            return None
        _, step, place, lost = found[0]
        return int(step), place, None if lost == "None" else int(lost)

    def wait_for_steps(self, count: int) -> None:
        """Until it has begun so many steps, or is done before."""
        until(lambda: len(self.steps("begin")) >= count or self.over, self.log)

    def writer(self) -> psutil.Process | None:
        """The writer it has now."""
        for one in writers_of(self.pid):
            if one not in self.writers:
                self.writers.append(one)
            return one
        return None

    def kill(self) -> None:
        self.writer()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def kill_writer(self) -> bool:
        found = self.writer()
        if found is not None:
            found.kill()
        return found is not None


@dataclass
class Run:
    """A run of `steps` steps in `folder`, whose trainers may die.

    Args:
        width: of the network; the state has about 12 bytes times its square.
    """

    trainers: Trainers
    folder: Path
    steps: int
    width: int = 64
    lazy: bool = False
    linger: float = 60.0
    pace: float = 0.002
    durable_every: int = 7
    lives: list[Life] = field(default_factory=list)

    @property
    def root(self) -> str:
        return str(self.folder / "run")

    def live(self, *, memory: bool = True, root: str | None = None, **more: Any) -> Life:
        """Start the next trainer."""
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"{len(self.lives)}.trace"
        job = {
            "root": root or self.root,
            "trace": str(trace),
            "steps": self.steps,
            "width": self.width,
            "lazy": self.lazy,
            "linger": self.linger,
            "pace": self.pace,
            "durable_every": self.durable_every,
            "memory": memory,
            **more,
        }
        life = Life(trace, self.trainers.start(job))
        self.lives.append(life)
        return life

    def reference(self) -> list[list[str]]:
        """The trace of a run that is not killed and takes no snapshots in memory."""
        uninterrupted = Run(self.trainers, self.folder / "reference", self.steps, self.width, pace=0.0)
        life = uninterrupted.live(memory=False, durable_every=10**9)
        assert self.trainers.join() == 0, life.log()
        return life.lines()

    def assert_exact(self, reference: list[list[str]]) -> None:
        """Each life continues the run bit for bit from where it resumed, and the last one ends where it ends."""
        losses = {int(line[1]): line[2] for line in reference if line[0] == "end"}
        for number, life in enumerate(self.lives):
            for what, step, *value in life.lines():
                if what == "end":
                    assert losses[int(step)] == value[0], f"life {number}, step {step}: {life.log()}"
        assert [line for line in self.lives[-1].lines() if line[0] == "digest"] == [
            line for line in reference if line[0] == "digest"
        ], self.lives[-1].log()

    def assert_no_writer_left(self, seconds: float) -> None:
        """All writers anybody saw end by themselves."""
        deadline = time.monotonic() + seconds
        for life in self.lives:
            for writer in life.writers:
                until(partial(_gone, writer), lambda: "a writer is still there", max(0.1, deadline - time.monotonic()))


def _gone(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True
