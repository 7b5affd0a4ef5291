"""A LightningCLI program, as a user would write it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

from tests.lightning.runs import BATCH, Augmented


class Net(pl.LightningModule):
    """One layer; prints what it trains on.

    Args:
        rate: learning rate.
        crash_at: raise when this many batches were trained by this process.
    """

    def __init__(self, rate: float = 0.01, crash_at: int = -1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(6, 1)
        self.rate, self.crash_at, self.seen = rate, crash_at, []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(self.seen) == self.crash_at:
            raise RuntimeError("crash")
        x, y, ids = batch
        loss = ((self.layer(x) - y) ** 2).mean()
        self.seen.append((self.current_epoch, batch_idx, tuple(ids.tolist()), float(loss.detach()).hex()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.rate)


class Data(pl.LightningDataModule):
    """The shuffled training data."""

    def train_dataloader(self) -> Any:
        return DataLoader(Augmented(), batch_size=BATCH, shuffle=True)


def run(*arguments: str) -> LightningCLI:
    """One start of the program."""
    return LightningCLI(Net, Data, args=list(arguments), seed_everything_default=3)
