"""Text classification with Accelerate, in the style of its `nlp_example.py`: which module is this source from?"""

from __future__ import annotations

import argparse
import json.decoder
import string
import textwrap
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset, random_split

MODULES = (string, textwrap, json.decoder, argparse)
LENGTH = 64


def get_dataloaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    pieces, labels = [], []
    for label, module in enumerate(MODULES):
        source = list(Path(module.__file__).read_bytes())[:12_000]
        found = [source[at : at + LENGTH] for at in range(0, len(source) - LENGTH, LENGTH // 2)]
        pieces += found
        labels += [label] * len(found)
    dataset = TensorDataset(torch.tensor(pieces), torch.tensor(labels))
    train, test = random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=256)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.encode = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, len(MODULES)))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(self.embed(text))[0].mean(dim=1))


def training_function(args: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=args.cpu, gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    train_dataloader, eval_dataloader = get_dataloaders(args.batch_size)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps = len(train_dataloader) * args.epochs
    lr_scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10) * max(0.0, 1 - step / steps))

    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(args.epochs):
        model.train()
        for text, labels in train_dataloader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(text), labels)
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        accurate, seen = 0, 0
        for text, labels in eval_dataloader:
            with torch.no_grad():
                predictions = model(text).argmax(dim=-1)
            predictions, labels = accelerator.gather_for_metrics((predictions, labels))
            accurate += int((predictions == labels).sum())
            seen += len(labels)
        accelerator.print(f"epoch {epoch}: {100 * accurate / seen:.2f} % of {seen} pieces, loss {loss.item():.6f}")
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=42)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
