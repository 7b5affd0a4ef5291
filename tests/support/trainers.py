"""Training processes that can be killed: forks of a server that has paid for the imports once.

A server is a module of ours that calls `serve`. It reads jobs from its standard input, one line of JSON each, and
answers on standard output, one line of JSON each: the process id of the fork when it starts, its exit status when it is
gone. A fork is a process group of its own, as a job is under a scheduler.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support import interpreters

REPOSITORY = Path(__file__).parents[2]
PATIENCE_SECONDS = 240.0
Job = Mapping[str, Any]


def wait_for_the_arena(engine: Any) -> None:
    """If it is being made ready: until all of its slots are.

    The thread that makes them gives way to everybody, and on a machine that is busy it may not run for minutes: each
    slot is touched as if a snapshot waited for it.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    slots = engine._pipeline.slots
    while (warm := slots._warm_up) is not None:
        warm.hurry()
        assert time.monotonic() < deadline, "the arena does not become ready"
        time.sleep(0.001)
        slots.ready()


class ForkServer:
    """Starts training processes, one at a time.

    Args:
        module: that serves.
    """

    def __init__(self, module: str) -> None:
        self._pid: int | None = None
        self._server = interpreters.Popen(
            [sys.executable, "-W", "ignore", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            preload=interpreters.preload_of(module),
        )

    def start(self, job: Job) -> int:
        """The process id of the new trainer; one that was never joined, because its test has failed, is killed."""
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self.join()
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        self._pid = self._answer("pid")
        return self._pid

    def join(self) -> int:
        """The exit status of the trainer once it is gone; negative: the signal that killed it."""
        self._pid = None
        return self._answer("status")

    def close(self) -> None:
        """End the server, and its trainer. A worker that a test has left may keep its input open: a line says so."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._server.stdin.write("\n")
        self._server.stdin.close()
        self._server.wait(PATIENCE_SECONDS)
        self._server.stdout.close()

    def _answer(self, key: str) -> int:
        assert self._server.stdout is not None
        return int(json.loads(self._server.stdout.readline())[key])


class TraceFile(list[Any]):
    """A trace that is on disk up to its last entry, whatever happens to the process.

    Args:
        pace_seconds: how long each entry takes, so that there are moments to be killed at.
        wait_after: after so many entries the next one waits for `go_on`; None: none does.
    """

    def __init__(self, path: str, pace_seconds: float = 0.0, wait_after: int | None = None) -> None:
        super().__init__()
        self._pace_seconds = pace_seconds
        self._wait_after = wait_after
        self._go = _go(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def append(self, entry: Any) -> None:
        super().append(entry)
        os.write(self._descriptor, f"{entry!r}\n".encode())
        time.sleep(self._pace_seconds)
        if len(self) == self._wait_after:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not self._go.exists():
                assert time.monotonic() < deadline, "the file that lets it go on does not come"
                time.sleep(0.001)


def go_on(trace: Path | str) -> None:
    """Let a waiting trainer go on. What a test did to it before, such as a signal, happens while it waits."""
    _go(trace).touch()


def _go(trace: Path | str) -> Path:
    return Path(f"{trace}.go")


def read(trace: Path) -> list[str]:
    """The complete lines of a trace file."""
    return trace.read_text().split("\n")[:-1] if trace.exists() else []


def log(trace: Path | str) -> str:
    """What the process of this trace has printed and logged."""
    path = Path(f"{trace}.log")
    return path.read_text() if path.exists() else ""


def wait_for_entries(pid: int, trace: Path, entries: int) -> None:
    """Until the trace has so many entries, or its trainer is gone before."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(done := read(trace)) < entries and Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"only {len(done)} of {entries} entries: {log(trace)}"
        time.sleep(0.001)


def signal_after(pid: int, delay_seconds: float, number: int = signal.SIGKILL) -> None:
    """Signal a trainer, unless it is gone."""
    time.sleep(delay_seconds)  # a random moment, also in the middle of a step, a copy or a commit
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def serve(run: Callable[[dict[str, Any]], None]) -> None:
    """Serve jobs until an empty line, or until standard input ends."""
    for line in iter(sys.stdin.readline, ""):
        if not line.strip():
            return
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _live(run, job)
        print(json.dumps({"pid": child}), flush=True)
        _, wait_status = os.waitpid(child, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(wait_status)}), flush=True)


def _live(run: Callable[[dict[str, Any]], None], job: dict[str, Any]) -> None:
    """Run the job and end this process as the interpreter would: the fork never returns into the server's loop."""
    status = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it runs beside itself
        output = os.open(f"{job['trace']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        logging.basicConfig(level=logging.INFO)
        try:
            run(job)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0
            traceback.print_exc()
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - it ends here
        traceback.print_exc()
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
