"""Tiny training loops that write down everything an exact resume has to repeat, and what to do with their snapshots."""

from __future__ import annotations

import json
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_engine import Checkpointer
from ckpt_engine.engine import Engine
from ckpt_engine.observe.resume_report import ResumeReport
from tests.support.digests import digest as digest
from tests.support.digests import seed_everything as seed_everything
from tests.support.snapshots import Saved as Saved
from tests.support.snapshots import only as only
from tests.support.snapshots import saved as saved

BATCH = 4
SAMPLES = 22
"""Six batches, the last of them short."""
EPOCHS = 3
READY_SECONDS = 60.0
STUCK_SECONDS = 600.0
Entry = tuple[Any, ...]


class Augmented(Dataset[Any]):
    """Samples with noise drawn from all three global random streams."""

    def __init__(self, n: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(n, 6, generator=generator)
        self.y = torch.randn(n, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        x = self.x[i] + 0.1 * torch.randn(6) + 0.1 * float(np.random.rand()) + 0.1 * random.random()
        return x, self.y[i], i


class Stuck(Augmented):
    """Loaded by two workers, the 5th batch never comes: the worker that is to make it waits until it is killed."""

    def __init__(self, *, stuck: bool) -> None:
        super().__init__()
        self.stuck, self.made = stuck, 0

    def __getitem__(self, i: int) -> Any:
        self.made += 1
        if self.stuck and self.made > 2 * BATCH:
            time.sleep(STUCK_SECONDS)
        return super().__getitem__(i)


class Stream(IterableDataset[Any]):
    """The same samples without a known length."""

    def __iter__(self) -> Iterator[Any]:
        source = Augmented()
        return (source[i] for i in range(SAMPLES))


class StatefulStream(IterableDataset[Any]):
    """A stream that says where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        source = Augmented()
        while self.at < SAMPLES:
            self.at += 1
            yield source[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class StickyStream(StatefulStream):
    """Starts each pass where the state that was loaded last says, as streams of the package `datasets` do."""

    def __init__(self) -> None:
        super().__init__()
        self.start = 0

    def __iter__(self) -> Iterator[Any]:
        self.at = self.start
        source = Augmented()
        while self.at < SAMPLES:
            self.at += 1
            yield source[self.at - 1]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


class Net(nn.Module):
    """Batch norm, dropout, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))
        self.tail = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tail(self.head(x))
        return out


class Average:
    """Averaged weights, kept by the script: an object with a state of its own."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = [p.detach().clone() for p in model.parameters()]

    def update(self, model: nn.Module) -> None:
        for mine, p in zip(self.weights, model.parameters(), strict=True):
            mine.lerp_(p.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


def shuffled(n: int = SAMPLES, kind: Any = DataLoader, **options: Any) -> Callable[[], Any]:
    """A factory of shuffled loaders."""

    def make() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchdata calls what torch has deprecated
            return kind(Augmented(n), batch_size=BATCH, shuffle=True, **options)

    return make


def stuck_case(*, stuck: bool) -> Case:
    """A loop that waits for the batch after the 4th, or an equal one that does not."""

    def make() -> Any:
        return DataLoader(Stuck(stuck=stuck), batch_size=BATCH, shuffle=True, num_workers=2)

    return Case(loader=make, evaluation=None, epochs=2)


def weighted() -> Any:
    weights = torch.rand(SAMPLES, generator=torch.Generator().manual_seed(1))
    return DataLoader(Augmented(), batch_size=BATCH, sampler=WeightedRandomSampler(weights.tolist(), SAMPLES))


def with_generator() -> Any:
    return DataLoader(Augmented(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))


def shuffled_evaluation() -> Any:
    return DataLoader(Augmented(8), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5))


LOADERS: Mapping[str, Callable[[], Any]] = {
    "shuffled": shuffled(),
    "last batch dropped": shuffled(drop_last=True),
    "two workers": shuffled(num_workers=2),
    "persistent workers": shuffled(num_workers=2, persistent_workers=True),
    "own generator": with_generator,
    "weighted sampler": weighted,
    "iterable dataset": lambda: DataLoader(Stream(), batch_size=BATCH),
    "stateful iterable dataset": lambda: DataLoader(StatefulStream(), batch_size=BATCH),
    "iterable dataset that keeps what was loaded": lambda: DataLoader(StickyStream(), batch_size=BATCH),
    "stateful loader": shuffled(kind=StatefulDataLoader),
    "stateful loader, two workers": shuffled(kind=StatefulDataLoader, num_workers=2),
}


@dataclass(frozen=True)
class Case:
    """One configuration of a loop.

    Args:
        loader: makes the training data.
        evaluation: makes the evaluation data, or None.
        evaluate_every: batches between evaluations within an epoch; 0: after each epoch.
        accumulate: batches per optimizer step.
        epochs: to train.
        extra: what only one kind of loop knows.
    """

    loader: Callable[[], Any] = LOADERS["shuffled"]
    evaluation: Callable[[], Any] | None = shuffled_evaluation
    evaluate_every: int = 0
    accumulate: int = 1
    epochs: int = EPOCHS
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What a run did and where it ended."""

    trace: list[Entry]
    digest: dict[str, str]


WAITED_FOR = (1, 3, 4, 5)
"""Every so many steps: between other snapshots the loop does not wait."""


