"""A tracked loop that resumes, with a memory tier, or has hidden state: `python tracked_loop.py RUN MISTAKE`."""

from __future__ import annotations

import random
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from ckpt_engine import Checkpointer


class Net(torch.nn.Module):
    """Its output depends on how often it was called."""

    def __init__(self, count: bool) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
        self.count = count
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.count
        return self.layers(x) / (1 + self.calls)


def main(run: str, mistake: str) -> None:
    torch.manual_seed(1)
    random.seed(1)
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4, shuffle=True)
    model = Net(mistake == "hidden off")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    dice = random.Random(7)
    best = 1e9
    with Checkpointer(tiers=["memory", run], hidden="off" if mistake == "hidden off" else "auto") as ckpt:
        tracked = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for _ in range(tracked.epoch, 10):
            for (batch,) in loader:
                factor = dice.random() if mistake == "dice" else 1.0
                optimizer.zero_grad()
                loss = model(batch).square().mean() * factor
                if mistake == "best":
                    loss = loss * (1 + (loss.item() < best))
                    best = min(best, loss.item())
                loss.backward()
                optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1], " ".join(sys.argv[2:]))
