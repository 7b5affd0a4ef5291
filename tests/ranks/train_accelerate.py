"""One rank of an Accelerate DDP run: its launcher has set the environment and calls `main(job)`.

Appends a line per batch to `<trace>.<rank>`, as `train_lightning` does.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from torch import nn
from torch.utils.data import DataLoader

from accelerate_ckpt import AdaptiveCheckpoint
from tests.ranks.train_lightning import Samples
from tests.support.trainers import wait_for_the_arena


def main(job: dict[str, Any]) -> None:
    """Train to the end."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    set_seed(job["seed"])
    buckets = DistributedDataParallelKwargs(find_unused_parameters=job.get("same_buckets", False))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[buckets])
    net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.9)
    loader = DataLoader(Samples(job.get("samples", 64)), batch_size=4, shuffle=True)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    average = None
    if job.get("values"):  # of this rank: DDP hands on buffers of the model, not those of its average
        average = torch.optim.swa_utils.AveragedModel(accelerator.unwrap_model(net), use_buffers=True)
        accelerator.register_for_checkpointing(average)
    set_seed(job["seed"] + accelerator.process_index)
    root = job["root"].replace("{rank}", os.environ.get("RANK", "0"))
    options = {"tiers": root, "every_n_steps": 2, "keep": {"last": 3}, **job.get("options", {})}
    ckpt = AdaptiveCheckpoint(accelerator, **options)
    rank = accelerator.process_index
    fd = os.open(f"{job['trace']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for epoch in range(ckpt.epoch, job["epochs"]):
        for ids, x in loader:
            loss = net(x).square().mean()
            os.write(fd, f"{epoch} {ids.tolist()} {torch.rand(()).item()!r} {loss.item()!r}\n".encode())
            time.sleep(job["pace"])
            if job.get("patient"):
                wait_for_the_arena(ckpt._engine)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if average is not None:
                average.update_parameters(accelerator.unwrap_model(net))
                mean = average.module[1].running_mean.sum().item()
                os.write(fd, f"{epoch} average {mean!r} {average.module[0].weight.sum().item()!r}\n".encode())
            if job.get("dies_after") == ckpt.global_step:
                os._exit(0)
    if accelerator.is_main_process:
        weights = {name: value.flatten().tolist() for name, value in accelerator.unwrap_model(net).state_dict().items()}
        with open(job["trace"] + ".end", "w") as file:  # noqa: PTH123
            json.dump(weights, file)
    accelerator.end_training()
