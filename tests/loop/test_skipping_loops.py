"""A loop that skips trained batches by itself, as one had to without us, gets an error before it trains."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.loop.runs import BATCH, Augmented, Saved, durable, every_boundary, only, report, resume_only, saved
from tests.loop.test_unusual_loops import Setting

EPOCHS = 3


class Reads(torch.optim.SGD):
    """Notes what the resume report says when the first step begins."""

    report: Path | None = None
    said: list[str] | None = None

    def step(self, closure: Any = None) -> Any:
        if self.said is None and self.report is not None:
            self.said = [one.why for one in report(self.report).not_restored]
        return super().step(closure)


def step(run: Setting, batch: Any, every: int = 1, *, count: int = 0) -> None:
    x, y, ids = batch
    durable(run.ckpt)
    ((run.model(x) - y) ** 2).mean().backward()
    run.trace.append(tuple(ids.tolist()))
    if count % every == 0:
        run.optimizer.step()
        run.optimizer.zero_grad()


def skips_in_the_epoch(run: Setting) -> None:
    for epoch in range(run.epoch, EPOCHS):
        counted = itertools.count(1)
        for batch in run.loader:
            if next(counted) <= (run.done if epoch == run.epoch else 0):
                continue
            step(run, batch)


def skips_all_batches_of_before(run: Setting) -> None:
    counted = itertools.count(1)
    for _ in range(run.epoch, EPOCHS):
        for batch in run.loader:
            if next(counted) <= run.step - len(run.trace):
                continue
            step(run, batch)


def skips_by_a_checkpoint_of_its_own(run: Setting) -> None:
    """That has another step than the snapshot."""
    for epoch in range(run.epoch, EPOCHS):
        counted = itertools.count(1)
        for batch in run.loader:
            if next(counted) <= (2 if run.step and not run.trace and epoch == run.epoch else 0):
                continue
            step(run, batch)


def without_first(loader: Any, count: int) -> Iterator[Any]:
    batches = iter(loader)
    for _ in range(count):
        next(batches, None)
    yield from batches


def drops_them_in_a_generator(run: Setting) -> None:
    for epoch in range(run.epoch, EPOCHS):
        for batch in without_first(run.loader, run.done if epoch == run.epoch else 0):
            step(run, batch)


def skips_and_accumulates(run: Setting) -> None:
    for epoch in range(run.epoch, EPOCHS):
        counted = itertools.count(1)
        for batch in run.loader:
            number = next(counted)
            if number > (run.done if epoch == run.epoch else 0):
                step(run, batch, 2, count=number)


def accumulates(run: Setting) -> None:
    for epoch in range(run.epoch, EPOCHS):
        for count, batch in enumerate(run.loader, 1 + (run.done if epoch == run.epoch else 0)):
            step(run, batch, 3, count=count)


def leaves_out_some_samples(run: Setting) -> None:
    for _ in range(run.epoch, EPOCHS):
        for batch in run.loader:
            if 5 in batch[2]:
                continue
            step(run, batch)


def evaluates_on_its_training_data(run: Setting) -> None:
    for _ in range(run.epoch, EPOCHS):
        for batch in run.loader:
            step(run, batch)
        for _ in run.loader:
            pass


def takes_one_batch_more_than_it_needs(run: Setting) -> None:
    for _ in range(run.epoch, EPOCHS):
        batches = iter(run.loader)
        for _ in range(2):
            next(batches)
            step(run, next(batches))


Loop = Callable[[Setting], None]


def said(loop: Loop, snapshot: Saved, root: Path, target: Path) -> tuple[list[str], list[str]]:
    """What the report says when the resumed loop makes its first step, and when it is over."""
    folder = only(root, snapshot, target)
    before = live(loop, resume_only(folder), folder)
    return before or [], [one.why for one in report(folder).not_restored]


def taken(loop: Loop, root: Path) -> list[Saved]:
    live(loop, every_boundary(root))
    return [one for one in saved(root) if one.reason != "end"]


def middle(loop: Loop, root: Path, batch: int) -> Saved:
    """The snapshot after so many batches of the second epoch."""
    return next(one for one in taken(loop, root) if (one.epoch, one.batch) == (1, batch))


def live(loop: Loop, options: Any, folder: Path | None = None) -> list[str] | None:
    run = Setting(options)
    run.loader = DataLoader(Augmented(), batch_size=BATCH, shuffle=True)
    run.optimizer = optimizer = Reads(run.model.parameters(), lr=0.01)
    optimizer.report = folder
    run.track()
    loop(run)
    run.end()
    return optimizer.said


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("loop", "counts"),
    [
        (
            skips_in_the_epoch,
            "3 batches of 'loader' before its first step after the resume, and never took more than 1",
        ),
        (drops_them_in_a_generator, "3 batches of 'loader' before its first step"),
        (skips_all_batches_of_before, "4 batches of 'loader' before its first step"),
    ],
)
def test_a_loop_that_skips_twice_fails_before_it_trains(loop: Loop, counts: str, tmp_path: Path) -> None:
    """The resumed pass is already after these batches: the report says what to leave out."""
    before, after = said(loop, middle(loop, tmp_path / "run", 2), tmp_path / "run", tmp_path / "again")
    assert before == after
    assert counts in " ".join(before)
    assert "leave out what skips batches" in " ".join(before)


def test_skipping_by_another_count_fails_too(tmp_path: Path) -> None:
    """Two batches more than any step took are no accident, in a short run either."""
    snapshot = middle(skips_by_a_checkpoint_of_its_own, tmp_path / "run", 3)
    before, _ = said(skips_by_a_checkpoint_of_its_own, snapshot, tmp_path / "run", tmp_path / "again")
    assert "3 batches of 'loader' before its first step after the resume, and never took more than 1" in " ".join(
        before
    )


def test_skipping_shows_beside_accumulation(tmp_path: Path) -> None:
    """As many batches as were trained on come on top of those that one step takes."""
    snapshot = middle(skips_and_accumulates, tmp_path / "run", 2)
    before, _ = said(skips_and_accumulates, snapshot, tmp_path / "run", tmp_path / "again")
    assert "4 batches of 'loader' before its first step after the resume, and never took more than 2" in " ".join(
        before
    )


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    "loop",
    [accumulates, leaves_out_some_samples, evaluates_on_its_training_data, takes_one_batch_more_than_it_needs],
)
def test_batches_without_a_step_that_the_saved_loop_had_too_are_no_fault(loop: Loop, tmp_path: Path) -> None:
    """Gradients that are summed, batches that are left out for what they are, and evaluations."""
    for snapshot in taken(loop, tmp_path / "run")[::4]:
        before, after = said(loop, snapshot, tmp_path / "run", tmp_path / str(snapshot.step))
        assert [one for one in (*before, *after) if "what skips" in one] == [], snapshot
