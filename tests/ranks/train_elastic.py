"""One rank of a run with any number of ranks, under Lightning, Accelerate or a plain loop: calls `main(job)`.

Appends a line of JSON per batch to `<trace>.<rank>`: step, epoch, samples, a draw of the random streams, and a digest
of weights and optimizer state before the batch. With `same_buckets` DDP sums the gradients of more than two ranks in
the same order in its first step as later.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Samples(Dataset[Any]):
    """Samples that an augmentation changes by the global random stream."""

    def __init__(self, count: int) -> None:
        self.data = torch.randn(count, 8, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return index, self.data[index] + 0.1 * torch.rand(())


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))


def digest(model: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any]) -> str:
    """Of the tensors that all ranks share. DTensors are gathered: all ranks must call this."""
    found = hashlib.sha256()
    for name, value in sorted(model.items()):
        found.update(name.encode() + _bytes(value))
    for index, state in sorted(optimizer["state"].items()):
        for name, value in sorted(state.items()):
            found.update(f"{index} {name}".encode() + _bytes(value))
    return found.hexdigest()


def _bytes(value: Any) -> bytes:
    whole = value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
    return bytes(whole.detach().numpy().tobytes())


def digest_of_flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """As `digest`, of FSDP1, which gathers its states itself."""
    options = StateDictOptions(full_state_dict=True)
    moments: Any = get_optimizer_state_dict(model, optimizer, options=options) if optimizer.state else {"state": {}}
    names = [name for group in moments.get("param_groups", ()) for name in group["params"]]
    states = {names.index(name): state for name, state in moments["state"].items()}
    weights: Any = get_model_state_dict(model, options=options)
    return digest(weights, {"state": states})


def divide(net: nn.Module, layout: str, mesh: Any) -> nn.Module:
    """The model in a layout: "fsdp1", "fsdp2" or "tp" (with FSDP2 over it); `mesh` has data and tensor dimensions."""
    if layout == "fsdp1":
        wrap = ModuleWrapPolicy({nn.Linear})
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True, auto_wrap_policy=wrap)
    if layout == "tp":
        plan: Any = {"0": ColwiseParallel(), "3": RowwiseParallel()}
        parallelize_module(net, mesh["tensor_parallel"], plan)
    fully_shard(net, mesh=mesh["data_parallel"])
    return net


class Trace:
    """Writes the lines of one rank."""

    def __init__(self, job: dict[str, Any], rank: int) -> None:
        self._fd = os.open(f"{job['trace']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._pace = job["pace"]

    def write(self, **values: Any) -> None:
        os.write(self._fd, (json.dumps({**values, "draw": torch.rand(()).item()}) + "\n").encode())
        time.sleep(self._pace)


def main(job: dict[str, Any]) -> None:
    """Train to the end."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if job["size"] == 1:  # a process that knows of no other rank
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
            os.environ.pop(name, None)
    {"lightning": _lightning, "accelerate": _accelerate, "plain": _plain}[job["trainer"]](job)


def _options(job: dict[str, Any]) -> dict[str, Any]:
    return {
        "tiers": job["root"],
        "every_n_steps": 1,
        "keep": {"last": 100},
        "writer": "thread",
        **job.get("options", {}),
    }


