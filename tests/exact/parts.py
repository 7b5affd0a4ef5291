"""What a cell of the sweep is made of: data, samplers, hidden state and metrics, each by its name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_engine import Carry
from tests.lightning.loader_cases import Rotating
from tests.loop.runs import BATCH, Augmented, StatefulStream
from tests.loop.test_loaders import Counting

SAMPLES = 22
"""Six batches of one rank, the last of them short."""
EPOCHS = 3


@dataclass(frozen=True, slots=True)
class Cell:
    """One run that is killed.

    Args:
        trainer: plain, fabric, accelerate, transformers or lightning.
        loader, evaluation, hooks, metric, hidden: names, see `sweep`.
        accumulate: batches per optimizer step.
        every_n_steps, writer: options of ours.
        kills: of each life that is killed: after which share of what is left, seconds later, with its writers.
    """

    number: int
    trainer: str
    loader: str
    evaluation: str
    hooks: str
    metric: str
    hidden: str
    accumulate: int
    ranks: int
    every_n_steps: int
    writer: str
    kills: tuple[tuple[float, float, bool], ...]

    @property
    def causes(self) -> tuple[str, ...]:
        """What a resume report says where such a cell cannot be exact; empty: it has to be."""
        found = [CANNOT[name] for name in (self.hidden, self.loader) if name in CANNOT]
        if self.hidden in ("dataset", "collate") and self.trainer in ("accelerate", "transformers"):
            found.append("reads batches before the step")
        return tuple(found)

    def __str__(self) -> str:
        options = (self.loader, f"evaluation {self.evaluation}", self.hooks, self.metric, self.hidden)
        named = [one for one in options if not one.endswith("none")]
        return (
            f"{self.number} {self.trainer}: {', '.join(named)}; every {self.accumulate} batches, {self.ranks} "
            f"rank{'s' * (self.ranks > 1)}, snapshots every {self.every_n_steps} by a {self.writer}"
        )


CANNOT = {
    "iterator": "running iterator",
    "local": "carried from step to step",
    "start": "begins with another value",
    "augmented stream": "draws from the global random streams",
}


class Noisy(Augmented):
    """Samples with more noise, from a stream of their own."""

    def __init__(self) -> None:
        super().__init__(SAMPLES)
        self.dice = random.Random(5)

    def __getitem__(self, i: int) -> Any:
        x, y, number = super().__getitem__(i)
        return x + self.dice.random(), y, number


class Stream(IterableDataset[Any]):
    """The samples without a length, with or without an augmentation."""

    def __init__(self, *, augmented: bool) -> None:
        self.augmented = augmented

    def __iter__(self) -> Iterator[Any]:
        source = Augmented(SAMPLES)
        for i in range(SAMPLES):
            yield source[i] if self.augmented else (source.x[i], source.y[i], i)


class Plainly(StatefulStream):
    """The stream that says where it is, without an augmentation."""

    def __iter__(self) -> Iterator[Any]:
        source = Augmented(SAMPLES)
        while self.at < SAMPLES:
            self.at += 1
            yield source.x[self.at - 1], source.y[self.at - 1], self.at - 1
        self.at = 0


class Batches(Sampler[Any]):
    """A batch sampler that draws its order from the global stream when it is iterated."""

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(SAMPLES).tolist()
        return iter([order[i : i + BATCH] for i in range(0, SAMPLES, BATCH)])

    def __len__(self) -> int:
        return -(-SAMPLES // BATCH)


class Net(nn.Module):
    """Batch norm, dropout, and what its hidden state makes of its output."""

    def __init__(self, hidden: str, seed: int) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.tail = nn.Linear(8, 1)
        self.hidden = hidden
        self.calls = 0
        self.began = float(seed)
        self.mean = torch.zeros(6)
        self.seen: list[float] = []
        self.dice = random.Random(5)
        self.numbers = np.random.default_rng(5)
        self.register_buffer("queue", torch.zeros(4), persistent=False)
        self.factors = iter([1.0 + i / 50 for i in range(400)]) if hidden == "iterator" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            out: torch.Tensor = self.tail(self.head(x))
            return out
        if self.hidden == "mean":
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
            x = x - self.mean
        out = self.tail(self.head(x)) * self._factor()
        if self.hidden == "buffer":
            self.queue = torch.cat([self.queue[1:], out.detach().mean().reshape(1)])
            out = out - self.queue.mean()
        if self.hidden == "list":
            self.seen.append(out.detach().mean().item())
            out = out - sum(self.seen[-3:]) / 3
        return out

    def _factor(self) -> float:
        if self.hidden == "counter":
            self.calls += 1
            return 1 / (1 + 0.1 * self.calls)
        if self.hidden == "dropout":
            dropout: Any = self.head[3]
            dropout.p += 0.005
        if self.hidden == "start":
            self.began += 1.0
            return 1 + self.began / 1000
        if self.factors is not None:
            return next(self.factors)
        if self.hidden == "random":
            return 1 + self.dice.random()
        return 1 + float(self.numbers.random()) if self.hidden == "numpy" else 1.0


def collate_of(cell: Cell) -> Callable[[list[Any]], Any]:
    """Makes batches; with a count of its own if that is the cell's hidden state."""
    calls = 0

    def stack(rows: list[Any]) -> Any:
        nonlocal calls
        calls += cell.hidden == "collate"
        x, y, ids = (torch.stack([torch.as_tensor(row[i]) for row in rows]) for i in range(3))
        x = x + 0.05 * calls
        return {"x": x, "y": y, "ids": ids} if cell.trainer == "transformers" else (x, y, ids)

    return stack


