"""One rank of a run on several nodes: trains with all-reduced gradients and saves every step, until killed or done.

Each rank has a random stream of its own. Gradients are whole numbers, so that sums are exact in any order, and
`Expected` knows the weights after every step.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.errors import CkptError
from ckpt_engine.ranks.process_group import ProcessGroupRanks
from ckpt_engine.store.digest import digest

SHAPE = (400, 16)
GROUP_SECONDS = 15.0
"""How long an all-reduce waits for a rank that is silent."""


def gradient(stream: torch.Generator) -> torch.Tensor:
    return torch.randint(-8, 9, SHAPE, generator=stream).to(torch.float32)


def stream_of(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(rank)


class Expected:
    """The digest of the weights after every step, worked out as far as it is asked for."""

    def __init__(self, size: int) -> None:
        self._streams = [stream_of(rank) for rank in range(size)]
        self._weights = torch.zeros(SHAPE)
        self._found = [said(self._weights)]

    def __getitem__(self, step: int) -> str:
        while len(self._found) <= step:
            for stream in self._streams:
                self._weights += gradient(stream)
            self._found.append(said(self._weights))
        return self._found[step]


def said(weights: torch.Tensor) -> str:
    return digest(weights.numpy().data).removeprefix("xxh3-128:")[:16]


def main(job: dict[str, Any]) -> None:
    """Resume, train, save. What happened is in `<trace>.<rank>`: the step with the digest, then what became of it."""
    torch.set_num_threads(1)
    rank = job["first"] + int(os.environ["RANK"])
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job["world"]),
        MASTER_ADDR=job["master"],
        MASTER_PORT=str(job["port"]),
        GLOO_SOCKET_IFNAME=job["link"],
    )
    os.environ.update(job.get("environment", {}))
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_SECONDS))
    ranks = ProcessGroupRanks(own={"own"}, wait_seconds=8.0)
    ckpt = Checkpointer(job["root"], ranks=ranks, keep={"last": 3})
    fd = os.open(f"{job['trace']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    stream, weights, step = stream_of(rank), torch.zeros(SHAPE), 0
    loaded = ckpt.load()
    if loaded is not None:
        step, weights = loaded["step"], loaded["model"]["weights"]
        stream.set_state(loaded["own"]["stream"])
    os.write(fd, f"resumed {step} {said(weights)}\n".encode())
    for _ in range(job["steps"]):
        total = gradient(stream)
        dist.all_reduce(total)
        weights += total
        step += 1
        os.write(fd, f"step {step} {said(weights)}\n".encode())
        state = {"model": {"weights": weights}, "step": step, "own": {"stream": stream.get_state()}}
        handle = ckpt.save(state, step=step)
        ckpt.before_update()
        try:
            handle.wait(30.0)
        except CkptError as err:
            os.write(fd, f"failed {step} {err.code}\n".encode())
        else:
            os.write(fd, f"durable {step}\n".encode())
    ckpt.close()
    dist.destroy_process_group()
