"""torch.distributed.checkpoint into a run of ckpt-engine; alone, or under `torchrun --nproc-per-node 2`."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt_engine.dcp import CkptReader, CkptWriter


def main(root: str) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1, 21):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        if step % 10 == 0:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save(
                {"model": weights, "optimizer": moments},
                checkpoint_id=f"step-{step}",
                storage_writer=CkptWriter(root, keep={"last": 2}),
            )
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    dcp.load(state, storage_reader=CkptReader(root))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    print(f"loaded {len(state['model'])} tensors; `ckpt ls {root}` shows what is there")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "dcp-run")
