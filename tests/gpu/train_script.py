"""Trains with dropout and mixed precision on a device, and kills itself at a step: `python -m tests.gpu.train_script`.

Prints one line of JSON at its end: digests of weights, optimizer and random streams, the losses, the first step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3
SNAPSHOT_SECONDS = 60.0
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
}


def make_loader(options: argparse.Namespace) -> DataLoader[Any]:
    """With workers, batches cross to page-locked memory in a thread of the loader, as on most GPU machines."""
    draw = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(44, 16, generator=draw), torch.randint(4, (44,), generator=draw))
    workers = (
        {"num_workers": options.workers, "persistent_workers": True, "pin_memory": True} if options.workers else {}
    )
    return DataLoader(data, batch_size=4, shuffle=True, drop_last=options.compile, **workers)


def make_model(options: argparse.Namespace) -> nn.Module:
    model = nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.Dropout(0.3),
        nn.Linear(64, 4),
    )  # fmt: skip
    if options.compile:
        model.compile(mode="reduce-overhead")
    return model


def make_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **OPTIMIZERS[kind])


class Life:
    """Counts optimizer steps, keeps the losses, and ends the process after a step if it is to."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._root = Path(options.root)
        self._die_after = options.die_after
        self.losses: list[tuple[int, str]] = []

    def stepped(self, step: int, loss: torch.Tensor) -> None:
        self.losses.append((step, loss.detach().float().item().hex()))
        if step == self._die_after:
            deadline = time.monotonic() + SNAPSHOT_SECONDS
            while not any((self._root / "snapshots").glob("*.json")) and time.monotonic() < deadline:
                threading.Event().wait(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


def digest(*parts: Any) -> str:
    """Of all tensors, bit for bit, and of everything else as it is printed."""
    found = hashlib.sha256()

    def add(node: Any) -> None:
        if isinstance(node, torch.Tensor):
            flat = node.detach().cpu().contiguous().view(-1)
            found.update(repr((node.dtype, tuple(node.shape))).encode() + flat.view(torch.uint8).numpy().tobytes())
        elif isinstance(node, dict):
            for key, value in node.items():
                found.update(repr(key).encode())
                add(value)
        elif isinstance(node, list | tuple):
            for value in node:
                add(value)
        else:
            found.update(repr(node).encode())

    add(parts)
    return found.hexdigest()


def streams() -> list[Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [random.getstate(), np.random.get_state(), torch.get_rng_state(), *cuda]


def plain(options: argparse.Namespace, life: Life) -> dict[str, Any]:
    """A loop of its own, with a `GradScaler`."""
    from ckpt_engine import Checkpointer

    model = make_model(options).to(options.device)
    optimizer, loader = make_optimizer(model, options.optimizer), make_loader(options)
    scaler = torch.amp.GradScaler(options.device, init_scale=2.0**14, growth_interval=5)
    half = torch.float16 if options.precision == "fp16" else torch.bfloat16
    with Checkpointer({"tiers": options.root, "every_n_steps": 2}) as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, scaler=scaler, loader=loader)
        for _ in range(run.epoch, EPOCHS):
            for x, y in loader:
                with torch.autocast(options.device, half):
                    loss = nn.functional.cross_entropy(model(x.to(options.device)), y.to(options.device))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                life.stepped(run.global_step, loss)
    return {"end": digest(model.state_dict(), optimizer.state_dict(), scaler.state_dict(), streams())}


def accelerate(options: argparse.Namespace, life: Life) -> dict[str, Any]:
    """Accelerate with mixed precision."""
    from accelerate import Accelerator

    from accelerate_ckpt import AdaptiveCheckpoint

    accelerator = Accelerator(mixed_precision=options.precision, cpu=options.device == "cpu")
    model = make_model(options)
    model, optimizer, loader = accelerator.prepare(
        model, make_optimizer(model, options.optimizer), make_loader(options)
    )
    ckpt = AdaptiveCheckpoint(accelerator, {"tiers": options.root, "every_n_steps": 2})
    for _ in range(ckpt.epoch, EPOCHS):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            life.stepped(ckpt.global_step, loss)
    accelerator.end_training()
    scaler = accelerator.scaler.state_dict() if accelerator.scaler is not None else None
    return {"end": digest(model.state_dict(), optimizer.state_dict(), scaler, streams())}


def lightning(options: argparse.Namespace, life: Life) -> dict[str, Any]:
    """Lightning with mixed precision."""
    import lightning.pytorch as pl

    from lightning_ckpt import AdaptiveCheckpoint

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model(options)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            return self.loss

        def on_train_batch_end(self, *args: Any) -> None:
            life.stepped(self.trainer.global_step, self.loss)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self, options.optimizer)

    module = Module()
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="gpu" if options.device == "cuda" else "cpu",
        devices=1,
        precision="16-mixed" if options.precision == "fp16" else "bf16-mixed",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[AdaptiveCheckpoint({"tiers": options.root, "every_n_steps": 2})],
    )
    trainer.fit(module, make_loader(options), ckpt_path="auto")
    plugin = trainer.precision_plugin.state_dict()
    return {"end": digest(module.state_dict(), trainer.optimizers[0].state_dict(), plugin, streams())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("loop", choices=("plain", "accelerate", "lightning"))
    parser.add_argument("root")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="fp16", choices=("fp16", "bf16"))
    parser.add_argument("--optimizer", default="foreach", choices=tuple(OPTIMIZERS))
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--die-after", type=int, default=-1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    random.seed(options.seed)
    np.random.seed(options.seed)
    torch.manual_seed(options.seed)
    life = Life(options)
    found = {"plain": plain, "accelerate": accelerate, "lightning": lightning}[options.loop](options, life)
    print(json.dumps({**found, "losses": life.losses}))


if __name__ == "__main__":
    main()
