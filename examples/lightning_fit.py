"""Lightning in Python: trains on handwritten digits; kill it at any moment and start it again.

python examples/lightning_fit.py            # start, press Ctrl-C or `kill -9` it, start again
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ckpt import AdaptiveCheckpoint


class Digits(pl.LightningModule):
    """A small network with dropout, and AdamW with a schedule."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)]


class DigitsData(pl.LightningDataModule):
    """1,797 images that come with scikit-learn."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        digits = load_digits()
        images = torch.from_numpy(digits.data).float() / 16
        return DataLoader(TensorDataset(images, torch.from_numpy(digits.target)), self.batch_size, shuffle=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", default="lightning-out/digits", help="folder of the snapshots")
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    pl.seed_everything(1)
    trainer = pl.Trainer(
        max_epochs=arguments.epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        callbacks=[AdaptiveCheckpoint(arguments.run, overhead="1%", max_lost_work="2 s")],
    )
    trainer.fit(Digits(), DigitsData(), ckpt_path="auto")


if __name__ == "__main__":
    main()
