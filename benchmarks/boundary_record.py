"""What is done at each boundary, and its cost: `python -m benchmarks.boundary_record` times the record of it, for a
step that fails, and `--audit STEPS` the look at hidden state, lists and sources, in runs of the model of `make demo`.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt_engine import Checkpointer
from ckpt_engine.audit.audit import Audit
from ckpt_engine.loop import failing_loop
from ckpt_engine.loop.failing_loop import LastBoundary
from lightning_ckpt import AdaptiveCheckpoint

BATCH = 8


class Small(pl.LightningModule):
    """Batch norm, dropout, a schedule and a logged mean."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).pow(2).mean()
        self.log("loss", loss.detach(), on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)]


def _loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(BATCH * 1000, 6)), batch_size=BATCH, shuffle=True)


def lightning(folder: str, records: int) -> None:
    """A fit of so many steps."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=records,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[AdaptiveCheckpoint(folder, every_n_steps=10**9, at_end=False)],
    )
    trainer.fit(Small(), _loader())


def plain(folder: str, records: int) -> None:
    """A tracked loop of so many steps."""
    module = Small()
    (optimizer,), (schedule,) = module.configure_optimizers()
    model, loader = module.net, _loader()
    with Checkpointer(folder, every_n_steps=10**9, at_end=False) as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, schedule=schedule, loader=loader)
        while run.global_step < records:
            for (x,) in loader:
                model(x).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                if run.global_step >= records:
                    break


def measured(train: Callable[[str, int], None], records: int) -> list[float]:
    """Seconds of each record."""
    times: list[float] = []
    reached = LastBoundary.reached

    def timed(self: LastBoundary[Any]) -> None:
        began = time.thread_time()
        reached(self)
        times.append(time.thread_time() - began)

    affordable = failing_loop.affordable
    LastBoundary.reached, failing_loop.affordable = timed, lambda *_: True  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            train(folder, records)
    finally:
        LastBoundary.reached, failing_loop.affordable = reached, affordable  # type: ignore[method-assign]
    return times


_LOOKS = ("begin", "boundary", "stepped", "state", "expect", "restore")


def demo(folder: str, steps: int) -> None:
    """The training of `make demo`."""
    example: Any = importlib.import_module("demo_train")
    ckpt = AdaptiveCheckpoint(folder)
    trainer = example.make_trainer(steps, [ckpt], None)
    trainer.fit(example.ByteTransformer(steps), example.StandardLibraryData(), ckpt_path="auto")


def demo_loop(folder: str, steps: int) -> None:
    """The same in a tracked loop, which keeps a list, and averages of weights."""
    example: Any = importlib.import_module("demo_train")
    model, data = example.ByteTransformer(steps), example.StandardLibraryData()
    loader, optimizer = data.train_dataloader(), model.configure_optimizers()["optimizer"]
    losses: list[float] = []
    with Checkpointer(folder) as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        best = {"loss": float("inf"), "step": 0}
        while run.global_step < steps:
            for batch in loader:
                loss = model.loss(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if losses[-1] < best["loss"]:
                    best["loss"], best["step"] = losses[-1], run.global_step
                if run.global_step >= steps:
                    break


def audited(train: Callable[[str, int], None], steps: int) -> tuple[float, list[tuple[str, float]]]:
    """Seconds of processor time of the training thread, and those of each look of the audit in it."""
    times: list[tuple[str, float]] = []

    def timed(name: str, look: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return look(*arguments, **options)
            finally:
                times.append((name, time.thread_time() - began))

        return wrapped

    looks = {name: getattr(Audit, name) for name in _LOOKS}
    for name, look in looks.items():
        setattr(Audit, name, timed(name, look))
    try:
        with tempfile.TemporaryDirectory() as folder:
            began = time.thread_time()
            train(folder, steps)
            return time.thread_time() - began, times
    finally:
        for name, look in looks.items():
            setattr(Audit, name, look)


def show_audit(steps: int) -> None:
    """Share of the run, target 0.1 %, and milliseconds at a boundary, target 1."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for name, train in (("Lightning", demo), ("plain", demo_loop)):
        seconds, times = audited(train, steps)
        total = sum(one for _, one in times)
        print(f"{name}: {steps} steps in {seconds:.1f} s, audit {total * 1e3:.1f} ms, {total / seconds:.3%}")
        for look in _LOOKS:
            found = sorted(one for other, one in times if other == look)
            if found:
                median, most = statistics.median(found) * 1e3, found[-1] * 1e3
                print(f"  {look}: {len(found)} times, median {median:.3f} ms, slowest {most:.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--audit", type=int, metavar="STEPS", help="time the audit in runs of so many steps instead")
    options = parser.parse_args()
    records = options.records
    torch.set_num_threads(1)
    if options.audit:
        show_audit(options.audit)
        return
    for name, train in (("Lightning", lightning), ("plain", plain)):
        times = sorted(measured(train, records))
        tenth, most = times[len(times) // 10], times[len(times) * 9 // 10]
        print(
            f"{name}: {len(times)} records, fastest {times[0] * 1e6:.0f} µs, fastest tenth {tenth * 1e6:.0f}, "
            f"median {statistics.median(times) * 1e6:.0f}, slowest tenth {most * 1e6:.0f}"
        )


if __name__ == "__main__":
    main()
