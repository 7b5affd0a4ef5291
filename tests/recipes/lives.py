"""Starts the recipes' training by a launcher, waits for what it does, and compares it with a run of one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support import interpreters

REPOSITORY = Path(__file__).parents[2]
PATIENCE_SECONDS = 400.0
Process = subprocess.Popen[bytes] | interpreters.Popen
STARTED: list[Process] = []
"""What `conftest` ends after each test."""
SCRIPT = "tests.recipes.train"


def until(there: Callable[[], object], log: Path) -> None:
    """Wait for it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not there():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


class Life:
    """One start of a command, which is a process group of its own.

    Args:
        command: what is started; a fork of an interpreter if `forked`, which finds torch imported.
        within: this folder.
        folder: of the run: `run` has its snapshots, `lines.R` what rank R has trained.
    """

    def __init__(
        self,
        command: Sequence[object],
        folder: Path,
        *,
        forked: bool = False,
        within: Path = REPOSITORY,
        **environment: str,
    ) -> None:
        self.folder, self.log = folder, folder / "log"
        self._begun = len(lines(folder))
        with self.log.open("ab") as log:
            start: Any = interpreters.Popen if forked else subprocess.Popen
            self.process: Process = start(
                list(map(str, command)),
                cwd=within,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **environment},
            )

        STARTED.append(self.process)

    def reaches(self, more: int, rank: int = 0) -> None:
        """Until it has written so many more lines, and something is durable."""
        until(
            lambda: (
                len(lines(self.folder, rank)) >= self._begun + more
                and any((self.folder / "run" / "snapshots").glob("*.json"))
            ),
            self.log,
        )

    def ends(self) -> int:
        """Its status."""
        try:
            return self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(self.log.read_text()) from None


def lines(folder: Path, rank: int = 0) -> list[str]:
    """What a rank has written, in all lives."""
    path = folder / f"lines.{rank}"
    return path.read_text().splitlines() if path.exists() else []


def trained(folder: Path, rank: int = 0) -> dict[int, set[str]]:
    """The losses of each step; of a step that was trained again there is one nevertheless, if it was the same."""
    found: dict[int, set[str]] = {}
    for line in lines(folder, rank):
        if line[0].isdigit():
            step, loss = line.split()
            found.setdefault(int(step), set()).add(loss)
    return found


def pid(folder: Path, rank: int = 0) -> int:
    """The process that trains."""
    return int([line for line in lines(folder, rank) if line.startswith("process")][-1].split()[1])


def gone(number: int) -> bool:
    """Whether a process has ended; one that nothing waits for has, too."""
    with suppress(OSError):
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def arguments(folder: Path, pace_seconds: float = 0.05) -> list[str]:
    """Of the script."""
    return [str(folder / "run"), str(folder / "lines"), str(pace_seconds)]


@cache
def unbroken() -> dict[int, set[str]]:
    """What one process trains that nothing interrupts."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        assert Life([sys.executable, "-m", SCRIPT, *arguments(folder, 0.0)], folder, forked=True).ends() == 0
        return trained(folder)
