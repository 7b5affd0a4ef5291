"""A loop that was complete and is started again: nothing is missing, as long as it trains nothing more."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ckpt_engine import Checkpointer
from tests.loop.runs import report, seed_everything


@dataclass
class Job:
    """What a script counts in an object of its own."""

    steps: int = 0


class Noise:
    """Values that a script draws before its loop, and reads in it."""

    def __init__(self) -> None:
        self.scale = random.random()


class Kept:
    """Keeps what no snapshot can have: a file that is open, and how often it was written."""

    def __init__(self, folder: Path) -> None:
        self.file = (folder / "log.txt").open("a")
        self.written: Any = (self.file, 0)


def over_a_loader(root: Path, epochs: int, seed: int) -> None:
    seed_everything(seed)
    job, noise = Job(), Noise()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(torch.ones(8, 2), batch_size=2)  # type: ignore[arg-type]
    with Checkpointer(root, every_n_steps=1, writer="thread") as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for _ in range(run.epoch, epochs):
            for batch in loader:
                (noise.scale * model(batch)).sum().backward()
                optimizer.step()
                job.steps += 1


def steps(root: Path, epochs: int, seed: int) -> None:
    seed_everything(seed)
    job, noise = Job(), Noise()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Checkpointer(root, every_n_steps=1, writer="thread") as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        for _ in range(run.global_step, 4 * epochs):
            (noise.scale * model(torch.ones(2))).sum().backward()
            optimizer.step()
            job.steps += 1
            run.step()


def carries(root: Path, epochs: int, seed: int) -> None:
    seed_everything(seed)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(torch.ones(8, 2), batch_size=2)  # type: ignore[arg-type]
    with Checkpointer(root, every_n_steps=1, writer="thread") as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        mean = torch.zeros(())
        for _ in range(run.epoch, epochs):
            for batch in loader:
                loss = model(batch).sum()
                mean = 0.9 * mean + loss.detach()
                (loss * mean).backward()
                optimizer.step()


def keeps(root: Path, epochs: int, seed: int) -> None:
    seed_everything(seed)
    kept = Kept(root.parent)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(torch.ones(8, 2), batch_size=2)  # type: ignore[arg-type]
    with Checkpointer(root, every_n_steps=1, writer="thread") as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for _ in range(run.epoch, epochs):
            for batch in loader:
                model(batch).sum().backward()
                optimizer.step()
                kept.written = (kept.file, kept.written[1] + 1)
    kept.file.close()


@pytest.mark.cells(1)
@pytest.mark.parametrize("loop", [over_a_loader, steps, carries, keeps])
def test_a_finished_loop_lacks_nothing_until_it_trains_again(loop: Any, tmp_path: Path) -> None:
    """Started again it trains nothing, and what a process begins with is no matter; trained longer, it is named."""
    loop(tmp_path / "run", 2, 0)
    for seed in (1, 2):
        loop(tmp_path / "run", 2, seed)
        assert report(tmp_path / "run").not_restored == ()
    loop(tmp_path / "run", 3, 3)
    assert report(tmp_path / "run").not_restored