def dataset_of(cell: Cell) -> Any:
    """The training data."""
    if cell.loader.endswith("stream"):
        return Plainly() if cell.loader == "stateful stream" else Stream(augmented=cell.loader == "augmented stream")
    return Noisy() if cell.hidden == "dataset" else Augmented(SAMPLES * cell.ranks)


def loader_of(cell: Cell, **more: Any) -> Any:
    """The training loader.

    Args:
        more: a sampler that a loop of several ranks brings.
    """
    data = dataset_of(cell)
    options: dict[str, Any] = {"batch_size": BATCH, "collate_fn": collate_of(cell), **more}
    if "workers" in cell.loader:
        options |= {"num_workers": 2, "persistent_workers": "kept" in cell.loader}
    if cell.loader == "stateful loader":
        return StatefulDataLoader(data, shuffle=True, **options)
    if cell.loader == "batch sampler":
        return DataLoader(data, batch_sampler=Batches(), collate_fn=options["collate_fn"])
    samplers: dict[str, Callable[[], Any]] = {
        "weighted": lambda: WeightedRandomSampler([1.0 + i % 3 for i in range(SAMPLES)], SAMPLES),
        "rotating": lambda: Rotating(SAMPLES),
        "learning": Counting,
    }
    if cell.loader in samplers:
        options["sampler"] = samplers[cell.loader]()
    elif "sampler" not in options and not cell.loader.endswith("stream"):
        options["shuffle"] = True
    if cell.loader == "own generator":
        options["generator"] = torch.Generator().manual_seed(3)
    return DataLoader(data, drop_last=cell.loader == "drop_last", **options)


def evaluation_of(cell: Cell) -> Any:
    """The loader of the evaluation, or None."""
    if cell.evaluation == "none":
        return None
    kept = {"num_workers": 2, "persistent_workers": True} if "kept" in cell.evaluation else {}
    own = torch.Generator().manual_seed(5) if "generator" in cell.evaluation else None
    return DataLoader(Augmented(8), batch_size=4, shuffle=True, generator=own, collate_fn=collate_of(cell), **kept)


def metric_of(cell: Cell) -> Any:
    """A metric object, or None."""
    made: dict[str, Callable[[], Any]] = {
        "mean": torchmetrics.MeanMetric,
        "running": lambda: torchmetrics.RunningMean(window=4),
        "tracker": lambda: torchmetrics.MetricTracker(torchmetrics.MeanMetric(), maximize=False),
    }
    return made[cell.metric]() if cell.metric in made else None


def carry_of(cell: Cell) -> Carry | None:
    """What the loop carries in an object, or None."""
    return Carry(drift=0.0) if cell.hidden == "carry" else None
