"""One rank of an Accelerate FSDP2 run on CPUs.

Accelerate turns FSDP on for kinds of accelerators only: on CPUs it goes on with DDP and says nothing. What it then does
with FSDP2 works on CPUs, and so the kind is set by hand here.
"""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, set_seed
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from accelerate_ckpt import AdaptiveCheckpoint
from tests.ranks.train_lightning import Samples


def accelerated() -> Accelerator:
    """An accelerator with FSDP2, whatever the machine."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    assert accelerator.distributed_type is DistributedType.MULTI_CPU
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    assert accelerator.is_fsdp2
    return accelerator


def main(job: dict[str, Any]) -> None:
    """Train to the end."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    set_seed(job["seed"])
    accelerator = accelerated()
    net: Any = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 5))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.9)
    loader = DataLoader(Samples(40), batch_size=4, shuffle=True)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
    set_seed(job["seed"] + accelerator.process_index)
    ckpt = AdaptiveCheckpoint(accelerator, tiers=job["root"], every_n_steps=2, keep={"last": 3})
    trace = Path(f"{job['trace']}.{accelerator.process_index}")
    for epoch in range(ckpt.epoch, 2):
        for ids, x in loader:
            loss = net(x).square().mean()
            with trace.open("a") as file:
                file.write(f"{epoch} {ids.tolist()} {torch.rand(()).item()!r} {loss.item()!r}\n")
            if trace.read_text().count("\n") == job.get("die_after"):
                time.sleep(1.0)  # a snapshot or two become durable
                os.kill(os.getpid(), signal.SIGKILL)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    weights = {name: value.full_tensor().flatten().tolist() for name, value in net.state_dict().items()}
    if accelerator.is_main_process:
        Path(job["trace"] + ".end").write_text(json.dumps(weights))
    accelerator.end_training()
