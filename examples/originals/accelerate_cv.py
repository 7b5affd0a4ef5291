"""Image classification with Accelerate, in the style of its `cv_example.py`: handwritten digits, without a network."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset, random_split


def get_dataloaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    train, test = random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=256)


def get_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(256, 10),
    )  # fmt: skip


def training_function(args: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=args.cpu)
    set_seed(args.seed)
    train_dataloader, eval_dataloader = get_dataloaders(args.batch_size)
    model = get_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr / 25)
    lr_scheduler = OneCycleLR(optimizer, max_lr=args.lr, epochs=args.epochs, steps_per_epoch=len(train_dataloader))

    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_dataloader:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

        model.eval()
        accurate, seen = 0, 0
        for images, labels in eval_dataloader:
            with torch.no_grad():
                predictions = model(images).argmax(dim=-1)
            predictions, labels = accelerator.gather_for_metrics((predictions, labels))
            accurate += int((predictions == labels).sum())
            seen += len(labels)
        accelerator.print(f"epoch {epoch}: {100 * accurate / seen:.2f} % of {seen} digits, loss {loss.item():.6f}")
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-2)
    parser.add_argument("--seed", type=int, default=42)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
