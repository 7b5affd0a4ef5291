"""One rank of a run with any number of ranks, under Lightning, Accelerate or a plain loop: calls `main(job)`.

Appends a line of JSON per batch to `<trace>.<rank>`: step, epoch, samples, a draw of the random streams, and a digest
of weights and optimizer state before the batch.
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
    """Of the tensors that all ranks share."""
    found = hashlib.sha256()
    for name, value in sorted(model.items()):
        found.update(name.encode() + value.detach().numpy().tobytes())
    for index, state in sorted(optimizer["state"].items()):
        for name, value in sorted(state.items()):
            found.update(f"{index} {name}".encode() + torch.as_tensor(value).numpy().tobytes())
    return found.hexdigest()


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
    if job["size"] == 1:  # a process that nobody has told of others
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

    from lightning_ckpt import AdaptiveCheckpoint

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

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

    pl.seed_everything(job["seed"], verbose=False)  # the injected sampler has this seed: the same one on all ranks
    torch.manual_seed(job["seed"] + int(os.environ.get("RANK", "0")))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=job["size"],
        strategy="ddp" if job["size"] > 1 else "auto",
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
    trainer.fit(Model(), loader, validation, ckpt_path="auto")


def _accelerate(job: dict[str, Any]) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    from accelerate_ckpt import AdaptiveCheckpoint

    set_seed(job["seed"])
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**job.get("arguments", {})))
    net = make_model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    per_step = job["size"] if job.get("arguments", {}).get("split_batches") else 1
    loader = DataLoader(Samples(job["samples"]), batch_size=4 * per_step, shuffle=True)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    set_seed(job["seed"] + accelerator.process_index)
    ckpt = AdaptiveCheckpoint(accelerator, _options(job))
    trace = Trace(job, accelerator.process_index)
    for epoch in range(ckpt.epoch, job["epochs"]):
        for ids, x in loader:
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
    if size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(job["seed"] + rank)
    samples = Samples(job["samples"])
    sampler: DistributedSampler[Any] = DistributedSampler(samples, size, rank, shuffle=job.get("shuffle", True))
    loader = DataLoader(samples, batch_size=4, sampler=sampler)
    model = make_model()
    net = nn.parallel.DistributedDataParallel(model) if size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ranks = ProcessGroupRanks(own={"ckpt_engine"}) if size > 1 else None
    trace = Trace(job, rank)
    with Checkpointer(_options(job), ranks=ranks) as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, job["epochs"]):
            sampler.set_epoch(epoch)
            for ids, x in loader:
                weights = digest(model.state_dict(), optimizer.state_dict())
                trace.write(step=run.global_step, epoch=epoch, samples=ids.tolist(), shared=weights)
                net(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    if size > 1:
        dist.destroy_process_group()
