"""Several processes train together with Lightning's DDP: handwritten digits, without a network."""

from __future__ import annotations

import argparse
import hashlib

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ckpt import AdaptiveCheckpoint


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--strategy", choices=["ddp", "ddp_spawn", "ddp_fork"], default="ddp")
    parser.add_argument("--out", default="ddp-out", help="folder of the run; all processes must see the same one")
    args = parser.parse_args()

    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=32, shuffle=True)
    model = Digits()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=args.strategy,
        max_epochs=args.epochs,
        callbacks=[AdaptiveCheckpoint(args.out, every_n_steps=10)],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(model, loader, ckpt_path="auto")
    if trainer.is_global_zero:
        weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
