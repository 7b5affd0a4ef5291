"""A Lightning run with augmentation in loader workers: `python lightning_loop.py RUN MISTAKE`."""

from __future__ import annotations

import logging
import sys
import warnings

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ckpt import AdaptiveCheckpoint

OWN: np.random.Generator | None = None
"""A generator that only a worker has, seeded by the operating system."""


class Augmented(Dataset[torch.Tensor]):
    """Samples with noise."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.randn(4) if OWN is None else torch.from_numpy(OWN.standard_normal(4)).float()
        return torch.full((4,), float(index)) + noise


class Model(pl.LightningModule):
    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

        self.factors = iter([1.0 + i / 10 for i in range(99)]) if mistake == "iterator" else None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        factor = 1.0 if self.factors is None else next(self.factors)
        return self.net(batch).square().mean() * factor

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


def own_generator(_: int) -> None:
    global OWN
    OWN = np.random.default_rng()


def main(run: str, mistake: str) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(1)
    init = own_generator if mistake == "workers" else None
    loader = DataLoader(Augmented(), 4, shuffle=True, num_workers=2, worker_init_fn=init)
    trainer = pl.Trainer(
        max_epochs=9,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[AdaptiveCheckpoint(run, max_lost_work="1 h")],
    )
    trainer.fit(Model(mistake), loader, ckpt_path="auto")


if __name__ == "__main__":
    main(sys.argv[1], " ".join(sys.argv[2:]))
