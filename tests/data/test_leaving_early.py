"""Trainers that leave an epoch before the loader ends (`limit_train_batches`) and start the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader

from ckpt_engine.data import rng
from ckpt_engine.data.exactness import Level
from ckpt_engine.data.position import attach
from tests.data.loader_kinds import KINDS, Augmented, Kind, shared
from tests.data.loop import Boundary, Run, recorded, seed_everything, train_step

NAMES = (
    "shuffled",
    "shuffled, 2 workers",
    "shuffled, 2 persistent workers",
    "generator=, 2 persistent workers",
    "own generators, 2 persistent workers",
    "draws at every index, 2 workers",
    "stateful stream, 2 workers",
    "replica 1 of 2, 2 persistent workers",
    "StatefulDataLoader, 2 persistent workers",
)
LONG = NAMES[4:8]
CHOSEN = [
    pytest.param(kind, id=str(kind), marks=pytest.mark.slow if str(kind) in LONG else ())
    for kind in KINDS
    if str(kind) in NAMES
]
EPOCHS, LIMIT = 3, 3


def train_limited(
    make: Callable[[], DataLoader[Any]], *, seed: int = 1, resume: Boundary | None = None, follow: bool = True
) -> Run:
    """Three batches per epoch, counted by the trainer, which never asks for a fourth; boundaries where it counts."""
    seed_everything(seed)
    loader = make()
    run = Run()
    position = attach(loader) if follow else None
    first = seen = done = 0
    if resume is not None:
        assert position is not None
        first, seen = resume.epoch, resume.seen
        run.restoration = position.load_state(resume.data, rng=resume.rng)
        done = 0 if resume.where == "over" else run.restoration.batches
    for epoch in range(first, EPOCHS):
        iterator = iter(loader)
        for number in range(done, LIMIT):
            run.batches.append((epoch, *recorded(next(iterator))))
            seen += 1
            train_step()
            if position is not None:
                over = number + 1 == LIMIT
                state = position.next_epoch_state() if over else position.state()
                where = "over" if over else "within"
                run.boundaries.append(Boundary(where, epoch + over, seen, state, rng.capture()))
        done = 0
    run.end = rng.capture()
    return run


@pytest.mark.cells(2)
@pytest.mark.parametrize("kind", CHOSEN)
def test_the_next_epoch_starts_as_it_would_have_here(kind: Kind) -> None:
    """A state of an epoch that was left early resumes into a fresh one; persistent workers that ran ahead included."""
    alone, reference = train_limited(kind.make, follow=False), train_limited(kind.make)
    assert reference.batches == alone.batches
    assert reference.end == alone.end
    for number, boundary in shared(kind, list(enumerate(reference.boundaries[:-1]))):
        if boundary.data["exactness"]["level"] != Level.EXACT:
            continue
        resumed = train_limited(kind.make, seed=50 + number, resume=boundary)
        assert resumed.batches == reference.after(boundary.seen), (number, boundary.where)
        assert resumed.end == reference.end, (number, boundary.where)


def levels_of(name: str) -> list[tuple[str, str]]:
    reference = train_limited(next(k for k in KINDS if str(k) == name).make)
    return [(b.where, b.data["exactness"]["level"]) for b in reference.boundaries[:6]]


def test_workers_that_ran_ahead_are_known_at_once() -> None:
    """What they have made when an epoch is left early is taken in, and tells where their streams are."""
    assert {level for _, level in levels_of("shuffled, 2 persistent workers")} == {str(Level.EXACT)}


def test_workers_of_a_stateful_loader_that_ran_ahead_are_reported_until_they_have_delivered() -> None:
    """Its iterators cannot be asked for that."""
    exact, order = str(Level.EXACT), str(Level.ORDER_ONLY)
    found = levels_of("StatefulDataLoader, 2 persistent workers")
    assert [level for _, level in found] == [exact, exact, exact, order, exact, exact]


class FailsLater(Augmented):
    """A sample that cannot be read is among those made ahead."""

    def __getitem__(self, index: int) -> Any:
        if 12 <= index < 16:
            raise ValueError("unreadable")
        return super().__getitem__(index)


def test_a_sample_that_raised_after_the_loop_left_ends_nothing() -> None:
    """Torch throws it away with the others that were made ahead; its worker's streams are unknown then."""
    loader = DataLoader(FailsLater(), batch_size=4, num_workers=2, persistent_workers=True)
    position = attach(loader)
    for _ in range(2):
        iterator = iter(loader)
        assert next(iterator)[0].tolist() == [0, 1, 2, 3]
    assert position.fetched == 1
    assert "persistent workers [1] were ahead" in position.state()["exactness"]["reasons"][0]
