"""A tracked loop goes on with another number of ranks: data, streams, weights, and what is said of it."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.data import rng
from ckpt_engine.errors import ResumeError
from tests.ranks.runs import SharedStore, ThreadRanks, on_all

SAMPLES = 48


class Rank:
    """One rank's loop, driven batch by batch in this process."""

    def __init__(self, root: Path, rank: int, size: int, store: SharedStore, options: dict[str, Any]) -> None:
        self.model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(self.model.weight, 0.5)
        torch.nn.init.constant_(self.model.bias, size / 10)
        optimizer = torch.optim.AdamW(self.model.parameters())
        data = TensorDataset(torch.arange(float(SAMPLES)).reshape(-1, 1))
        sampler: DistributedSampler[Any] = DistributedSampler(data, size, rank)
        loader = DataLoader(data, 2, sampler=sampler)
        ranks = ThreadRanks(rank, size, store) if size > 1 else None
        self.ckpt = Checkpointer(root, ranks=ranks, writer="thread", every_n_steps=2, keep={"last": 50}, **options)
        try:
            self.run = self.ckpt.track(model=self.model, optimizer=optimizer, loader=loader)
        except BaseException:
            self.ckpt.close()
            raise
        self._optimizer, self._batches = optimizer, iter(loader)
        self.start = self.weights()
        self._streams = rng.capture()
        self._seed = 100 * size + rank

    def weights(self) -> list[Any]:
        return [one.tolist() for one in self.model.state_dict().values()]

    def step(self) -> list[int] | None:
        """Train on one batch; its samples, or None after the last one. As if this process were of this rank only."""
        rng.restore(self._streams)
        try:
            return self._step()
        finally:
            self._streams = rng.capture()

    def seed(self) -> None:
        """As a script does when it starts."""
        torch.manual_seed(self._seed)
        self._streams = rng.capture()

    def boundary(self) -> None:
        """Where a loop that makes its batches itself says that one is done."""
        rng.restore(self._streams)
        self.run.step()

    def _step(self) -> list[int] | None:
        found = next(self._batches, None)
        if found is None:
            return None
        self.draw = torch.rand(()).item()
        self.model(found[0] / SAMPLES).sum().backward()
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)  # what an all-reduce would make the same on all ranks
        self._optimizer.step()
        self._optimizer.zero_grad()
        return [int(x) for x in found[0]]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Life:
    """All ranks of one life of the run."""

    def __init__(self, root: Path, size: int, **options: Any) -> None:
        store = SharedStore()
        self.seen: Counter[int] = Counter()
        self.ranks = on_all(lambda rank: Rank(root, rank, size, store, options), size)
        for rank in self.ranks:
            rank.seed()
            self.seen.update(rank.step() or ())  # streams are put back right before it
        self.draws = [rank.draw for rank in self.ranks]

    def steps(self, count: int | None) -> None:
        """So many steps; None: to the end of the epoch."""
        while count is None or count > 0:
            found = [rank.step() for rank in self.ranks]
            if None in found:
                assert found == [None] * len(found)
                return
            for samples in found:
                self.seen.update(samples or ())
            count = None if count is None else count - 1
            until(lambda: all(rank.ckpt.engine.ready() for rank in self.ranks))

    def end(self) -> list[Any]:
        """A boundary, and with it the last snapshot if one is due there; what it has of weights."""
        until(lambda: all(rank.ckpt.engine.ready() for rank in self.ranks))
        for rank in self.ranks:
            rank.boundary()
        for rank in self.ranks:
            rank.run.release()
        for rank in self.ranks:
            rank.ckpt.close()
        return self.ranks[0].weights()


@pytest.mark.long
def test_each_sample_comes_once_and_the_weights_are_those_that_were_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """2 -> 1 -> 4 -> 2, with each number in the same epoch."""
    caplog.set_level(logging.INFO)
    root, seen, steps, weights = tmp_path / "run", Counter[int](), 0, None
    for size, more in ((2, 4), (1, 6), (4, 2), (2, None)):
        life = Life(root, size)
        assert weights is None or [rank.start for rank in life.ranks] == [weights] * size
        assert life.ranks[0].run.resumed_batches == steps
        life.steps(None if more is None else more - 1)
        weights, steps, seen = life.end(), steps + (more or 0), seen + life.seen
    assert seen == Counter(range(SAMPLES))
    report = json.loads((root / "resume-report.json").read_text())
    assert report["notes"][1:] == [
        "another number of ranks: 4 before, 2 now",
        "44 samples of the epoch were seen, the other 4 come once; batches for each rank: 1",
        "rng: derive: rank 0 has its random streams, those of other ranks are made from them",
    ]
    assert not report["not_restored"]
    assert caplog.text.count("another number of ranks: 4 before, 2 now") == 1


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A run that two ranks have left after four steps."""
    life = Life(tmp_path / "run", 2)
    life.steps(3)
    life.end()
    return tmp_path / "run"


def draws(root: Path, size: int, **options: Any) -> list[float]:
    """What each rank draws first after the resume; takes no snapshot."""
    life = Life(root, size, **options)
    for rank in life.ranks:
        rank.run.release()
    for rank in life.ranks:
        rank.ckpt.close()
    return life.draws


def test_streams_are_derived_by_default(two: Path) -> None:
    """Rank 0 has the stream of rank 0, every other rank one of its own, and the same ones at every resume."""
    root = two
    saved = draws(root, 2)
    first, again = draws(root, 4), draws(root, 4, rng="derive")
    assert first == again
    assert len(set(first)) == 4
    assert first[0] == saved[0]
    assert saved[1] not in first
    assert draws(root, 1) == saved[:1]


def test_streams_of_saved_ranks_come_again_where_the_user_wants_that(
    two: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank r goes on with those of rank r mod 2; one warning says so."""
    root = two
    saved = draws(root, 2)
    caplog.clear()
    assert draws(root, 4, rng="warn") == saved + saved
    (problem,) = json.loads((root / "resume-report.json").read_text())["not_restored"]
    assert (
        problem["why"] == "rng: warn: each rank has those of saved rank r mod 2; with more than 2 several draw the same"
    )
    assert len([one for one in caplog.records if problem["why"] in one.getMessage()]) == 1


def test_another_number_is_refused_where_the_user_wants_that(two: Path) -> None:
    """The error names both numbers; the same number of ranks goes on."""
    root = two
    for size in (1, 4):
        with pytest.raises(ResumeError, match=f"2 ranks took snapshot .*, and this run has {size}"):
            Life(root, size, rng="strict")
    assert len(draws(root, 2, rng="strict")) == 2
