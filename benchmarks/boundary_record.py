"""What a record of each boundary costs, for a step that fails: `python -m benchmarks.boundary_record`."""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt_engine import Checkpointer
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1000)
    records = parser.parse_args().records
    torch.set_num_threads(1)
    for name, train in (("Lightning", lightning), ("plain", plain)):
        times = sorted(measured(train, records))
        tenth, most = times[len(times) // 10], times[len(times) * 9 // 10]
        print(
            f"{name}: {len(times)} records, fastest {times[0] * 1e6:.0f} µs, fastest tenth {tenth * 1e6:.0f}, "
            f"median {statistics.median(times) * 1e6:.0f}, slowest tenth {most * 1e6:.0f}"
        )


if __name__ == "__main__":
    main()
