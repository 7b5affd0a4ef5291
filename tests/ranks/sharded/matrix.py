"""The resharding matrix as a rank runs it: every layout on every number of ranks saves, and every other one loads."""

from __future__ import annotations

import itertools
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.ranks.process_group import ProcessGroupRanks
from tests.ranks.sharded.models import FirstRanks, Trained, differences, gathered, meshes


def main(job: dict[str, Any]) -> None:
    """Rank 0 writes what it found to `out`: `[saved, loaded, differences]` of each case."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    root, cases = Path(job["root"]), list(itertools.product(job["layouts"], job["sizes"]))
    of_size = {size: meshes(size) for size in job["sizes"]}
    group = ProcessGroupRanks()
    if job.get("by_name"):
        _by_name(root, job["layouts"], of_size[dist.get_world_size()], group)
        Path(f"{job['out']}.{dist.get_rank()}").touch()
        dist.destroy_process_group()
        return
    for layout, size in cases:
        _save(root / f"{layout}-{size}", layout, of_size[size], FirstRanks(group, size, f"save {layout} {size}"))
    results = []
    for layout, size in cases:
        trained = Trained(layout, of_size[size], seed=7) if dist.get_rank() < size else None
        for source in cases if trained is not None else ():
            ranks = FirstRanks(group, size, f"load {layout} {size} {source}")
            found = _load(root / f"{source[0]}-{source[1]}", trained, ranks)
            results.append([list(source), [layout, size], found])
    if dist.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def _save(folder: Path, layout: str, mesh: Any, ranks: FirstRanks) -> None:
    if ranks.rank < ranks.size:
        trained = Trained(layout, mesh, seed=ranks.size)
        state = trained.state()
        with Checkpointer(folder, ranks=ranks, writer="thread") as ckpt:
            handle = ckpt.save(state, step=1)
            ckpt.before_update()
            trained.step()  # what was saved is of before
            handle.wait(60)
        # The same again, because a step changes it.
        state = gathered(Trained(layout, mesh, seed=ranks.size).state())
        if ranks.rank == 0:
            torch.save(state, folder.with_suffix(".pt"))
    dist.barrier()


def _load(folder: Path, trained: Trained, ranks: FirstRanks) -> list[str]:
    expected = torch.load(folder.with_suffix(".pt"))
    live = trained.state()
    with Checkpointer(folder, ranks=ranks, writer="thread") as ckpt:
        state = ckpt.load(into=live)
    assert state is not None
    wrong = differences(
        {key: expected[key] for key in ("model", "optimizer")},
        {key: gathered(state[key]) for key in ("model", "optimizer")},
    )
    if any(a is not b for a, b in zip(live["model"].values(), state["model"].values(), strict=True)):
        wrong.append("it is not in place")
    ranks.store.set(f"wrong/{ranks.rank}", json.dumps(wrong))
    if ranks.rank:
        return []
    said = [json.loads(ranks.store.wait(f"wrong/{rank}", 60.0)) for rank in range(ranks.size)]
    return [f"rank {rank}: {one}" for rank, found in enumerate(said) for one in found]


def _by_name(root: Path, layouts: list[str], mesh: Any, group: ProcessGroupRanks) -> None:
    """The states that torch.distributed.checkpoint makes, whose optimizers go by the names of parameters."""
    size = dist.get_world_size()
    one, other = layouts
    trained = Trained(one, mesh, seed=1)
    weights, moments = get_state_dict(trained.model, trained.optimizer)
    expected = gathered({"model": weights, "optimizer": moments})
    with Checkpointer(root / "run", ranks=FirstRanks(group, size, "names"), writer="thread") as ckpt:
        ckpt.save({"model": weights, "optimizer": moments}, step=1).wait(60)
    again = Trained(other, mesh, seed=2)
    weights, moments = get_state_dict(again.model, again.optimizer)
    with Checkpointer(root / "run", ranks=FirstRanks(group, size, "into"), writer="thread") as ckpt:
        assert ckpt.load(into={"model": weights, "optimizer": moments})
    set_state_dict(again.model, again.optimizer, model_state_dict=weights, optim_state_dict=moments)
    _require(again, expected)
    again = Trained(other, mesh, seed=3)
    with Checkpointer(root / "run", ranks=FirstRanks(group, size, "whole"), writer="thread") as ckpt:
        whole = ckpt.load()
    assert whole is not None
    _alike(expected, whole)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(again.model, whole["model"], options=options)
    set_optimizer_state_dict(again.model, again.optimizer, whole["optimizer"], options=options)
    _require(again, expected)


def _require(trained: Trained, expected: dict[str, Any]) -> None:
    weights, moments = get_state_dict(trained.model, trained.optimizer)
    _alike(expected, gathered({"model": weights, "optimizer": moments}))


def _alike(expected: Any, found: Any) -> None:
    if wrong := differences(expected, found):
        raise AssertionError(", ".join(wrong))
