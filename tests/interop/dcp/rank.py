"""One rank that saves or loads through torch.distributed.checkpoint; started by `tests.ranks.launch`."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.dcp import CkptReader, CkptWriter
from ckpt_engine.ranks.process_group import ProcessGroupRanks


def whole(step: int) -> dict[str, torch.Tensor]:
    """The tensors of a state, undivided; every element tells its place and the step."""
    shapes = {"rows": (8, 6), "cols": (6, 8), "uneven": (7, 5), "few": (1, 3), "grid": (6, 10), "copies": (4, 4)}
    found = {name: torch.arange(float(a * b)).view(a, b) + 1000 * step for name, (a, b) in shapes.items()}
    return found | {"half": torch.arange(30).view(5, 6).to(torch.bfloat16) + step, "scalar": torch.tensor(float(step))}


def state_of(step: int, blank: bool = False) -> dict[str, Any]:
    """The same as this rank has it: divided in every way that its number of ranks allows."""
    size = dist.get_world_size()
    line = init_device_mesh("cpu", (size,))
    square = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b")) if size >= 2 else None
    tensors = {name: torch.zeros_like(one) if blank else one for name, one in whole(step).items()}

    def divided(name: str, mesh: DeviceMesh, *placements: Any) -> DTensor:
        return distribute_tensor(tensors[name], mesh, placements)

    state: dict[str, Any] = {
        "model": {
            "rows": divided("rows", line, Shard(0)),
            "cols": divided("cols", line, Shard(1)),
            "uneven": divided("uneven", line, Shard(0)),
            "few": divided("few", line, Shard(0)),
            "half": divided("half", line, Shard(0)),
            "scalar": tensors["scalar"],
        },
        "list": [1, {"t": tensors["rows"].clone(), "step": -1 if blank else step}],
        "text": "" if blank else f"at {step}",
        "raw": b"" if blank else bytes(100),
        "deep": {"a": {"b": {"none": None, "numbers": [] if blank else [step, 2.5, True]}}},
    }
    if square is not None:
        state["model"]["grid"] = divided("grid", square, Shard(0), Shard(1))
        state["model"]["copies"] = divided("copies", square, Replicate(), Shard(0))
    else:
        state["model"] |= {"grid": tensors["grid"], "copies": tensors["copies"]}
    return state


def check(state: dict[str, Any]) -> int:
    """The step that a loaded state says; every element must say the same."""
    step = int(state["model"]["scalar"])
    for name, wanted in whole(step).items():
        found = state["model"][name]
        found = found.full_tensor() if isinstance(found, DTensor) else found
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted), f"{name} is not of step {step}: {found}"
    assert torch.equal(state["list"][1]["t"], whole(step)["rows"])
    assert (state["list"][0], state["list"][1]["step"], state["text"], state["raw"]) == (
        1,
        step,
        f"at {step}",
        bytes(100),
    )
    assert state["deep"] == {"a": {"b": {"none": None, "numbers": [step, 2.5, True]}}}
    return step


class Dying(CkptWriter):
    """A writer that kills its rank at a point of the save."""

    where = ""

    def write_data(self, plan: Any, planner: Any) -> Any:
        self._at(f"write {dist.get_rank()}")
        found = super().write_data(plan, planner)
        self._at(f"written {dist.get_rank()}")
        return found

    def finish(self, metadata: Any, results: Any) -> None:
        self._at("finish")
        super().finish(metadata, results)
        self._at("finished")

    def _at(self, where: str) -> None:
        if where == self.where:
            os.kill(os.getpid(), signal.SIGKILL)


class Failing(CkptWriter):
    """A writer that fails on rank 1."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("rank 1 cannot write")
        return super().write_data(plan, planner)


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def trained(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model under FSDP2 and its optimizer, some steps on."""
    from torch.distributed.fsdp import fully_shard

    model = model_of(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    advance(model, optimizer, 0, steps)
    return model, optimizer


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()


def fsdp(job: dict[str, Any]) -> None:
    """Train, save, train on; another model loads, trains on alike, and has the same weights."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = trained(0, 2)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id="step-2", storage_writer=CkptWriter(job["root"]))
    advance(model, optimizer, 2, 2)
    other, its_optimizer = trained(7, 1)
    weights, moments = get_state_dict(other, its_optimizer)
    state = {"model": weights, "optim": moments}
    dcp.load(state, storage_reader=CkptReader(job["root"]))
    set_state_dict(other, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    advance(other, its_optimizer, 2, 2)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor())  # type: ignore[attr-defined]


def save(job: dict[str, Any]) -> None:
    kind = {"dying": Dying, "failing": Failing}.get(job.get("writer", ""), CkptWriter)
    for step in job["steps"]:
        writer = kind(job["root"], **job.get("options", {}))
        if isinstance(writer, Dying):
            writer.where = job["where"]
        how = job.get("how")
        planner = DefaultSavePlanner(enable_plan_caching=True) if job.get("caching") else None
        given: dict[str, Any] = {"checkpoint_id": f"step-{step}", "storage_writer": writer, "planner": planner}
        if how:
            checkpointer = state_dict_saver.AsyncCheckpointerType(how)
            done = dcp.async_save(state_of(step), async_checkpointer_type=checkpointer, **given)
            done.result()  # type: ignore[union-attr]
            continue
        try:
            dcp.save(state_of(step), **given)
        except dcp.api.CheckpointException as err:
            if kind is not Failing:
                raise
            assert "rank 1 cannot write" in str(err)
            dcp.save(state_of(step + 1), checkpoint_id=f"{step + 1}", storage_writer=CkptWriter(job["root"]))


def load(job: dict[str, Any]) -> None:
    for step in job["steps"]:
        state = state_of(0, blank=True)
        dcp.load(state, checkpoint_id=None if step is None else f"step-{step}", storage_reader=CkptReader(job["root"]))
        assert check(state) == (step or job["newest"])


def engine(job: dict[str, Any]) -> None:
    """What the engine saves DCP reads, and what DCP saves the engine reads into live DTensors."""
    own, theirs = Path(job["root"]) / "engine", Path(job["root"]) / "dcp"
    ckpt = Checkpointer(own, ranks=ProcessGroupRanks())
    ckpt.save(state_of(3), step=3).wait(60)
    dist.barrier()  # other ranks return when their share is durable
    ckpt.close()
    state = state_of(0, blank=True)
    dcp.load(state, storage_reader=CkptReader(own))
    assert check(state) == 3
    dcp.save(state_of(4), checkpoint_id="4", storage_writer=CkptWriter(theirs))
    found = Checkpointer(theirs, ranks=ProcessGroupRanks()).load(into=state_of(0, blank=True))
    assert found is not None
    assert check(found) == 4


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    {"save": save, "load": load, "fsdp": fsdp, "engine": engine}[job["verb"]](job)
    dist.destroy_process_group()
