"""Samplers with a state of their own go on from it; samplers that change with training and have none are named."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from ckpt_engine.data import rng
from ckpt_engine.data.exactness import Level
from ckpt_engine.data.position import attach
from tests.data.loader_kinds import BATCH, SAMPLES, Augmented
from tests.data.loop import recorded, seed_everything, train_step
from tests.data.test_lookahead import ahead

EPOCHS = 3


class Unseeded(Sampler[int]):
    """Shuffles with randomness of the machine; only its state tells the order and the place in it."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.at = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        if not 0 < self.at < len(self.order):
            self.order, self.at = random.SystemRandom().sample(range(SAMPLES), SAMPLES), 0
        while self.at < len(self.order):
            self.at += 1
            yield self.order[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = list(state["order"]), state["at"]


class Weighted(Sampler[int]):
    """Draws by weights that training moves."""

    def __init__(self) -> None:
        self.weights = torch.ones(SAMPLES, dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def learn(self, samples: list[int]) -> None:
        for sample in samples:
            self.weights[sample] += sample + 1

    def __iter__(self) -> Iterator[int]:
        return iter(torch.multinomial(self.weights, SAMPLES, replacement=True).tolist())


class SavedWeights(Weighted):
    """The same, and can save itself."""

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"].clone()


class LazyWeights(SavedWeights):
    """Each index is drawn when it is asked for."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield int(torch.multinomial(self.weights, 1).item())


class OwnWeights(SavedWeights):
    """Each index is drawn by weights that the draws before it have moved."""

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            self.weights[index] += 1
            yield index


class Remade(Sampler[int]):
    """Keeps the order of the running epoch in an attribute."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.order = torch.randperm(SAMPLES).tolist()
        return iter(self.order)


def distributed() -> Any:
    return StatefulDistributedSampler(Augmented(), num_replicas=2, rank=1, shuffle=True, seed=3)


def run(
    make: Callable[[], Any],
    seed: int,
    resume: tuple[int, int, Any, Any] | None = None,
    *,
    lookahead: int = 0,
    **options: Any,
) -> Any:
    """Three epochs; what was seen, and (epoch, batches, position, streams) at each boundary and between epochs."""
    seed_everything(seed)
    sampler = make()
    loader: DataLoader[Any] = DataLoader(Augmented(), batch_size=BATCH, sampler=sampler, **options)
    position = attach(loader, lookahead=lookahead)
    seen: list[Any] = []
    boundaries: list[tuple[int, int, Any, Any]] = []
    first = 0
    if resume is not None:
        first, _, state, streams = resume
        position.load_state(state, rng=streams)
    for epoch in range(first, EPOCHS):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        for batch in ahead(loader, lookahead):
            seen.append((epoch, *recorded(batch)))
            if isinstance(sampler, Weighted):
                sampler.learn(batch[0].tolist())
            train_step()
            boundaries.append((epoch, position.fetched, position.state(), rng.capture()))
        boundaries.append((epoch + 1, 0, position.state(), rng.capture()))
    return seen, boundaries, position


@pytest.mark.cells(4)
@pytest.mark.parametrize(("workers", "lookahead"), [(0, 0), (0, 1), pytest.param(2, 0, marks=pytest.mark.slow), (2, 1)])
@pytest.mark.parametrize("make", [SavedWeights, LazyWeights, Remade, distributed, OwnWeights])
def test_a_sampler_goes_on_three_generations_deep(make: Callable[[], Any], workers: int, lookahead: int) -> None:
    """In the middle of an epoch and between two, under other seeds, in resumed runs of resumed runs.

    Also where the consumer holds a batch, as Accelerate does: the sampler has drawn it, and draws it once.
    With workers, which fetch ahead from the same sampler, in the middle and between are two generations.
    """
    options = {"num_workers": workers, "lookahead": lookahead}
    reference, boundaries, _ = run(make, 1, **options)
    for generation, between in enumerate((False, True) if workers else (False, False, True)):
        places = [one for one in boundaries if one[2]["phase"] != "ended" and (one[1] == 0) == between]
        boundary = places[0 if between else 1]
        seen, boundaries, position = run(make, 50 + generation, boundary, **options)
        assert seen == reference[len(reference) - len(seen) :], (generation, boundary[:2])
        level = Level.ORDER_ONLY if make is LazyWeights else Level.EXACT
        assert position.restoration.exactness.level in (Level.EXACT, level), position.restoration


@pytest.mark.cells(1)
@pytest.mark.parametrize(("workers", "lookahead"), [(0, 0), (0, 1), pytest.param(2, 0, marks=pytest.mark.slow), (2, 1)])
def test_a_sampler_that_nothing_but_its_state_repeats_goes_on_by_that(workers: int, lookahead: int) -> None:
    """Its epoch goes on in the order that it had, each sample once; the next epochs are whole."""
    options = {"num_workers": workers, "lookahead": lookahead}
    reference, boundaries, _ = run(Unseeded, 1, **options)
    first = [one for one in reference if one[0] == 0]
    for generation in range(2):
        seen, boundaries, position = run(Unseeded, 60 + generation, boundaries[1], **options)
        rest = [one for one in seen if one[0] == 0]
        assert rest == first[len(first) - len(rest) :]
        assert len(rest) == len(first) - 2 * (generation + 1)
        assert [sum(one[0] == epoch for one in seen) for epoch in (1, 2)] == [len(first)] * 2
        assert position.restoration.exactness.level is Level.EXACT


@pytest.mark.parametrize("between", [False, True])
def test_a_sampler_that_learns_and_cannot_save_itself_is_named(between: bool) -> None:
    """With the attribute that training has changed, and what would make it exact."""
    _, boundaries, _ = run(Weighted, 1)
    boundary = next(one for one in boundaries if (one[1] == 0) == between)
    loader: DataLoader[Any] = DataLoader(Augmented(), batch_size=BATCH, sampler=Weighted())
    position = attach(loader)
    position.load_state(boundary[2], rng=boundary[3])
    next(iter(loader))
    assert position.restoration is not None
    assert position.restoration.exactness.level is Level.NOT_RESTORED
    (why,) = position.restoration.exactness.reasons
    assert "training has changed Weighted.weights" in why
    assert "state_dict() and load_state_dict()" in why


def test_what_a_sampler_makes_at_each_start_is_not_taken_for_learned() -> None:
    """The order of the last epoch, kept in an attribute, says nothing about the next."""
    _, boundaries, _ = run(Remade, 1)
    boundary = next(one for one in boundaries if one[1] == 0)
    loader: DataLoader[Any] = DataLoader(Augmented(), batch_size=BATCH, sampler=Remade())
    position = attach(loader)
    assert position.load_state(boundary[2]).exactness.level is Level.EXACT
