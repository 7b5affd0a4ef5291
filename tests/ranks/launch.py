"""Starts the ranks of a run as processes, as `torchrun` does, kills some, and waits for all."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
PATIENCE_SECONDS = 150.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Launched:
    """All ranks of one start of a run."""

    def __init__(self, module: str, job: dict[str, Any], size: int, log: Path) -> None:
        port = str(free_port())
        self._log = log
        self.ranks = []
        for rank in range(size):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "TORCHELASTIC_RUN_ID": port,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            with open(f"{log}.{rank}", "ab") as output:  # noqa: PTH123
                self.ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-W", "ignore", "-m", module, json.dumps(job)],
                        cwd=REPOSITORY,
                        env={**os.environ, **environment},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                    )
                )

    def writers(self) -> list[int]:
        """The writer processes of the ranks that live."""
        found = []
        for rank in self.ranks:
            with suppress(OSError):
                children = Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()
                found += [int(pid) for pid in children]
        return found

    def wait(self) -> list[int]:
        """The exit status of every rank; one that fails ends the others, as under `torchrun`."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(rank.poll() is None for rank in self.ranks):
            assert time.monotonic() < deadline, f"the ranks hang: {self.text()}"
            if any(rank.poll() for rank in self.ranks):
                self.kill()
            time.sleep(0.02)
        return [rank.returncode for rank in self.ranks]

    def kill(self) -> None:
        """All ranks, at once and without a word."""
        for rank in self.ranks:
            with suppress(ProcessLookupError):
                rank.send_signal(signal.SIGKILL)
        for rank in self.ranks:
            rank.wait(PATIENCE_SECONDS)

    def text(self) -> str:
        """What the ranks have said."""
        return "\n".join(Path(f"{self._log}.{n}").read_text()[-6000:] for n in range(len(self.ranks)))
