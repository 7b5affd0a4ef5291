"""One training process of a run, as the campaign uses it: started, listened to, stopped, killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.faults.trainer import Order, train

DEATH_SECONDS = 90.0
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Heard:
    """Something that a training said."""

    kind: str
    row: dict[str, Any]

    def is_event(self, name: str, **fields: Any) -> bool:
        """Whether it is such an event of the checkpointer."""
        return self.kind == "event" and self.row["event"] == name and all(self.row[k] == v for k, v in fields.items())


def fork_server() -> Any:
    """Where trainings are forked from, with torch imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.trainer", "ckpt_engine.store.storage.objects_s3"])
    return context


def start_fork_server() -> None:
    """Start it, if it does not run. Its imports are found by PYTHONPATH only (python/cpython#117378)."""
    from multiprocessing import forkserver

    fork_server()
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class Life:
    """A training from its start to its end. `heard` grows while somebody waits."""

    def __init__(self, order: Order) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.heard: list[Heard] = []
        self.ended = False
        self._pipe = ours
        self._writers: set[psutil.Process] = set()
        self._process = fork_server().Process(target=train, args=(order, theirs), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the training."""
        assert self._process.pid is not None
        return int(self._process.pid)

    def until(self, found: Callable[[Heard], bool], seconds: float, *, since: int = 0) -> Heard | None:
        """The first thing like this that was heard, `since` so many; None: not in so many seconds, or it has ended."""
        deadline = time.monotonic() + seconds
        while True:
            for one in self.heard[since:]:
                if found(one):
                    return one
            since = len(self.heard)
            if self.ended or not self.listen(deadline - time.monotonic()):
                return None

    def listen(self, seconds: float) -> bool:
        """Wait at most so long for something to be heard; whether there is."""
        if self.ended:
            return False
        try:
            if not self._pipe.poll(max(0.0, seconds)):
                return False
            while self._pipe.poll(0):
                self.heard.append(Heard(*self._pipe.recv()))
        except (EOFError, ConnectionError):
            self.ended = True
        return True

    def listen_for(self, seconds: float) -> None:
        """Hear what is said for so long."""
        deadline = time.monotonic() + seconds
        while not self.ended and (left := deadline - time.monotonic()) > 0:
            self.listen(left)

    def stop(self) -> None:
        """Ask it to close."""
        with suppress(OSError):
            self._pipe.send("stop")

    def look_around(self) -> None:
        """Note the writer, which is no child of this process once the training is dead."""
        with suppress(psutil.NoSuchProcess):
            self._writers.update(psutil.Process(self.pid).children(recursive=True))

    def kill(self) -> None:
        """`kill -9` to the training alone."""
        self.look_around()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def end(self, *, kill: bool, writer: bool) -> bool:
        """See it and its writer end, by `kill -9` or by themselves; whether they did in time."""
        self.look_around()
        for process in self._writers if kill and writer else ():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if kill:
            self.kill()
        self.listen_for(DEATH_SECONDS)
        self._process.join(DEATH_SECONDS)
        _, alive = psutil.wait_procs(list(self._writers), DEATH_SECONDS)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process.is_alive():
            self._process.kill()
            self._process.join(DEATH_SECONDS)
            return False
        return not alive
