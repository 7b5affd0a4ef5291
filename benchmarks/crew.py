"""Processes that wait for orders, the ranks of one process group: who starts them, and how they serve."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch

PATIENCE_SECONDS = 300.0

Answer = Mapping[str, float]


class Crew:
    """So many ranks, idle until an order comes; a context manager.

    Args:
        size: how many.
        module, arguments: what each of them runs; it calls `serve`.
    """

    def __init__(self, size: int, module: str, arguments: Sequence[str]) -> None:
        self.size = size
        port = _free_port()
        self._ranks = [_start(rank, size, port, module, arguments) for rank in range(size)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(PATIENCE_SECONDS)
            finally:
                rank.kill()
                assert rank.stdout is not None
                rank.stdout.close()

    def all(self, order: str, **more: Any) -> list[Answer]:
        """What each rank answers; all begin at once."""
        for rank in self._ranks:
            _tell(rank, {"order": order, **more})
        return [_answer(rank) for rank in self._ranks]

    def one(self, rank: int, order: str, **more: Any) -> Answer:
        """What one rank answers."""
        _tell(self._ranks[rank], {"order": order, **more})
        return _answer(self._ranks[rank])

    def statuses(self) -> list[int]:
        """The exit statuses of ranks that got the order to end."""
        return [rank.wait(PATIENCE_SECONDS) for rank in self._ranks]

    def tell(self, order: str, **more: Any) -> None:
        """All ranks; they do not answer."""
        for rank in self._ranks:
            _tell(rank, {"order": order, **more})


def serve(answers: int, handle: Callable[[Mapping[str, Any]], Answer]) -> None:
    """Answer orders until standard input ends.

    Args:
        answers: descriptor to write to, of `take_stdout`.
    """
    with os.fdopen(answers, "w", buffering=1) as out:
        for line in sys.stdin:
            out.write(json.dumps(handle(json.loads(line))) + "\n")


def take_stdout() -> int:
    """What was standard output carries answers only: whatever libraries print goes to stderr."""
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def threads() -> int:
    """Of torch for each rank, so that together they have all cores."""
    return max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"]))


def join_group() -> None:
    """Become a rank of the process group."""
    import torch.distributed as dist

    torch.set_num_threads(threads())
    dist.init_process_group("gloo")


def _start(rank: int, size: int, port: int, module: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _tell(rank: subprocess.Popen[str], order: Mapping[str, Any]) -> None:
    assert rank.stdin is not None
    rank.stdin.write(json.dumps(order) + "\n")
    rank.stdin.flush()


def _answer(rank: subprocess.Popen[str]) -> Answer:
    assert rank.stdout is not None
    line = rank.stdout.readline()
    if not line:
        raise RuntimeError("a rank of the crew has ended")
    found: Answer = json.loads(line)
    return found


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
