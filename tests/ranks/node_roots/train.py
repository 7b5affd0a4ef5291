"""One rank of a run whose nodes have a folder each, all of them on this machine: `tests.ranks.launch` starts it.

It saves states until it is killed or done; every byte tells its step. What was acknowledged is in `<trace>.<rank>`.
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
from tests.ranks.train_plain import check, state_of


class NodeRanks(ProcessGroupRanks):
    """A rank that takes itself to be on a machine of its own."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(**options)
        self._name = name

    @property
    def node(self) -> str:
        return self._name

    @property
    def address(self) -> str:
        return "127.0.0.1"


def main(job: dict[str, Any]) -> None:
    """Resume, check, and save again and again; ranks meet at every step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    node = job["nodes"][rank]
    ranks = NodeRanks(node, own={"own"}, wait_seconds=job["wait_seconds"])
    ckpt = Checkpointer(tiers=[f"{job['folder']}/{node}", *job["further"]], ranks=ranks, keep={"last": 2})
    fd = os.open(f"{job['trace']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    loaded = ckpt.load()
    saved = job["saved_size"] or dist.get_world_size()
    step = check(loaded, rank % saved) if loaded is not None else 0
    os.write(fd, f"resumed {step}\n".encode())
    for _ in range(job["steps"]):
        step += 1
        dist.barrier()
        handle = ckpt.save(state_of(step, rank), step=step)
        try:
            handle.wait(job["wait_seconds"] * 4)
        except CkptError as err:
            os.write(fd, f"failed {step} {err.code}\n".encode())
        else:
            os.write(fd, f"durable {step}\n".encode())
    ckpt.close()
    dist.destroy_process_group()
