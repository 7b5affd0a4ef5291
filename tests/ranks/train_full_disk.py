"""One rank of a DDP run whose disk is full from one step on: its launcher sets the environment and calls `main(job)`.

The job's `kind` is the trainer, `root` the folder on the disk, and `trace` gets a line for each step.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.ranks.launch import PATIENCE_SECONDS

STEPS = 8
FULL_AFTER = 5
"""Steps. Rank 0 takes the rest of the disk."""


def _fill(folder: Path) -> None:
    """Once a snapshot is durable."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not any((folder / "run" / "snapshots").glob("*.json")) and time.monotonic() < until:
        time.sleep(0.01)
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)


def _data() -> TensorDataset:
    return TensorDataset(torch.randn(4 * STEPS * 2, 64))


def _plain(job: dict[str, Any], after: Callable[[int], None]) -> None:
    from ckpt_engine import Checkpointer
    from ckpt_engine.ranks.process_group import ProcessGroupRanks

    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    data = _data()
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    with Checkpointer(job["root"], every_n_steps=1, ranks=ProcessGroupRanks(), **job["options"]) as ckpt:
        ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for number, (x,) in enumerate(loader, 1):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            after(number)


def _accelerate(job: dict[str, Any], after: Callable[[int], None]) -> None:
    from accelerate import Accelerator

    from accelerate_ckpt import AdaptiveCheckpoint

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(64, 256)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader(_data(), 4))
    with AdaptiveCheckpoint(accelerator, {"tiers": job["root"], "every_n_steps": 1, **job["options"]}):
        for number, (x,) in enumerate(loader, 1):
            optimizer.zero_grad()
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            after(number)


def _lightning(job: dict[str, Any], after: Callable[[int], None]) -> None:
    import lightning.pytorch as pl

    from lightning_ckpt import AdaptiveCheckpoint

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(64, 256)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def on_train_batch_end(self, *_: Any) -> None:
            after(self.global_step)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    ckpt = AdaptiveCheckpoint({"tiers": job["root"], "every_n_steps": 1, **job["options"]})
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, callbacks=[ckpt], **quiet,  # type: ignore[arg-type]
        default_root_dir=job["trace"] + "-lightning",
    ).fit(Model(), DataLoader(_data(), 4), ckpt_path="auto")  # fmt: skip


KINDS = {"plain": _plain, "accelerate": _accelerate, "lightning": _lightning}


def main(job: dict[str, Any]) -> None:
    """Train to the end."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])

    def after(number: int) -> None:
        with Path(f"{job['trace']}.{rank}").open("a") as file:
            file.write(f"{number}\n")
        if number == FULL_AFTER and rank == 0:
            _fill(Path(job["root"]).parent)

    KINDS[job["kind"]](job, after)
