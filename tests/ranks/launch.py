"""Starts the ranks of a run as processes, as `torchrun` does: `python -m tests.ranks.launch MODULE` serves its input.

Each run is one line of JSON: `job`, `size`, `port`, `log`, and for one machine of several `first` (of its ranks),
`world` and `environment`. Its ranks are forks of this process, so that the imports are paid once; each calls
`MODULE.main(job)`. Answers the process ids, and when all are gone their exit statuses. One rank that fails ends the
others of its machine.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support import interpreters, writers

REPOSITORY = Path(__file__).parents[2]
PATIENCE_SECONDS = 300.0


def free_port() -> int:
    """A free port outside the range that the system gives to clients, so that it stays free until it is used."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, given) if given > 11_000 else 0))
            return int(sock.getsockname()[1])


class Launcher:
    """Starts runs of one module, one at a time."""

    def __init__(self, module: str) -> None:
        self._server = interpreters.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.ranks.launch", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            preload=interpreters.preload_of(module),
        )

    def start(
        self,
        job: dict[str, Any],
        size: int,
        log: Path,
        patience: float = PATIENCE_SECONDS,
        *,
        first: int = 0,
        world: int | None = None,
        environment: Mapping[str, str] | None = None,
        lets_end: bool = False,
    ) -> list[int]:
        """The process ids of the ranks.

        Args:
            size: ranks on this machine.
            first: of them, where there are several machines.
            world: ranks on all machines; None: this is the only one.
            environment: beyond that of one machine.
            lets_end: a rank that fails does not end the others.
        """
        assert self._server.stdin is not None
        run = {"job": job, "size": size, "port": free_port(), "log": str(log), "patience": patience}
        run |= {"first": first, "world": world or size, "environment": dict(environment or {})}
        run["lets_end"] = lets_end
        self._server.stdin.write(json.dumps(run) + "\n")
        self._server.stdin.flush()
        pids: list[int] = self._answer()
        return pids

    def join(self) -> list[int]:
        """The exit statuses; negative: the signal that killed it."""
        statuses: list[int] = self._answer()
        return statuses

    def close(self) -> None:
        """End the server. A worker that a test has left may keep its input open: a line says so."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write("\n")
        self._server.stdin.close()
        self._server.wait(PATIENCE_SECONDS)
        self._server.stdout.close()

    def _answer(self) -> Any:
        assert self._server.stdout is not None
        return json.loads(self._server.stdout.readline())


def writers_of(pids: list[int]) -> list[int]:
    """The writer processes of these ranks."""
    return [one.pid for pid in pids for one in writers.writers_of(pid)]


def serve(module: str) -> None:
    """Serve runs until an empty line, or until standard input ends."""
    main = importlib.import_module(module).main
    for line in iter(sys.stdin.readline, ""):
        if not line.strip():
            return
        run = json.loads(line)
        pids = [_fork(main, run, rank) for rank in range(run["size"])]
        print(json.dumps(pids), flush=True)
        print(json.dumps(_wait(pids, run["patience"], lets_end=run["lets_end"])), flush=True)


def _wait(pids: list[int], patience: float, *, lets_end: bool) -> list[int]:
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + patience
    while len(statuses) < len(pids):
        for pid in pids:
            if pid not in statuses:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
        if (any(statuses.values()) and not lets_end) or time.monotonic() > deadline:
            for pid in pids:
                if pid not in statuses:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [statuses[pid] for pid in pids]


def _fork(main: Any, run: dict[str, Any], rank: int) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setpgid(0, 0)
        output = os.open(f"{run['log']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(
            RANK=str(run["first"] + rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(run["world"]),
            LOCAL_WORLD_SIZE=str(run["size"]),
            GROUP_RANK=str(run["first"] // run["size"]),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(run["port"]),
            TORCHELASTIC_RUN_ID=str(run["port"]),
            GLOO_SOCKET_IFNAME="lo",
        )
        os.environ.update(run["environment"])
        logging.basicConfig(level=logging.INFO)
        main(run["job"])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    except BaseException:  # noqa: BLE001 - the fork must never return into the server's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1])
    os._exit(0)  # to take down what torch has imported takes a second
