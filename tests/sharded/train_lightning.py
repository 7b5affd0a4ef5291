"""One rank of a Lightning run with DTensors; `job["tensor_parallel"]` of the ranks share each layer.

Appends a line per batch to `<trace>.<rank>`: epoch, batch, the samples, a draw of the random streams, and the loss.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_ckpt import AdaptiveCheckpoint
from tests.ranks.train_lightning import Samples


class Model(pl.LightningModule):
    """Rows that two ranks do not share evenly; dropout draws, momentum and a scheduler have state."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 5))
        self.register_buffer("seen", torch.zeros(()))
        self._job = job

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        if self._job["tensor_parallel"] > 1:
            plan: Any = {"0": ColwiseParallel(), "3": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids, x = batch
        loss = self.net(x).square().mean()
        self.seen += 1
        line = f"{self.current_epoch} {batch_idx} {ids.tolist()} {torch.rand(()).item()!r} {loss.item()!r}\n"
        with Path(f"{self._job['trace']}.{self.global_rank}").open("a") as file:
            file.write(line)
        if [self.current_epoch, batch_idx] == self._job.get("die_at"):
            time.sleep(1.0)  # a snapshot or two become durable
            os.kill(os.getpid(), signal.SIGKILL)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def main(job: dict[str, Any]) -> None:
    """Train to the end."""
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    data_parallel = job["size"] // job["tensor_parallel"]
    pl.seed_everything(job["seed"], verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=job["size"],
        strategy=ModelParallelStrategy(
            data_parallel_size=data_parallel,
            tensor_parallel_size=job["tensor_parallel"],
            process_group_backend="gloo",
        ),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[AdaptiveCheckpoint({"tiers": job["root"], "every_n_steps": 2, "keep": {"last": 3}})],
        default_root_dir=job["root"] + "-lightning",
        **job.get("trainer", {}),
    )
    model = Model(job)
    trainer.fit(model, DataLoader(Samples(40), batch_size=4, shuffle=True), ckpt_path="auto")
    whole = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).flatten().tolist()
        for name, value in model.state_dict().items()
    }
    if trainer.is_global_zero:
        Path(job["trace"] + ".end").write_text(json.dumps(whole))
