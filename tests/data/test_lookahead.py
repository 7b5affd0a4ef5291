"""Positions of loaders whose consumer keeps batches that are fetched but not trained yet (Accelerate, Lightning)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from ckpt_engine.data import rng
from ckpt_engine.data.position import LoaderPosition, attach
from ckpt_engine.errors import StateError
from tests.data.loader_kinds import KINDS, Augmented, Kind, shared
from tests.data.loop import EPOCHS, Boundary, Run, recorded, seed_everything, train_step

NAMES = (
    "shuffled",
    "shuffled, 2 workers",
    "shuffled, 2 persistent workers",
    "generator=",
    "draws at every index, 2 workers",
    "own generators",
    "stateful dataset",
    "stateful stream",
    "stateful stream, 2 workers",
    "stream, 2 workers",
    "quiet stream",
)
CHOSEN = [pytest.param(kind, id=str(kind)) for kind in KINDS if str(kind) in NAMES]


def ahead(loader: DataLoader[Any], batches: int) -> Iterator[Any]:
    """Fetch `batches` batches ahead of the one that is given, as `accelerate.data_loader.DataLoaderShard` does."""
    iterator = iter(loader)
    waiting: list[Any] = []
    for batch in iterator:
        waiting.append(batch)
        if len(waiting) > batches:
            yield waiting.pop(0)
    yield from waiting


def train_ahead(
    make: Callable[[], DataLoader[Any]],
    *,
    lookahead: int,
    seed: int = 1,
    resume: Boundary | None = None,
    follow: bool = True,
) -> Run:
    """The loop of `tests.data.loop`, its batches fetched ahead; boundaries are right before a batch is asked for."""
    seed_everything(seed)
    loader = make()
    run = Run()
    position: LoaderPosition | None = attach(loader, lookahead=lookahead) if follow else None
    first = seen = trained = 0
    if resume is not None:
        assert position is not None
        first, seen, trained = resume.epoch, resume.seen, resume.data["batches"]
        run.restoration = position.load_state(resume.data, rng=resume.rng)
        if resume.data["phase"] == "fresh":
            first, trained = first + (resume.where != "0"), 0
        if first == EPOCHS:
            rng.restore(resume.rng)
    for epoch in range(first, EPOCHS):
        batches = ahead(loader, lookahead)
        while True:
            if position is not None and not (resume is not None and not run.batches and seen == resume.seen):
                run.boundaries.append(Boundary(str(trained), epoch, seen, position.state(trained), rng.capture()))
            batch = next(batches, None)
            if batch is None:
                break
            run.batches.append((epoch, *recorded(batch)))
            seen, trained = seen + 1, trained + 1
            train_step()
        trained = 0
    run.end = rng.capture()
    return run


@pytest.mark.cells(3)
@pytest.mark.parametrize("kind", CHOSEN)
def test_one_batch_in_advance_is_fetched_again(kind: Kind) -> None:
    """At every boundary of an epoch one batch is fetched and not trained; it comes again, bitwise."""
    alone = train_ahead(kind.make, lookahead=1, follow=False)
    reference = train_ahead(kind.make, lookahead=1)
    assert reference.batches == alone.batches
    assert reference.end == alone.end
    assert [len(b.data.get("held", ())) for b in reference.boundaries[1:4]] == [1, 1, 1]
    middle = len(reference.boundaries) // 2
    for number in shared(kind, (1, middle - 2, middle - 1, middle + 2)):
        boundary = reference.boundaries[number]
        resumed = train_ahead(kind.make, lookahead=1, seed=50 + number, resume=boundary)
        assert resumed.batches == reference.after(boundary.seen), number
        assert resumed.end == reference.end, number
        again = next(b for b in resumed.boundaries if b.seen > boundary.seen)
        once_more = train_ahead(kind.make, lookahead=1, seed=90 + number, resume=again)
        assert once_more.batches == reference.after(again.seen), number
        assert once_more.end == reference.end, number


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [1, 2, 3])
@pytest.mark.parametrize("kind", [pytest.param(kind, id=str(kind)) for kind in KINDS])
def test_batches_in_advance_are_fetched_again_from_every_boundary(kind: Kind, lookahead: int) -> None:
    """Every kind of loader, every boundary, up to three batches that are fetched in advance."""
    reference = train_ahead(kind.make, lookahead=lookahead)
    for number, boundary in enumerate(reference.boundaries):
        resumed = train_ahead(kind.make, lookahead=lookahead, seed=50 + number, resume=boundary)
        assert resumed.batches == reference.after(boundary.seen), number
        assert resumed.end == reference.end, number


@pytest.mark.parametrize("kind", [kind for kind in CHOSEN if "worker" not in str(kind.id)])
def test_batches_that_are_held_when_a_loader_has_no_more_come_again(kind: Any) -> None:
    """A consumer that keeps two learns of the end while it still has two: these are of the epoch that goes on."""
    reference = train_ahead(kind.make, lookahead=2)
    held = [b for b in reference.boundaries if b.epoch == 0 and b.data.get("exhausted") and b.data["held"]]
    assert held
    for number, boundary in enumerate(held):
        resumed = train_ahead(kind.make, lookahead=2, seed=50 + number, resume=boundary)
        assert resumed.batches == reference.after(boundary.seen)
        assert resumed.end == reference.end


def test_fetching_a_held_batch_again_leaves_the_streams_alone() -> None:
    """Its draws are in the past: a caller that restores the streams itself may do so before or after."""
    kind = next(k for k in KINDS if str(k) == "shuffled")
    reference = train_ahead(kind.make, lookahead=1)
    boundary = reference.boundaries[3]
    seed_everything(4)
    loader = kind.make()
    attach(loader, lookahead=1).load_state(boundary.data)
    iterator = iter(loader)
    before = rng.capture()
    assert (boundary.epoch, *recorded(next(iterator))) == reference.batches[boundary.seen]
    assert rng.capture() == before
    rng.restore(boundary.rng)
    assert (boundary.epoch, *recorded(next(iterator))) == reference.batches[boundary.seen + 1]


def test_a_position_further_back_than_the_lookahead_is_refused() -> None:
    """It is not remembered, and the message says what to do."""
    loader: DataLoader[Any] = DataLoader(Augmented(), batch_size=4)
    position = attach(loader, lookahead=1)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    assert position.state(3)["batches"] == position.state()["batches"] == 3
    for consumed in (1, 5):
        with pytest.raises(StateError, match="lookahead"):
            position.state(consumed)
