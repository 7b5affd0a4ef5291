"""One rank of a run of DDP that may change something at a step, and ends as a process that is killed.

Its launcher has set the environment, and calls `main(job)`.
"""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.ranks.process_group import ProcessGroupRanks
from lightning_ckpt import AdaptiveCheckpoint
from tests.restore.memory_tier.lives import until
from tests.support.trainers import wait_for_the_arena


class Rows(Dataset[torch.Tensor]):
    """Rows with noise of the global stream, and more of it on one rank where the job says so."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._noise = 0.2 if job["noisy"] == int(os.environ["RANK"]) else 0.1

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index / 200) + self._noise * torch.rand(())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))


class Fate:
    """What happens to this rank, by the number of the step.

    Args:
        job: `changes`, the rank and the step of each; `kills`, the step after which both ranks are killed, or 0.
    """

    def __init__(self, job: dict[str, Any], model: nn.Module) -> None:
        self._job, self._model = job, model
        self._rank = int(os.environ["RANK"])
        self._ended = Path(job["root"] + "-ended")

    def before_update(self, step: int) -> None:
        """The average of the gradients is changed on one rank alone, and with it moments and weights.

        Rank 1 makes the last step when rank 0 has made it.
        """
        if step == self._job["ends"] and self._rank == 1:
            until(self._ended.exists, lambda: "rank 0 does not end")
        if [self._rank, step] in self._job["changes"]:
            for parameter in self._model.parameters():
                assert parameter.grad is not None
                parameter.grad += 1e-3

    def made(self, step: int) -> None:
        """The optimizer has stepped."""
        if step == self._job["ends"] and self._rank == 0:
            self._ended.touch()

    def after(self, step: int, engine: Any) -> None:
        """The step is complete on all ranks."""
        engine.before_update()
        assert engine.wait(60)
        wait_for_the_arena(engine)
        if step == self._job["kills"]:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


class Model(pl.LightningModule):
    """The same with Lightning."""

    def __init__(self, job: dict[str, Any], ckpt: AdaptiveCheckpoint) -> None:
        super().__init__()
        self.net = net()
        self.fate, self.ckpt = Fate(job, self.net), ckpt

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        assert self.ckpt._run is not None
        self.fate.after(self.global_step, self.ckpt._run.engine)
        return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()  # type: ignore[no-any-return]

    def on_after_backward(self) -> None:
        self.fate.before_update(self.global_step + 1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.fate.made(self.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main(job: dict[str, Any]) -> None:
    """Train up to step `ends`, with a snapshot of each `every` steps."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    {"plain": _plain, "lightning": _lightning}[job["trainer"]](job)


def _plain(job: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(job["seed"])
    model = net()
    torch.manual_seed(100 * job["seed"] + dist.get_rank())
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(Rows(job), 4, sampler=DistributedSampler(range(200), seed=3))
    fate = Fate(job, model)
    options = {"every_n_steps": job["every"], "at_end": job["at_end"]}
    with Checkpointer(job["root"], ranks=ProcessGroupRanks(), **options) as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for batch in loader:
            fate.after(run.global_step, ckpt.engine)
            if run.global_step == job["ends"]:
                break
            optimizer.zero_grad()
            (ddp(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
            fate.before_update(run.global_step + 1)
            optimizer.step()
            fate.made(run.global_step + 1)
    dist.destroy_process_group()


def _lightning(job: dict[str, Any]) -> None:
    ckpt = AdaptiveCheckpoint(job["root"], every_n_steps=job["every"], at_end=job["at_end"])
    pl.seed_everything(job["seed"] * 100 + int(os.environ["RANK"]), verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=job["ends"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ckpt],
        default_root_dir=job["root"] + "-lightning",
    )
    trainer.fit(Model(job, ckpt), DataLoader(Rows(job), 4), ckpt_path="auto")
