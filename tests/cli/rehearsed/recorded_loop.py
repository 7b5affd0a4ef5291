"""A tracked loop that ends after a step, and may compute wrongly in one: `python recorded_loop.py RUN UNTIL FAULT`."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from ckpt_engine import Checkpointer


def until_ready(ckpt: Checkpointer) -> None:
    """Wait until a snapshot can be taken: one that is due earlier is skipped, and the next one is of another step."""
    deadline = time.monotonic() + 60
    while not ckpt.engine.ready():
        assert time.monotonic() < deadline, "no snapshot could be taken"
        time.sleep(0.001)


def main(run: str, until: int, fault: int, **options: Any) -> None:
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    given = {"every_n_steps": 2, "keep": {"last": 99}, "at_end": False, "writer": "thread", **options}
    with Checkpointer(run, **given) as ckpt:
        tracked = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        while tracked.global_step < until:
            for (batch,) in loader:
                if tracked.global_step >= until:
                    break
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                (loss * 2 if tracked.global_step == fault - 1 else loss).backward()
                optimizer.step()
                ckpt.wait(60)
                until_ready(ckpt)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
