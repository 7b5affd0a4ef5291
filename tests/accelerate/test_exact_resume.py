"""An Accelerate loop that is resumed from any boundary, under other seeds, is the uninterrupted run, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_ckpt import AdaptiveCheckpoint
from tests.accelerate.runs import durable, make_accelerator, train_accelerate
from tests.loop.runs import (
    LOADERS,
    Case,
    Net,
    Outcome,
    assert_continues,
    digest,
    seed_everything,
    shuffled,
    taken,
)

DATALOADER_CONFIGURATIONS = {
    "seedable sampler": Case(extra={"use_seedable_sampler": True}),
    "seedable sampler, two workers": Case(loader=shuffled(num_workers=2), extra={"use_seedable_sampler": True}),
    "stateful loader made by Accelerate": Case(extra={"use_stateful_dataloader": True}),
    "stateful loader made by Accelerate, two workers": Case(
        loader=shuffled(num_workers=2), extra={"use_stateful_dataloader": True}
    ),
    "stateful loader made by Accelerate, seedable": Case(
        extra={"use_stateful_dataloader": True, "use_seedable_sampler": True}
    ),
    "dispatched batches": Case(extra={"dispatch_batches": True}),
    "dispatched batches, two workers": Case(loader=shuffled(num_workers=2), extra={"dispatch_batches": True}),
    "split batches": Case(extra={"split_batches": True}),
    "split and dispatched batches": Case(extra={"split_batches": True, "dispatch_batches": True}),
    "no even batches": Case(extra={"even_batches": False}),
    "iterable dataset, not dispatched": Case(loader=LOADERS["iterable dataset"], extra={"dispatch_batches": False}),
}
LOOPS = {
    "evaluation within epochs": Case(evaluate_every=2),
    "no evaluation": Case(evaluation=None),
    "accumulation of 2": Case(accumulate=2),
    "accumulation of 4": Case(accumulate=4, loader=shuffled(30)),
    "accumulation over epochs' ends": Case(accumulate=4),
    "one batch per epoch": Case(loader=shuffled(4), epochs=6),
    "two batches per epoch": Case(loader=shuffled(8), epochs=6),
    "one step per epoch": Case(loader=shuffled(16), accumulate=4, epochs=6),
}
CASES = {**{name: Case(loader=loader) for name, loader in LOADERS.items()}, **DATALOADER_CONFIGURATIONS, **LOOPS}
FEW = (
    "shuffled",
    "seedable sampler",
    "stateful loader made by Accelerate",
    "dispatched batches",
    "accumulation of 2",
    "one batch per epoch",
)


@pytest.mark.cells(2)
@pytest.mark.parametrize("name", FEW)
def test_a_few_configurations_resume_exactly(name: str, tmp_path: Path) -> None:
    """Tracking leaves the run as it is; from the middle, three generations of resume repeat it."""
    case, every = CASES[name], 1 if name in ("one batch per epoch", "accumulation of 2") else 3
    reference, snapshots = taken(train_accelerate, case, tmp_path / "run", every)
    assert len(snapshots) >= 3
    chosen = snapshots[len(snapshots) // 2]
    assert_continues(train_accelerate, case, reference, chosen, tmp_path / "run", tmp_path / "resumed", every)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_every_boundary_resumes_exactly(name: str, accumulate: int, tmp_path: Path) -> None:
    """Whatever boundary a run is resumed from, it continues bit for bit, and so do its heirs."""
    case = replace(CASES[name], accumulate=accumulate)
    reference, snapshots = taken(train_accelerate, case, tmp_path / "run")
    for snapshot in snapshots:
        assert_continues(train_accelerate, case, reference, snapshot, tmp_path / "run", tmp_path / snapshot.id)


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def train_two_loaders(case: Case, options: Mapping[str, Any] | None, *, seed: int = 0, trace: Any = None) -> Outcome:
    """Passes over the second loader are shorter: it ends each epoch (`zip`), or begins again, in a generator."""
    seed_everything(seed)
    trace = [] if trace is None else trace
    accelerator = make_accelerator(case)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, long, short = accelerator.prepare(model, optimizer, shuffled(28)(), shuffled(12)())
    ckpt = None if options is None else AdaptiveCheckpoint(accelerator, options)
    endless = None if case.evaluation is None else forever(short)
    for epoch in range(ckpt.epoch if ckpt is not None else 0, case.epochs):
        batch = 0 if ckpt is None else ckpt.resumed_batches
        for batches in zip(long, short, strict=False) if endless is None else long:
            (x, y, ids), (_, more, others) = batches if endless is None else (batches, next(endless))
            durable(ckpt)
            loss = ((model(x) - y[: len(x)] - more.mean()) ** 2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            samples = (tuple(ids.tolist()), tuple(others.tolist()))
            trace.append(("train", epoch, batch, *samples, loss.detach().item().hex()))
            batch += 1
        trace.append(("train", epoch, batch))
    found = digest(weights=model.state_dict(), optimizer=optimizer.state_dict())
    accelerator.end_training()
    accelerator._dataloaders.clear()
    return Outcome(trace, found)


@pytest.mark.parametrize(
    ("endless", "seedable"),
    [(False, True), (True, False), *(pytest.param(one, one, marks=pytest.mark.slow) for one in (False, True))],
)
def test_a_second_loader_that_has_ended_resumes_exactly(endless: bool, seedable: bool, tmp_path: Path) -> None:
    """Accelerate has found its end one batch ahead; the loop asks it once more, and gets nothing."""
    case = Case(extra={"use_seedable_sampler": seedable}, epochs=2)
    case = case if endless else replace(case, evaluation=None)
    reference, snapshots = taken(train_two_loaders, case, tmp_path / "run")
    assert len(snapshots) >= 4
    for snapshot in snapshots[:: 7 if endless else 5]:  # their heirs resume from those between
        assert_continues(train_two_loaders, case, reference, snapshot, tmp_path / "run", tmp_path / snapshot.id)


def train_within(case: Case, options: Mapping[str, Any] | None, *, seed: int = 0, trace: Any = None) -> Outcome:
    """Asks for each batch within `accumulate`."""
    seed_everything(seed)
    trace = [] if trace is None else trace
    accelerator = make_accelerator(case)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, shuffled(16)())
    ckpt = None if options is None else AdaptiveCheckpoint(accelerator, options)
    for epoch in range(ckpt.epoch if ckpt is not None else 0, case.epochs):
        batches = iter(loader)
        for batch in range(ckpt.resumed_batches if ckpt is not None else 0, 4):
            with accelerator.accumulate(model):
                x, y, ids = next(batches)
                durable(ckpt)
                loss = ((model(x) - y) ** 2).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            trace.append(("train", epoch, batch, tuple(ids.tolist()), loss.detach().item().hex()))
    found = digest(weights=model.state_dict(), optimizer=optimizer.state_dict())
    accelerator.end_training()
    accelerator._dataloaders.clear()
    return Outcome(trace, found)


def test_a_loop_that_asks_within_accumulate_resumes_exactly(tmp_path: Path) -> None:
    """It has counted its next step before the batch that a resume begins with."""
    reference, snapshots = taken(train_within, case := Case(accumulate=2), tmp_path / "run")
    assert snapshots
    for snapshot in snapshots:
        assert_continues(train_within, case, reference, snapshot, tmp_path / "run", tmp_path / snapshot.id)
