"""One rank of a plain loop whose stager hands over old bytes on some ranks. Its launcher calls `main(job)`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.ranks.process_group import ProcessGroupRanks
from ckpt_engine.snapshot import pipeline
from tests.probe.old_bytes import is_moment, is_weight, staging_of_old
from tests.ranks.train_elastic import divide, make_model
from tests.support.trainers import wait_for_the_arena

CHOSEN = {"weights": is_weight, "moments": is_moment}


def main(job: dict[str, Any]) -> None:
    """Train `ends` steps with a snapshot of each, in a layout of `train_elastic`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() in job["stale"]:
        pipeline.Staging = staging_of_old(CHOSEN[job["what"]], job["fresh"])  # type: ignore[assignment,misc]
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    whole = job["layout"] == "ddp"
    model: Any = make_model() if whole else divide(make_model(), job["layout"], mesh)
    net = DistributedDataParallel(model) if whole else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=job["rate"])
    torch.manual_seed(dist.get_rank())
    with Checkpointer(job["root"], ranks=ProcessGroupRanks(), every_n_steps=1, lazy="off") as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        for _ in range(job["ends"]):
            optimizer.zero_grad()
            net(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            run.step()
            ckpt.engine.before_update()
            assert ckpt.engine.wait(60)
            wait_for_the_arena(ckpt.engine)
    dist.destroy_process_group()