def _lightning(job: dict[str, Any]) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy

    from lightning_ckpt import AdaptiveCheckpoint

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def configure_model(self) -> None:
            if layout != "ddp":
                divide(self.net, layout, self.device_mesh)

        def on_fit_start(self) -> None:
            self.trace = Trace(job, self.global_rank)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            ids, x = batch
            optimizer: Any = self.optimizers()
            weights = digest(self.net.state_dict(), optimizer.optimizer.state_dict())
            self.trace.write(
                step=self.global_step,
                epoch=self.current_epoch,
                samples=ids.tolist(),
                shared=weights,
                batch=batch_idx,
                batches=int(self.trainer.num_training_batches),
            )
            loss: torch.Tensor = self.net(x).square().mean()
            if job.get("logs"):
                self.log("loss", loss, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0 and not self.trainer.sanity_checking:
                self.trace.write(step=self.global_step, validated=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    layout = job.get("layout", "ddp") if job["size"] > 1 else "ddp"
    team = job.get("team", 1) if job["size"] > 1 else 1
    strategy: Any = "auto"
    if layout != "ddp":
        strategy = ModelParallelStrategy(job["size"] // team, team, process_group_backend="gloo")
    elif job["size"] > 1:
        strategy = "ddp"
    pl.seed_everything(job["seed"], verbose=False)  # the injected sampler has this seed: the same one on all ranks
    torch.manual_seed(job["seed"] + int(os.environ.get("RANK", "0")) // team)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=job["size"],
        strategy=strategy,
        max_epochs=job["epochs"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[AdaptiveCheckpoint(_options(job))],
        default_root_dir=job["root"] + "-lightning",
        **job.get("arguments", {}),
    )
    loader = DataLoader(Samples(job["samples"]), batch_size=4, shuffle=True, num_workers=job.get("workers", 0))
    validation = DataLoader(Samples(8), batch_size=4) if job.get("validates") else None
    torch.manual_seed(0)  # the same weights on all ranks, which not every strategy sees to
    model = Model()
    torch.manual_seed(job["seed"] + int(os.environ.get("RANK", "0")) // team)
    trainer.fit(model, loader, validation, ckpt_path="auto")


def _accelerate(job: dict[str, Any]) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import DistributedDataParallelKwargs, set_seed

    from accelerate_ckpt import AdaptiveCheckpoint
    from tests.ranks.sharded.train_accelerate import accelerated

    set_seed(job["seed"])
    layout = job.get("layout", "ddp") if job["size"] > 1 else "ddp"
    if layout == "ddp":
        accelerator = Accelerator(
            cpu=True,
            dataloader_config=DataLoaderConfiguration(**job.get("arguments", {})),
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=job.get("same_buckets", False))],
        )
    else:
        accelerator = accelerated({"fsdp1": 1, "fsdp2": 2}[layout])
    net: Any = make_model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    per_step = job["size"] if job.get("arguments", {}).get("split_batches") else 1
    loader = DataLoader(Samples(job["samples"]), batch_size=4 * per_step, shuffle=True)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    set_seed(job["seed"] + accelerator.process_index)
    ckpt = AdaptiveCheckpoint(accelerator, _options(job))
    trace = Trace(job, accelerator.process_index)
    for epoch in range(ckpt.epoch, job["epochs"]):
        for ids, x in loader:
            if layout == "fsdp1":
                weights = digest_of_flat(net, optimizer.optimizer)
            else:
                weights = digest(accelerator.unwrap_model(net).state_dict(), optimizer.optimizer.state_dict())
            trace.write(step=ckpt.global_step, epoch=epoch, samples=ids.tolist(), shared=weights)
            accelerator.backward(net(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()


def _plain(job: dict[str, Any]) -> None:
    from ckpt_engine import Checkpointer
    from ckpt_engine.ranks.process_group import ProcessGroupRanks

    rank, size = int(os.environ.get("RANK", "0")), job["size"]
    layout = job.get("layout", "ddp") if size > 1 else "ddp"
    team = job.get("team", 1) if size > 1 else 1
    mesh = None
    if size > 1:
        dist.init_process_group("gloo")
        shape = (size // team, team)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data_parallel", "tensor_parallel"))
    torch.manual_seed(job["seed"] + rank // team)
    samples = Samples(job["samples"])
    sampler: DistributedSampler[Any] = DistributedSampler(
        samples, size // team, rank // team, shuffle=job.get("shuffle", True)
    )
    loader = DataLoader(samples, batch_size=4, sampler=sampler)
    torch.manual_seed(0)  # the same weights on all ranks, which not every layout sees to
    model: Any = make_model() if layout == "ddp" else divide(make_model(), layout, mesh)
    torch.manual_seed(job["seed"] + rank // team)
    net, wrap = model, job.get("wrap", "first") if size > 1 and layout == "ddp" else "never"
    if wrap == "first":
        net = nn.parallel.DistributedDataParallel(model, find_unused_parameters=job.get("same_buckets", False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def weights() -> str:
        if layout == "fsdp1":
            return digest_of_flat(model, optimizer)
        return digest(model.state_dict(), optimizer.state_dict())

    ranks = ProcessGroupRanks() if size > 1 else None
    trace = Trace(job, rank)
    with Checkpointer(_options(job), ranks=ranks) as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        if wrap in ("late", "around"):
            net = nn.parallel.DistributedDataParallel(model if wrap == "late" else nn.Sequential(model))
        for epoch in range(run.epoch, job["epochs"]):
            sampler.set_epoch(epoch)
            for ids, x in loader:
                trace.write(step=run.global_step, epoch=epoch, samples=ids.tolist(), shared=weights())
                net(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    if size > 1:
        dist.destroy_process_group()
