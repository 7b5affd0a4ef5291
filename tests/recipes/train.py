"""Trains a little loop of Accelerate: `python -m tests.recipes.train ROOT LINES [PACE_SECONDS]`.

Each rank appends a line for each step it trains to LINES and its number: the step, and its loss to the last bit. Its
first line says which process it is, its last one how that ends.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from accelerate_ckpt import AdaptiveCheckpoint
from tests.lightning.runs import Augmented, seed_everything

EPOCHS = 4


def train(root: str, lines: str, pace_seconds: float) -> None:
    """One process."""
    torch.set_num_threads(1)
    seed_everything(0)
    accelerator = Accelerator(cpu=True)
    # One system call a line: what is there was trained, whatever happens to this process.
    file = os.open(f"{lines}.{accelerator.process_index}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"process {os.getpid()}\n".encode())
    model, loader = torch.nn.Linear(6, 1), DataLoader(Augmented(), batch_size=2, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    try:
        ckpt = AdaptiveCheckpoint(accelerator, root, every_n_steps=2, keep={"last": 2})
        step = ckpt.global_step
        for _ in range(ckpt.epoch, EPOCHS):
            for x, y, _ in loader:
                loss = ((model(x) - y) ** 2).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                os.write(file, f"{step} {loss.item().hex()}\n".encode())
                time.sleep(pace_seconds)
        accelerator.end_training()
    except SystemExit as end:
        os.write(file, f"exit {end.code}\n".encode())
        raise
    os.write(file, b"done\n")


if __name__ == "__main__":
    train(sys.argv[1], str(Path(sys.argv[2]).resolve()), float((sys.argv[3:] or ["0"])[0]))
