"""One rank of a loop of DDP, in which rank 1 may come to have another weight. Its launcher calls `main(job)`."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo  # by the first optimizer
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.ranks.process_group import ProcessGroupRanks
from tests.support.trainers import wait_for_the_arena


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index)) / 48


def main(job: dict[str, Any]) -> None:
    """Train some steps with a snapshot after each second one. Each rank has its own statistics and noise."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    torch.manual_seed(rank)
    model = DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = torch.utils.data.DistributedSampler(Samples(), seed=1)
    loader = torch.utils.data.DataLoader(Samples(), 2, sampler=sampler)
    with Checkpointer(job["root"], ranks=ProcessGroupRanks(), every_n_steps=2, writer="thread") as ckpt:
        ckpt.track(model=net, optimizer=optimizer, loader=loader)
        for number, batch in enumerate(loader, 1):
            wait_for_the_arena(ckpt.engine)
            optimizer.zero_grad()
            (model(batch + torch.rand(())) - batch.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            if number == job["breaks"] and rank == 1:
                net[2].bias.data += 1e-6
            if number == job["ends"]:
                break
    dist.destroy_process_group()
