"""A plain training loop without a trainer: what it saw, the position at every boundary, and the same loop resumed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader

from ckpt_engine.data import rng
from ckpt_engine.data.exactness import Restoration
from ckpt_engine.data.position import LoaderPosition, attach

EPOCHS = 2


@dataclass(frozen=True)
class Boundary:
    """One place where a snapshot can be taken; `seen` batches were trained before it."""

    where: str
    epoch: int
    seen: int
    data: dict[str, Any]
    rng: rng.RngState


@dataclass
class Run:
    """What one process did."""

    batches: list[Any] = field(default_factory=list)
    boundaries: list[Boundary] = field(default_factory=list)
    end: rng.RngState = field(default_factory=dict)
    restoration: Restoration | None = None
    position: LoaderPosition | None = None

    def after(self, seen: int) -> list[Any]:
        return self.batches[seen:]


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def recorded(batch: Any) -> tuple[Any, ...]:
    """A batch as plain values that compare bitwise."""
    return tuple(part.numpy().tobytes() if isinstance(part, torch.Tensor) else part for part in batch)


def train_step() -> None:
    """Draw from the global streams as dropout and friends do."""
    torch.rand(3)
    random.random()
    np.random.rand()


def train(
    make: Callable[[], DataLoader[Any]],
    *,
    seed: int = 1,
    resume: Boundary | None = None,
    follow: bool = True,
    epochs: int = EPOCHS,
    at_end: Literal["next_epoch", "finish_epoch"] = "next_epoch",
    stop_after: int | None = None,
) -> Run:
    """Run a fresh 'process': own seeds, own objects, then `epochs` epochs or the rest of them after `resume`."""
    seed_everything(seed)
    loader = make()
    run = Run()
    seen = 0
    first = 0
    position = attach(loader) if follow else None
    run.position = position
    set_epoch = getattr(loader.sampler, "set_epoch", getattr(loader.dataset, "set_epoch", None))

    def mark(where: str, epoch: int) -> None:
        if position is not None:
            run.boundaries.append(Boundary(where, epoch, seen, position.state(), rng.capture()))

    if resume is not None:
        assert position is not None
        seen, first = resume.seen, resume.epoch
        run.restoration = position.load_state(resume.data, rng=resume.rng, at_end=at_end)
        if first == epochs:
            rng.restore(resume.rng)
    else:
        mark("before everything", 0)
    for epoch in range(first, epochs):
        if set_epoch is not None:
            set_epoch(epoch)
        iterator = iter(loader)
        resumed_within = resume is not None and epoch == first and resume.where != "between epochs"
        if not resumed_within:
            mark("before the first batch", epoch)
        for batch in iterator:
            run.batches.append((epoch, *recorded(batch)))
            seen += 1
            if position is not None and len(run.batches) == 1:
                run.restoration = position.restoration  # what later epochs say is theirs
            train_step()
            mark("after a batch", epoch)
            if stop_after is not None and len(run.batches) >= stop_after:
                return run
        mark("between epochs", epoch + 1)
    run.end = rng.capture()
    if position is not None and not run.batches:
        run.restoration = position.restoration
    return run
