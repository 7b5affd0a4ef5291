"""Several ranks of one run as processes that wait for orders: `python -m benchmarks.team` is one of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from benchmarks.engine import save_timed, wait_ready
from benchmarks.workloads import change_everything, gpt2_state, state_bytes
from ckpt_engine import Checkpointer

PATIENCE_SECONDS = 300.0


class Team:
    """The ranks of one run, each with the whole state, idle unless told; a context manager.

    Args:
        size: how many.
        root: where their snapshots go.
        nbytes: of the state, about.
    """

    def __init__(self, size: int, root: Path, nbytes: int) -> None:
        self.size = size
        self.root = root
        self._step = 0
        port = _free_port()
        self._ranks = [_start(rank, size, port, root, nbytes) for rank in range(size)]
        self.nbytes = int(self._all("ready")[0]["nbytes"])

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

    def in_turn(self) -> list[Mapping[str, float]]:
        """One snapshot: each rank takes and writes its part while all others do nothing; rank 0 is the last.

        Returns:
            For each rank `stall`, seconds until `save` returned, and `save`, seconds until its part was durable; of
            rank 0 that is the commit, as the parts of the others are there.
        """
        self._next()
        found = [self._one(rank, "save") for rank in reversed(range(self.size))]
        return found[::-1]

    def together(self) -> list[Mapping[str, float]]:
        """As `in_turn`, where all ranks begin at once."""
        self._next()
        return self._all("save")

    def written_bytes(self) -> list[int]:
        """What each rank has written of the last snapshot."""
        newest = max(path.name.partition("-r")[0] for path in (self.root / "data").glob("*.safetensors"))
        return [path.stat().st_size for path in sorted((self.root / "data").glob(f"{newest}-r*"))]

    def _next(self) -> None:
        self._step += 1
        self._all("change")

    def _all(self, order: str) -> list[Mapping[str, float]]:
        for rank in self._ranks:
            _tell(rank, {"order": order, "step": self._step})
        return [_answer(rank) for rank in self._ranks]

    def _one(self, rank: int, order: str) -> Mapping[str, float]:
        _tell(self._ranks[rank], {"order": order, "step": self._step})
        return _answer(self._ranks[rank])


def _start(rank: int, size: int, port: int, root: Path, nbytes: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.team", str(root), str(nbytes)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _tell(rank: subprocess.Popen[str], order: Mapping[str, Any]) -> None:
    assert rank.stdin is not None
    rank.stdin.write(json.dumps(order) + "\n")
    rank.stdin.flush()


def _answer(rank: subprocess.Popen[str]) -> Mapping[str, float]:
    assert rank.stdout is not None
    line = rank.stdout.readline()
    if not line:
        raise RuntimeError("a rank of the team has ended")
    found: Mapping[str, float] = json.loads(line)
    return found


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _checkpointer(root: str) -> Checkpointer:
    if int(os.environ["WORLD_SIZE"]) == 1:
        return Checkpointer(root, keep={"last": 1})
    import torch.distributed as dist

    from ckpt_engine.ranks.process_group import ProcessGroupRanks

    dist.init_process_group("gloo")
    return Checkpointer(root, ranks=ProcessGroupRanks(), keep={"last": 1})


def _serve(root: str, nbytes: int) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)
    state = gpt2_state(nbytes)
    with answers, _checkpointer(root) as checkpointer:
        checkpointer.prepare(state)
        for line in sys.stdin:
            order = json.loads(line)
            found: dict[str, float] = {}
            if order["order"] == "ready":
                found["nbytes"] = state_bytes(state)
            elif order["order"] == "change":
                change_everything(state)  # else one process alone would write only what is new
            else:
                found = _save(checkpointer, state, order["step"])
            answers.write(json.dumps(found) + "\n")


def _save(checkpointer: Checkpointer, state: Any, step: int) -> dict[str, float]:
    wait_ready(checkpointer, lambda: time.sleep(0.001))
    began = time.perf_counter()
    stall_seconds, handle = save_timed(checkpointer, state, step)
    handle.wait(PATIENCE_SECONDS)
    return {"stall": stall_seconds, "save": time.perf_counter() - began}


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
