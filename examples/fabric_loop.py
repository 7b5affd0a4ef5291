"""A training loop with Lightning Fabric: handwritten digits, without a network."""

from __future__ import annotations

import argparse

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt_engine import Checkpointer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    fabric = Fabric(accelerator=args.accelerator, devices=1)
    fabric.seed_everything(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    ckpt = Checkpointer("fabric-out")
    run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
    for epoch in range(run.epoch, args.epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
        fabric.print(f"epoch {epoch}: loss {loss.item():.6f}")
    ckpt.close()


if __name__ == "__main__":
    main()
