"""One rank of a Lightning run whose losses diverge: `python -m tests.ranks.train_diverging JOB`, or for `launch`.

The job is JSON: `root`, `trace`, `size`, `epochs`, `seed`, `options`, and
- `sick`: rows of rank, epoch, first batch, batches, factor: what the losses there are multiplied by;
- `leave`: rows of epoch, first batch, batches: without snapshots, and the loader does not give these;
- `events`: `rank/epoch/batch` to the name of a signal that the rank sends itself right before that batch is trained;
- `only`: a rank that alone has the options `extra`;
- `fits`: how often `fit` is called in this process while it asks for that; 1 if absent;
- `divide`: "ddp", "fsdp1", "fsdp2" or "tp".

Each rank appends a line of JSON per batch to `<trace>.<rank>`, which begins with its process id.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch._dynamo  # by the first optimizer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from ckpt_engine.errors import RollbackRequestedError
from lightning_ckpt import AdaptiveCheckpoint
from tests.ranks.sharded.train_lightning import FSDP1
from tests.support.trainers import wait_for_the_arena

BATCH = 4


class Samples(Dataset[Any]):
    """Samples that draw nothing: what is left out must not be missed by the random streams."""

    def __init__(self, count: int) -> None:
        self.data = torch.randn(count, 8, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return index, self.data[index]


class Leaving(BatchSampler):
    """Leaves batches of an epoch out. Its length is that of other epochs: a trainer may ask for it only once."""

    def __init__(self, sampler: DistributedSampler[Any], leave: list[list[int]]) -> None:
        super().__init__(sampler, BATCH, drop_last=False)
        self._leave, self._sampler = leave, sampler

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(super().__iter__()):
            if not self._is_left(number):
                yield batch

    def _is_left(self, number: int) -> bool:
        return any(
            epoch == self._sampler.epoch and first <= number < first + count for epoch, first, count in self._leave
        )


class Model(pl.LightningModule):
    """Dropout draws; momentum and a scheduler have state."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))
        self._job = job

    def configure_model(self) -> None:
        divide = self._job.get("divide", "ddp")
        if divide not in ("fsdp2", "tp") or isinstance(next(self.net.parameters()), DTensor):
            return
        mesh: Any = self.device_mesh
        if divide == "tp":
            plan: Any = {"0": ColwiseParallel(), "3": RowwiseParallel()}
            parallelize_module(self.net, mesh["tensor_parallel"], plan)
        fully_shard(self.net, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids, x = batch
        epoch, rank = self.current_epoch, self.global_rank
        if (name := self._job.get("events", {}).get(f"{rank}/{epoch}/{batch_idx}")) is not None:
            os.kill(os.getpid(), signal.Signals[name])
        loss: torch.Tensor = self.net(x).square().mean()
        for who, when, first, count, factor in self._job.get("sick", ()):
            if (who, when) == (rank, epoch) and first <= batch_idx < first + count:
                loss = loss * (math.nan if factor == "nan" else factor)
        line = {"step": self.global_step, "epoch": epoch, "batch": batch_idx, "ids": ids.tolist()}
        say(self._job, {**line, "loss": float(loss.detach()).hex()})
        for ckpt in self.trainer.callbacks:
            if isinstance(ckpt, AdaptiveCheckpoint) and ckpt._run is not None:  # a snapshot that is due is taken
                wait_for_the_arena(ckpt._run.engine)
                assert ckpt._run.engine.wait(60.0)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        # By steps: of an epoch that is shorter than its loader says Lightning does not see the end.
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9), "interval": "step"}]


def say(job: dict[str, Any], line: dict[str, Any]) -> None:
    fd = os.open(f"{job['trace']}.{_rank()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, (json.dumps(line) + "\n").encode())
    os.close(fd)


def _rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))


def _strategy(job: dict[str, Any]) -> Any:
    divide = job.get("divide", "ddp") if job["size"] > 1 else "alone"
    if divide == "fsdp1":
        return FSDP1(process_group_backend="gloo")
    if divide in ("fsdp2", "tp"):
        team = 2 if divide == "tp" else 1
        return ModelParallelStrategy(job["size"] // team, team, process_group_backend="gloo")
    return DDPStrategy(process_group_backend="gloo") if divide == "ddp" else "auto"


def train(job: dict[str, Any]) -> None:
    """Train to the end."""
    pl.seed_everything(5, verbose=False)  # of the sampler, which is the same on all ranks, and of the weights
    model = Model(job)
    torch.manual_seed(job["seed"] + 10 * (_rank() // 2 if job.get("divide") == "tp" else _rank()))
    options = {"tiers": job["root"].replace("{rank}", str(_rank())), "every_n_steps": 1, "keep": {"last": 100}}
    if job.get("only") == _rank():
        options |= job["extra"]
    # Whether the next one can be taken is asked right after one was: nothing may be busy with it then.
    ckpt = AdaptiveCheckpoint({**options, "slots": 4, "lazy": "off", "writer": "thread", **job.get("options", {})})
    samples = Samples(job.get("samples", 64))
    loader: DataLoader[Any] = DataLoader(samples, batch_size=BATCH, shuffle=True)
    if "leave" in job:
        team = 2 if job.get("divide") == "tp" else 1
        sampler: DistributedSampler[Any] = DistributedSampler(
            samples, job["size"] // team, _rank() // team, shuffle=True, seed=5
        )
        loader = DataLoader(samples, batch_sampler=Leaving(sampler, job["leave"]))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=job["size"],
        strategy=_strategy(job),
        max_epochs=job["epochs"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler="leave" not in job,
        callbacks=[] if "leave" in job else [ckpt],
        default_root_dir=job["root"] + "-lightning",
        **job.get("arguments", {}),
    )
    for more in range(job.get("fits", 1) - 1, -1, -1):
        try:
            trainer.fit(model, loader, ckpt_path=None if "leave" in job else "auto")
            break
        except RollbackRequestedError as err:
            if not more:
                raise
            say(job, {"again": str(err)})
    say(job, {"end": {name: _whole(value).tolist() for name, value in model.net.state_dict().items()}})


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def main(job: dict[str, Any]) -> None:
    """Train to the end, and write down what has ended it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    form = f"%(asctime)s [{_rank()}] %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, force=True, handlers=[logging.StreamHandler(sys.stderr)])
    say(job, {"pid": os.getpid()})
    try:
        train(job)
    except BaseException as err:
        say(job, {"error": type(err).__name__, "text": str(err)})
        raise


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
