"""One rank of a run on several machines: trains with all-reduced gradients and saves, until killed or done.

Each rank has a random stream of its own. Gradients are whole numbers, so that sums are exact in any order, and
`Expected` knows the weights after every step.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.errors import CkptError
from ckpt_engine.ranks.process_group import ProcessGroupRanks
from ckpt_engine.snapshot.save_request import SaveHandle
from ckpt_engine.store.container import digest

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


class Trace:
    """What a rank tells, a line each: the step with the digest, then what became of it."""

    def __init__(self, job: dict[str, Any], rank: int) -> None:
        self._fd = os.open(f"{job['trace']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._handles: deque[SaveHandle] = deque()

    def line(self, *words: object) -> None:
        os.write(self._fd, (" ".join(map(str, words)) + "\n").encode())

    def saved(self, handle: SaveHandle) -> None:
        """A snapshot is on its way."""
        self._handles.append(handle)

    def settle(self, patience: float | None) -> None:
        """Tell what became of all snapshots, waiting so many seconds for each; or as far as it is known (None)."""
        while self._handles and (patience is not None or self._handles[0].done()):
            one = self._handles.popleft()
            try:
                one.wait(patience)
            except CkptError as err:
                self.line("failed", one.step, err.code)
            else:
                self.line("durable", one.step)


def main(job: dict[str, Any]) -> None:
    """Resume, train, save.

    `waits`: each snapshot is waited for until it is durable. Otherwise one is taken whenever all ranks are ready, and
    no rank waits.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_SECONDS))
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = ProcessGroupRanks(own={"own"}, wait_seconds=job["wait_seconds"])
    # Machines may have a place each.
    options = json.loads(json.dumps(job["options"]).replace("{machine}", socket.gethostname()))
    ckpt = Checkpointer(options, ranks=ranks)
    trace = Trace(job, rank)
    stream, weights, step = stream_of(rank), torch.zeros(SHAPE), 0
    loaded = ckpt.load()
    if loaded is not None:
        step, weights = loaded["step"], loaded["model"]["weights"]
        stream.set_state(loaded["own"]["stream"])
    trace.line("resumed", step, said(weights))
    for _ in range(job["steps"]):
        # Whether all are ready is known by the all-reduce that the step has anyway.
        total = torch.cat([gradient(stream).flatten(), torch.tensor([float(ckpt.engine.ready())])])
        dist.all_reduce(total)
        weights += total[:-1].reshape(SHAPE)
        step += 1
        trace.line("step", step, said(weights))
        state = {"model": {"weights": weights}, "step": step, "own": {"stream": stream.get_state()}}
        if job["waits"] or total[-1] == world:
            trace.saved(ckpt.save(state, step=step))
        ckpt.before_update()
        trace.settle(30.0 if job["waits"] else None)
        time.sleep(job["pace"])
    trace.settle(30.0)
    ckpt.close()
    dist.destroy_process_group()
