"""Replaying `on_train_epoch_start` sets up what a snapshot cannot hold and changes nothing that it does hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from tests.lightning.runs import (
    Case,
    Entry,
    Model,
    Recorder,
    every_batch,
    make_trainer,
    only,
    resumer,
    saved,
    seed_everything,
    train,
)


class Counts(Callback):
    """Counts epochs, and saves the count."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]


class Restless(Model):
    """Its hook changes weights, buffers, learning rates and random streams, all of which a snapshot holds."""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        torch.rand(1)
        with torch.no_grad():
            self.net[0].weight.mul_(0.9)
            self.net[1].running_mean.add_(1.0)
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5


def run(callback: Any, seed: int, ckpt_path: str | None) -> tuple[list[Entry], Counts, Model]:
    seed_everything(seed)
    trace: list[Entry] = []
    model, counts = Restless(Case(), trace), Counts()
    train(make_trainer(Case(), [counts, *callback], Recorder(trace)), model, Case(), ckpt_path)
    return trace, counts, model


def test_a_replay_leaves_restored_state_alone(tmp_path: Path) -> None:
    """Weights, buffers, options of optimizers, random streams and callbacks' states are those of the snapshot."""
    reference, counted, final = run([], 0, None)
    run(every_batch(tmp_path / "run"), 0, None)
    snapshot = next(s for s in saved(tmp_path / "run") if (s.epoch, s.batch) == (1, 3))
    trace, counts, model = run([resumer(only(tmp_path / "run", snapshot, tmp_path / "one"))], 7, "auto")
    start = next(i for i, entry in enumerate(reference) if entry[:3] == ("train", 1, 3))
    assert trace == reference[start:]
    assert counts.epochs == counted.epochs == 3
    for name, weight in final.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
