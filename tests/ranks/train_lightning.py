"""One rank of a Lightning DDP run: `python -m tests.ranks.train_lightning JOB`; its launcher has set the environment.

Appends a line per batch to `<trace>.<rank>`: epoch, batch, the samples, a draw of the random streams, and the loss.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ckpt import AdaptiveCheckpoint
from tests.support.trainers import wait_for_the_arena


class Samples(Dataset[Any]):
    """Samples that an augmentation changes by the global random stream."""

    def __init__(self, count: int) -> None:
        self.data = torch.randn(count, 8, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return index, self.data[index] + 0.1 * torch.rand(())


class Patience(pl.Callback):
    """Ends no batch before the arena is ready: on a busy machine that takes several."""

    def __init__(self, ckpt: AdaptiveCheckpoint) -> None:
        self._ckpt = ckpt

    def on_before_backward(self, *args: Any) -> None:
        if self._ckpt._run is not None:
            wait_for_the_arena(self._ckpt._run.engine)


class Model(pl.LightningModule):
    """Dropout draws, batch norm has buffers, momentum and a scheduler have state."""

    def __init__(self, trace: str, pace_seconds: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))
        self._trace = trace
        self._pace_seconds = pace_seconds

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids, x = batch
        loss = self.net(x).square().mean()
        line = f"{self.current_epoch} {batch_idx} {ids.tolist()} {torch.rand(()).item()!r} {loss.item()!r}\n"
        fd = os.open(f"{self._trace}.{self.global_rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, line.encode())
        os.close(fd)
        time.sleep(self._pace_seconds)
        self.log("loss", loss, sync_dist=False, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Impatience(EarlyStopping):
    """Looks at the loss of its own rank."""

    def __init__(self, trace: str) -> None:
        super().__init__("loss", patience=100, min_delta=0.2)
        self._trace = trace

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        with open(f"{self._trace}.{trainer.global_rank}", "a") as file:  # noqa: PTH123
            file.write(f"{trainer.current_epoch} {self.wait_count} {self.best_score.item()!r}\n")


class Dies(pl.Callback):
    """With the process, after so many steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self._steps:
            os._exit(0)


def main(job: dict[str, Any]) -> None:
    """Train to the end."""
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    pl.seed_everything(job["seed"] + int(os.environ.get("RANK", "0")), verbose=False)
    options = {"every_n_steps": 2, "keep": {"last": 3}, "writer": "process", **job.get("options", {})}
    root = job["root"].replace("{rank}", os.environ.get("RANK", "0"))
    ckpt = AdaptiveCheckpoint({"tiers": root, **options})
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=job["size"],
        num_nodes=job.get("machines", 1),
        strategy=job.get("strategy", "ddp"),
        max_epochs=job["epochs"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            *([Patience(ckpt)] if job.get("patient") else []),
            *([Impatience(job["trace"])] if job.get("values") else []),
            *([Dies(job["dies_after"])] if "dies_after" in job else []),
            ckpt,
        ],
        default_root_dir=root + "-lightning",
        **job.get("trainer", {}),
    )
    loader = DataLoader(Samples(job.get("samples", 64)), batch_size=4, shuffle=True)
    model = Model(job["trace"], job["pace"])
    trainer.fit(model, loader, ckpt_path="auto")
    if trainer.is_global_zero:
        weights = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
        with open(job["trace"] + ".end", "w") as file:  # noqa: PTH123
            json.dump(weights, file)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
