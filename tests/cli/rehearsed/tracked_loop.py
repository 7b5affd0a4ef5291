"""A tracked loop that resumes, with a memory tier: `python tracked_loop.py RUN`."""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from ckpt_engine import Checkpointer


def main(run: str) -> None:
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Checkpointer(tiers=["memory", run]) as ckpt:
        tracked = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for _ in range(tracked.epoch, 10):
            for (batch,) in loader:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1])
