"""One rank of a Lightning run with DTensors; `job["tensor_parallel"]` of the ranks share each layer, 0 is FSDP1.

Lightning refuses FSDP1 on CPUs, and so a kind of its strategy that names the device is used.

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
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
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
        if not self._job["tensor_parallel"]:
            return
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


class FSDP1(FSDPStrategy):
    """As Lightning wraps the model, but on CPUs."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        policy = ModuleWrapPolicy({nn.Linear})
        return FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            auto_wrap_policy=policy,
            sharding_strategy=self.sharding_strategy,
            use_orig_params=True,
        )


def strategy_of(job: dict[str, Any]) -> Any:
    if not job["tensor_parallel"]:
        return FSDP1(process_group_backend="gloo", sharding_strategy=job.get("sharding", "FULL_SHARD"))
    return ModelParallelStrategy(
        data_parallel_size=job["size"] // job["tensor_parallel"],
        tensor_parallel_size=job["tensor_parallel"],
        process_group_backend="gloo",
    )


def main(job: dict[str, Any]) -> None:
    """Train to the end."""
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    pl.seed_everything(job["seed"], verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=job["size"],
        strategy=strategy_of(job),
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
    options = StateDictOptions(full_state_dict=True)
    trained = trainer.strategy.model
    assert trained is not None
    whole = {name: value.flatten().tolist() for name, value in get_model_state_dict(trained, options=options).items()}
    if trainer.is_global_zero:
        Path(job["trace"] + ".end").write_text(json.dumps(whole))
