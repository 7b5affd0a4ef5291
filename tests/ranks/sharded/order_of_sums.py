"""One of three ranks that put the order of sums of DDP in force, or not: what they agree, and compute then."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt_engine.loop.distributed_models import GradientOrder
from ckpt_engine.ranks.process_group import ProcessGroupRanks
from ckpt_engine.ranks.session import Session

BACKWARDS = array("i", [3, 2, 1, 0]).tobytes()


def main(job: dict[str, Any]) -> None:
    """Write what was said of each case, and the gradients of the steps after it, into a file for each rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    session = Session(ProcessGroupRanks(own={"rng"}))
    found: dict[str, Any] = {}
    for case in job["cases"]:
        found[case] = _tried(case, rank, session)
        dist.barrier()
    Path(f"{job['trace']}.{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


def _tried(case: str, rank: int, session: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    model = DistributedDataParallel(net, find_unused_parameters=case == "unused")
    if case == "hook" and rank == 0:
        for parameter in net.parameters():
            parameter.register_hook(lambda gradient: None)
    behind: Any = None
    if case == "ahead" and rank:  # rank 0 comes here before something that it does with the others
        behind = dist.all_reduce(torch.zeros(1), async_op=True)
    bare = case == "unwrapped" or (case == "one unwrapped" and rank == 1)
    order = GradientOrder([] if bare else [model])
    engine = cast(Any, SimpleNamespace(ranks=session.ranks, meet=lambda make, combine: session.meet(make, combine, 20)))
    saved = [b""] if case == "unknown" else [BACKWARDS] * (1 + ("second" in case))
    last = case not in ("one unwrapped", "second later")
    why, later = order.restore(saved, engine, 0 if case == "first" else 5, last=last)
    if case == "ahead":
        dist.all_reduce(torch.zeros(1)) if behind is None else behind.wait()
    gradients = []
    for step in range(3):
        model.zero_grad()
        (model(torch.ones(2, 7)).sum() * 10**step).backward()
        gradients.append(net[1].bias.grad.tolist())  # type: ignore[union-attr]
    return {"why": why, "later": later, "gradients": gradients, "rebuilt": _rebuilt(model)}


def _rebuilt(model: Any) -> str:
    model.logger.set_runtime_stats_and_log()
    return str(model._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", ""))
