"""One rank that restores from a server and says how it went; started by `tests.ranks.launch`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.ranks.process_group import ProcessGroupRanks


def state(nbytes: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {"model": {name: torch.randn(nbytes // 12, generator=generator) for name in "abc"}, "step": 1}


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = Checkpointer(job["options"], ranks=ProcessGroupRanks()).load()
    assert found is not None
    for name, tensor in state(job["nbytes"])["model"].items():
        assert torch.equal(found["model"][name], tensor)
    dist.destroy_process_group()
