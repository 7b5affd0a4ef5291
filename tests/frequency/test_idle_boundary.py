"""What a boundary costs where nothing is due: calls are counted, which no other load on the machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mode
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_ckpt import AdaptiveCheckpoint as AccelerateCheckpoint
from ckpt_engine import Checkpointer
from ckpt_engine.loop import failing_loop
from ckpt_engine.loop.tracker import Tracker
from lightning_ckpt import AdaptiveCheckpoint
from lightning_ckpt.run import FitRun
from tests.accelerate.runs import make_accelerator
from tests.loop.runs import Case

STEPS = 40
BOUNDARY, STEP = 48, 270
"""Most calls of a boundary, and of what a step has more than without us: hooks, fence, position, row."""
NEVER: dict[str, Any] = {"every_n_steps": 10**6, "at_end": False}


class Calls:
    """Counts calls of Python and C functions on this thread."""

    def __init__(self) -> None:
        self.boundaries: list[int] = []
        self.steps: list[int] = []
        self._count = 0

    def _see(self, _frame: FrameType, event: str, _arg: object) -> None:
        self._count += event in ("call", "c_call")

    def around(self, boundary: Callable[..., None]) -> Callable[..., None]:
        """The same function, which counts what it calls."""

        def counted(*args: Any) -> None:
            before = self._count
            boundary(*args)
            self.boundaries.append(self._count - before)

        return counted

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The model computes, between two steps of the loop around it."""
        sys.setprofile(None)
        self.steps.append(self._count)
        try:
            yield
        finally:
            self._count = 0
            sys.setprofile(self._see)


class Net(pl.LightningModule):
    """A small model; `calls` counts between two batches."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.layer, self._calls = nn.Linear(8, 3), calls

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        with self._calls.paused():
            loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(4 * STEPS, 8)), 4)


def _lightning(folder: Path | None, calls: Calls) -> None:
    callbacks = [pl.Callback(), *([AdaptiveCheckpoint(str(folder), **NEVER)] if folder else [])]
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, enable_checkpointing=False, callbacks=callbacks, **quiet)
    trainer.fit(Net(calls), _loader())


def _loop(calls: Calls, model: nn.Module, optimizer: Any, loader: Any) -> None:
    for (batch,) in loader:
        with calls.paused():
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = nn.Linear(8, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), _loader()


def _plain(folder: Path | None, calls: Calls) -> None:
    model, optimizer, loader = _parts()
    if folder is None:
        _loop(calls, model, optimizer, loader)
        return
    with Checkpointer(str(folder), **NEVER).track(model=model, optimizer=optimizer, loader=loader):
        _loop(calls, model, optimizer, loader)


def _accelerate(folder: Path | None, calls: Calls) -> None:
    accelerator = make_accelerator(Case())  # one of a test before may be in the middle of an accumulation
    model, optimizer, loader = accelerator.prepare(*_parts())
    ckpt = None if folder is None else AccelerateCheckpoint(accelerator, str(folder), **NEVER)
    _loop(calls, model, optimizer, loader)
    if ckpt is not None:
        ckpt.close()


TRAINERS: dict[str, tuple[Callable[[Path | None, Calls], None], Any]] = {
    "lightning": (_lightning, FitRun),
    "plain": (_plain, Tracker),
    "accelerate": (_accelerate, Tracker),
}


@pytest.mark.cells(1)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_boundary_that_does_nothing_is_cheap(trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far below what a step of ten milliseconds would show, and so is what hooks and the loader add to a step."""
    train, owner = TRAINERS[trainer]
    monkeypatch.setattr(failing_loop, "affordable", lambda *_: False)  # what a failing step would need is not recorded
    np.random.seed(0)  # a second normal that waits, of a test before, makes each look at the stream a long one
    without, calls = Calls(), Calls()
    monkeypatch.setattr(owner, "_boundary", calls.around(owner._boundary))
    before = sys.getprofile()
    try:
        train(None, without)
        train(tmp_path / "run", calls)
    finally:
        sys.setprofile(before)
    more = mode(calls.steps[5:]) - mode(without.steps[5:])
    assert mode(calls.boundaries[5:]) <= BOUNDARY
    assert more <= STEP
