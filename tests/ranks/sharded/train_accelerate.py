"""One rank of an Accelerate FSDP run on CPUs; `job["version"]` is 1 or 2.

Accelerate turns FSDP on for kinds of accelerators only: on CPUs it goes on with DDP and says nothing. What it then does
with FSDP works on CPUs, and so the kind is set by hand here.
"""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, ParallelismConfig, set_seed
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from accelerate_ckpt import AdaptiveCheckpoint
from tests.ranks.train_lightning import Samples


def accelerated(version: int, *, original: bool = True) -> Accelerator:
    """An accelerator with FSDP, whatever the machine."""
    options: Any = {"reshard_after_forward": True} if version == 2 else {"use_orig_params": original}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, auto_wrap_policy="no_wrap", **options)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    assert accelerator.distributed_type is DistributedType.MULTI_CPU
    kind = {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu")}
    PartialState._shared_state.update(kind)  # from which whatever is prepared takes it again
    AcceleratorState._shared_state.update(kind, fsdp_plugin=plugin)
    assert accelerator.is_fsdp2 == (version == 2)
    return accelerator


def shared(team: int) -> Accelerator:
    """An accelerator with tensor parallelism by all ranks, on CPUs.

    Accelerate refuses a `ParallelismConfig` on CPUs, and so it gets one here. FSDP2 over it is not tried: Accelerate
    1.15 imports a name for that which transformers 5.23 does not have.
    """
    accelerator = Accelerator(cpu=True)
    config = ParallelismConfig(tp_size=team)
    state = {"parallelism_config": config, "device_mesh": config.get_device_mesh("cpu")}
    AcceleratorState._shared_state.update(state)
    return accelerator


def parallelized(net: nn.Sequential, accelerator: Accelerator) -> nn.Sequential:
    """As `from_pretrained(tp_plan=...)` does it, which leaves a note."""
    plan: Any = {"0": ColwiseParallel(), "3": RowwiseParallel()}
    parallelize_module(net, accelerator.torch_device_mesh["tp"], plan)
    cast(Any, net).tp_size = accelerator.parallelism_config.tp_size
    return net


def main(job: dict[str, Any]) -> None:
    """Train to the end."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    set_seed(job["seed"])
    team = job.get("team", 1)
    accelerator = shared(team) if team > 1 else accelerated(job["version"])
    net: Any = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 5))
    if team > 1:
        net = parallelized(net, accelerator)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.9)
    loader = DataLoader(Samples(40), batch_size=4, shuffle=True)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    assert isinstance(net, FullyShardedDataParallel) or any(isinstance(one, DTensor) for one in net.parameters())
    set_seed(job["seed"] + accelerator.process_index // team)
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
    whole = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    weights = {name: value.flatten().tolist() for name, value in whole.items()}
    if accelerator.is_main_process:
        Path(job["trace"] + ".end").write_text(json.dumps(weights))
    accelerator.end_training()
