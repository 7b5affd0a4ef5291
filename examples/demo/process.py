"""Runs a training script as a process of its own and kills it for real."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from demo.record import Entry, read_record
from demo.settings import EXAMPLES

REAP_SECONDS = 30.0
LOG_TAIL_LINES = 15


class TrainingFailedError(Exception):
    """A training process ended by itself without success, or stopped making progress."""


class TrainingProcess:
    """A training script in a process group of its own; a context manager that leaves no process behind.

    Args:
        command: its command line.
        out: folder of its record; its output is appended to `log.txt` there.
    """

    def __init__(self, command: Sequence[str], out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._log = out / "log.txt"
        self._record = out / "record.jsonl"
        self._offset = self._record.stat().st_size if self._record.exists() else 0
        self.started = time.time()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(EXAMPLES)},
            )
        self.pid = self._process.pid

    def __enter__(self) -> TrainingProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.kill(self.descendants())

    def running(self) -> bool:
        """Whether it runs.

        Raises:
            TrainingFailedError: it ended by itself and not well; the end of its output is in the message.
        """
        code = self._process.poll()
        if code is None:
            return True
        if code != 0:
            raise TrainingFailedError(f"the training process ended with status {code}:\n{self.log_tail()}")
        return False

    def entries(self) -> list[Entry]:
        """What it recorded since the last call."""
        if not self._record.exists():
            return []
        entries, self._offset = read_record(self._record, self._offset)
        return entries

    def descendants(self) -> list[psutil.Process]:
        """Its loader workers and the checkpoint writer, which `killpg` misses: it has a session of its own."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).children(recursive=True)
        return []

    def kill(self, others: Sequence[psutil.Process] = ()) -> float:
        """`kill -9` to `others`, then to the process group; returns the wall-clock time of it."""
        for process in others:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        now = time.time()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(REAP_SECONDS)
        _wait_until_dead(others)
        return now

    def pause(self) -> None:
        """Let it stand still, unless it has ended; its loader workers and the checkpoint writer go on."""
        deadline = time.monotonic() + REAP_SECONDS
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            process.suspend()
            while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{process} does not stop within {REAP_SECONDS:.0f} s")
                time.sleep(0.0001)

    def go_on(self) -> None:
        """Undo `pause`."""
        with suppress(psutil.NoSuchProcess):
            psutil.Process(self.pid).resume()

    def log_tail(self) -> str:
        """The end of its output."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


def _wait_until_dead(processes: Sequence[psutil.Process]) -> None:
    """Returns when none of them runs any more; whether their new parent has reaped them is not our business.

    Raises:
        TimeoutError: one of them survives SIGKILL.
    """
    deadline = time.monotonic() + REAP_SECONDS
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{process} is still there {REAP_SECONDS:.0f} s after SIGKILL")
                time.sleep(0.001)
