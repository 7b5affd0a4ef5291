"""An Ignite training of 3 epochs of 16 batches: python train_ignite.py ROOT SEED [STEP to be killed after]."""

from __future__ import annotations

import os
import signal
import sys

import torch
from ignite.engine import Engine, Events
from ignite_ckpt import run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

root, seed, *killed = sys.argv[1:]
numbers = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(64, 4, generator=numbers), torch.randn(64, 1, generator=numbers))
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
torch.manual_seed(int(seed))


def train(engine: Engine, batch: list[torch.Tensor]) -> str:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.item().hex()


trainer = Engine(train)


@trainer.on(Events.ITERATION_COMPLETED)
def show(engine: Engine) -> None:
    print(engine.state.epoch, engine.state.iteration, engine.state.output, flush=True)
    if [str(engine.state.iteration)] == killed:
        os.kill(os.getpid(), signal.SIGKILL)


loader = DataLoader(data, batch_size=4, shuffle=True)
run(trainer, loader, {"tiers": root, "every_n_steps": 3}, max_epochs=3, model=model, optimizer=optimizer)