def every_boundary(root: Path, **options: Any) -> dict[str, Any]:
    """Options that leave a snapshot of every boundary in `root`."""
    return {
        "tiers": str(root),
        "every_n_steps": 1,
        "keep": {"last": 1000},
        "writer": "thread",
        "lazy": "on",
        **options,
    }


def resume_only(root: Path, **options: Any) -> dict[str, Any]:
    """Options that resume from `root` and add nothing to it."""
    return {"tiers": str(root), "every_n_steps": 10**9, "at_end": False, "writer": "thread", **options}


def train_plain(case: Case, options: Mapping[str, Any] | None, *, seed: int = 0, trace: Any = None) -> Outcome:
    """One process of a plain loop; without options, it is not tracked."""
    seed_everything(seed)
    trace = [] if trace is None else trace
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    average = Average(model)
    loader = case.loader()
    evaluation = None if case.evaluation is None else case.evaluation()
    ckpt = None if options is None else Checkpointer(options)
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule, "average": average, "loader": loader}
    if evaluation is not None:
        objects["evaluation"] = evaluation
    run = None if ckpt is None else ckpt.track(**objects)
    for epoch in range(run.epoch if run is not None else 0, case.epochs):
        model.train()
        for batch, (x, y, ids) in enumerate(loader, run.resumed_batches if run is not None else 0):
            durable(ckpt)
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            if (batch + 1) % case.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                average.update(model)
            trace.append(("train", epoch, batch, tuple(ids.tolist()), loss.detach().item().hex(), lr(optimizer)))
            if case.evaluate_every and batch % case.evaluate_every == 1:
                evaluate(model, evaluation, trace)
                model.train()
        optimizer.zero_grad()
        if not case.evaluate_every and evaluation is not None:
            evaluate(model, evaluation, trace)
    found = digest(weights=model.state_dict(), optimizer=optimizer.state_dict(), average=average.weights)
    if ckpt is not None:
        ckpt.close()
    return Outcome(trace, found)


def durable(ckpt: Checkpointer | None) -> None:
    """Wait for the last snapshot, so that none is skipped because the writer is busy."""
    if ckpt is not None and ckpt.config.every_n_steps in WAITED_FOR:
        ckpt.before_update()
        assert ckpt.wait(30)
    elif ckpt is not None and ckpt.config.memory is not None:
        patient(ckpt.engine)


def patient(engine: Engine) -> None:
    """Wait until a snapshot in memory is possible: there is a writer to keep it, and room."""
    engine.before_update()
    deadline = time.monotonic() + READY_SECONDS
    while not engine.ready(durable=False):
        assert time.monotonic() < deadline, "the arena does not become ready"
        time.sleep(0.001)


def lr(optimizer: Any) -> tuple[float, ...]:
    return tuple(group["lr"] for group in optimizer.param_groups)


def evaluate(model: nn.Module, loader: Any, trace: Any) -> None:
    """Score the model; the noise of the data and the order are part of the trace."""
    model.eval()
    with torch.no_grad():
        for x, y, ids in loader:
            trace.append(("eval", tuple(ids.tolist()), ((model(x) - y) ** 2).mean().item().hex()))


# ---- snapshots

Train = Callable[..., Outcome]


def taken(train: Train, case: Case, root: Path, every: int = 1) -> tuple[Outcome, list[Saved]]:
    """The uninterrupted run, and the snapshots in the middle of an identical run that is tracked."""
    watched = train(case, every_boundary(root, every_n_steps=every))
    if not case.extra.get("use_stateful_dataloader"):
        reference = train(case, None)
        assert watched.trace == reference.trace, "tracking changed the run"
        assert watched.digest == reference.digest, "tracking changed the run"
    return watched, [snapshot for snapshot in saved(root) if snapshot.reason != "end"]


def assert_continues(
    train: Train, case: Case, reference: Outcome, snapshot: Saved, root: Path, target: Path, every: int = 1
) -> None:
    """Resume under another seed, three generations deep, and compare everything with the uninterrupted run."""
    generation = 0
    while True:
        where = f"generation {generation}: epoch {snapshot.epoch}, batch {snapshot.batch}"
        folder = only(root, snapshot, target / str(generation))
        options = every_boundary(folder, every_n_steps=every) if generation < 2 else resume_only(folder)
        resumed = train(case, options, seed=1234 + snapshot.step)
        assert resumed.trace == reference.trace[len(reference.trace) - len(resumed.trace) :], where
        first = next(i for i, e in enumerate(reference.trace) if e[:3] == ("train", snapshot.epoch, snapshot.batch))
        assert len(resumed.trace) == len(reference.trace) - first, where
        assert resumed.digest == reference.digest, where
        lost = [one.why for one in report(folder).not_restored]
        # Draws of such a dataset for its order and for its samples look the same.
        assert [why for why in lost if "IterableDataset draws from the global random streams" not in why] == [], where
        generation += 1
        later = [s for s in saved(folder) if s.reason != "end" and s.step > snapshot.step]
        if generation == 3 or not later:
            return
        root, snapshot = folder, later[0 if every > 1 else min(1, len(later) - 1)]


def report(root: Path) -> ResumeReport:
    """The newest resume report of a run."""
    return ResumeReport.from_json(json.loads((root / "resume-report.json").read_text()))
