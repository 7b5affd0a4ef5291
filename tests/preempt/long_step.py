"""A training run one step of which never ends: `python -m tests.preempt.long_step LOOP ROOT TRACE AT`.

A snapshot in memory after each step, a durable one of step 5. A line per finished step goes to TRACE, and a last one
when step AT hangs.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

GRACE_SECONDS = 5.0
HANG_SECONDS = 600.0
Report = Callable[[int], None]


def options(root: str) -> dict[str, Any]:
    return {
        "tiers": [{"url": "memory", "every_n_steps": 1}, root],
        "every_n_steps": 5,
        "keep": {"last": 1},
        "preemption": {"grace": GRACE_SECONDS},
    }


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 1)


def loader() -> Any:
    return DataLoader(TensorDataset(torch.randn(400, 8)), batch_size=4)


def plain(root: str, report: Report) -> None:
    from ckpt_engine import Checkpointer

    net, data = model(), loader()
    optimizer = torch.optim.Adam(net.parameters())
    with Checkpointer(options(root)) as ckpt:
        run = ckpt.track(model=net, optimizer=optimizer, loader=data)
        for (x,) in data:
            _wait_for_room(ckpt.engine)
            net(x).square().mean().backward()
            report(run.global_step + 1)
            optimizer.step()
            optimizer.zero_grad()


def accelerate(root: str, report: Report) -> None:
    from accelerate import Accelerator

    from accelerate_ckpt import AdaptiveCheckpoint

    accelerator = Accelerator(cpu=True)
    net = model()
    net, optimizer, data = accelerator.prepare(net, torch.optim.Adam(net.parameters()), loader())
    ckpt = AdaptiveCheckpoint(accelerator, options(root))
    for (x,) in data:
        _wait_for_room(ckpt._engine)
        accelerator.backward(net(x).square().mean())
        report(ckpt.global_step + 1)
        optimizer.step()
        optimizer.zero_grad()


def lightning(root: str, report: Report) -> None:
    import lightning.pytorch as pl

    from lightning_ckpt import AdaptiveCheckpoint

    ckpt = AdaptiveCheckpoint(options(root))

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Any, _: int) -> Any:
            if ckpt._run is not None:
                _wait_for_room(ckpt._run.engine)
            report(self.trainer.global_step + 1)
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ckpt],
    )
    trainer.fit(Module(), loader(), ckpt_path="auto")


def _wait_for_room(engine: Any) -> None:
    """On a busy machine the arena is not ready at once, and nothing would be in memory."""
    deadline = time.monotonic() + 60.0
    while engine._pipeline.slots.nbytes() and engine._pipeline.slots._warm_up is not None:
        engine.poll()
        engine.ready(durable=False)
        assert time.monotonic() < deadline
        time.sleep(0.001)


def main(loop: str, root: str, path: str, at: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def report(step: int) -> None:
        os.write(descriptor, f"{step}\n".encode())
        if step == int(at):
            os.write(descriptor, b"hangs\n")
            time.sleep(HANG_SECONDS)

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    {"plain": plain, "accelerate": accelerate, "lightning": lightning}[loop](root, report)


if __name__ == "__main__":
    main(*sys.argv[1:])
