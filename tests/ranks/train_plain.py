"""One rank of a run without a trainer: saves states until it is killed or done.

Every byte tells its step, but for what is frozen: that is large enough that each rank's snapshots refer to older ones.

Its launcher has set the environment and calls `main(job)`. What was acknowledged is in `<trace>.<rank>`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.errors import CkptError
from ckpt_engine.ranks.process_group import ProcessGroupRanks


def state_of(step: int, rank: int) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((700, 64), float(step)), "bias": torch.full((64,), float(step))},
        "frozen": {"weight": torch.arange(1_400_000)},
        "own": {"rank": torch.full((50,), 1000 * step + rank)},
    }


def check(state: dict[str, Any], rank: int) -> int:
    """The step that a loaded state says; every byte must say the same."""
    step = int(state["model"]["bias"][0])
    wanted = state_of(step, rank)
    for component, tensors in wanted.items():
        for name, tensor in tensors.items():
            assert torch.equal(state[component][name], tensor), f"{component}/{name} is not of step {step}"
    return step


def main(job: dict[str, Any]) -> None:
    """Resume, check, and save again and again; ranks meet at every step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ranks = ProcessGroupRanks(own={"own"}, wait_seconds=job["wait_seconds"])
    ckpt = Checkpointer(job["root"], ranks=ranks, keep={"last": 3})
    fd = os.open(f"{job['trace']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    loaded = ckpt.load()
    step = check(loaded, rank) if loaded is not None else 0
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
