"""A tracked loop of several ranks, of which one may have state that no snapshot has: `ranks_loop.py RUN UNTIL FAULT`.

FAULT is the step that rank 1 computes wrongly, in the first process only, or 0.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ckpt_engine import Checkpointer
from ckpt_engine.ranks.process_group import ProcessGroupRanks


def main(run: str, until: int, fault: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    first = not (Path(run) / "snapshots").exists() and "CKPT_REHEARSAL" not in os.environ
    data = TensorDataset(torch.randn(64, 4))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=3))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
    net = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    options = {"every_n_steps": 2, "keep": {"last": 99}, "at_end": False, "overhead": "50%"}
    with Checkpointer(run, ranks=ProcessGroupRanks(), **options) as ckpt:
        tracked = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        while tracked.global_step < until:
            for (batch,) in loader:
                if tracked.global_step >= until:
                    break
                optimizer.zero_grad()
                loss = net(batch).square().mean()
                wrong = first and dist.get_rank() == 1 and tracked.global_step == fault - 1
                (loss * 2 if wrong else loss).backward()
                optimizer.step()
                ckpt.wait(60)
                dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
