"""What a resume says about a loader that is not quite, or not at all, the one that was saved."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from ckpt_engine.data.exactness import Effect, Exactness, Level
from ckpt_engine.data.position import attach
from ckpt_engine.errors import MismatchError, NewerFormatError, StateError
from tests.data.loader_kinds import Augmented, DrawsAtEveryIndex, EagerPermutation, QuietStream, ShuffledStream, Stream
from tests.data.loop import seed_everything


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented() if dataset is None else dataset, **{"batch_size": 4, **options})


def state_after(batches: int, followed: DataLoader[Any]) -> dict[str, Any]:
    seed_everything(1)
    position = attach(followed)
    iterator = iter(followed)
    for _ in range(batches):
        next(iterator)
        np.random.rand()
    return position.state()


def indices_of(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


def test_the_same_loader_has_no_differences() -> None:
    """The position of the same loader is exact."""
    again = loader(shuffle=True)
    found = attach(again).load_state(state_after(2, loader(shuffle=True)))
    assert found.differences == ()
    assert found.exactness == Exactness(Level.EXACT)
    assert (found.mode, found.phase, found.batches) == ("skip", "within", 2)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("22 samples then, 23 now", lambda: loader(Augmented(23), shuffle=True)),
        ("batch_size", lambda: loader(shuffle=True, batch_size=2)),
        ("samplers", lambda: loader()),
        ("drop_last", lambda: loader(shuffle=True, drop_last=True)),
        ("dataset_kind", lambda: loader(QuietStream())),
    ],
)
def test_another_data_order_is_refused_naming_the_field(name: str, other: Any) -> None:
    """The message lists what differs and what to do; the loader then still starts by itself."""
    state = state_after(2, loader(shuffle=True))
    different = other()
    position = attach(different)
    with pytest.raises(MismatchError, match=name) as caught:
        position.load_state(state)
    assert caught.value.hint is not None
    assert ("Checkpointer.snapshots()[-1].epoch tells" in caught.value.hint) is ("samples then" in name)
    assert position.restoration is None
    assert position.fetched == 0
    assert next(iter(different)) is not None


def test_another_number_of_replicas_or_rank_is_refused() -> None:
    """Each replica has its own part of the data."""

    def replica(rank: int, of: int) -> DataLoader[Any]:
        dataset = Augmented(24)
        return loader(dataset, sampler=DistributedSampler(dataset, num_replicas=of, rank=rank))

    state = state_after(1, replica(0, 2))
    other_rank, other_count = replica(1, 2), replica(0, 3)
    with pytest.raises(MismatchError, match="rank was 0, now 1"):
        attach(other_rank).load_state(state)
    with pytest.raises(MismatchError, match="num_replicas was 2, now 3"):
        attach(other_count).load_state(state)


def test_a_prefetch_factor_may_change() -> None:
    """It is named, and the resume is exact all the same."""
    reference = loader(shuffle=True, num_workers=2)
    state = state_after(2, reference)
    seed_everything(1)
    expected = [[batch[0].tolist(), batch[1].tolist()] for batch in reference][2:]
    other = loader(shuffle=True, num_workers=2, prefetch_factor=5)
    found = attach(other).load_state(state)
    assert [(d.field, d.effect) for d in found.differences] == [("prefetch_factor", Effect.HARMLESS)]
    assert found.exactness.level is Level.EXACT
    assert [[batch[0].tolist(), batch[1].tolist()] for batch in other] == expected


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2), (2, 1)])
def test_another_number_of_workers_keeps_the_order(before: int, after: int) -> None:
    """Samples come in the saved order; what workers draw cannot be the same, and the report says so."""
    reference = loader(shuffle=True, num_workers=before)
    state = state_after(3, reference)
    seed_everything(1)
    expected = indices_of(reference)[3:]
    other = loader(shuffle=True, num_workers=after)
    position = attach(other)
    found = position.load_state(state)
    assert found.exactness.level is Level.ORDER_ONLY
    assert f"num_workers was {before}, now {after}" in found.exactness.reasons[0]
    seed_everything(9)
    assert indices_of(other) == expected
    assert position.restoration is not None
    assert position.restoration.exactness.level is Level.ORDER_ONLY


def test_another_number_of_workers_is_refused_for_an_iterable_dataset() -> None:
    """Workers share it out among themselves: the order would be another."""
    state = state_after(2, loader(Stream(), num_workers=2))
    again = loader(Stream(), num_workers=1)
    with pytest.raises(MismatchError, match="num_workers"):
        attach(again).load_state(state)


def test_a_later_version_is_refused() -> None:
    """A state from the future is not guessed at."""
    state = state_after(1, loader())
    again = loader()
    with pytest.raises(NewerFormatError, match="version 99"):
        attach(again).load_state({**state, "version": 99})


class Unrepeatable(EagerPermutation):
    """Shuffles with a generator whose state cannot be read."""

    def __iter__(self) -> Iterator[int]:
        indices = list(range(self.samples))
        random.SystemRandom().shuffle(indices)
        return iter(indices)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_gives_other_indices_is_found_out(workers: int) -> None:
    """The replayed order is compared with the saved one, so an order that is not repeated is never called exact."""
    state = state_after(4, loader(sampler=Unrepeatable(), num_workers=workers))
    position = attach(again := loader(sampler=Unrepeatable(), num_workers=workers))
    assert position.load_state(state).exactness.level is Level.EXACT
    next(iter(again))
    assert position.restoration is not None
    assert position.restoration.exactness.level is Level.NOT_RESTORED
    assert "other indices" in position.restoration.exactness.reasons[0]


def test_a_sampler_that_ends_too_early_is_a_mismatch() -> None:
    """It cannot be the sampler of the saved run."""

    class Shrinking(SequentialSampler):
        samples = 22

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.samples))

    state = state_after(4, loader(sampler=Shrinking(Augmented())))
    Shrinking.samples = 5
    position = attach(again := loader(sampler=Shrinking(Augmented())))
    position.load_state(state)
    with pytest.raises(MismatchError, match="only 2 of 4 batches"):
        next(iter(again))


def test_a_dataset_that_ends_too_early_is_a_mismatch() -> None:
    """A stream without state is fetched again, and must still have the samples that were trained."""
    state = state_after(4, loader(QuietStream()))
    position = attach(again := loader(QuietStream(9)))
    position.load_state(state)
    with pytest.raises(MismatchError, match="ended after 3 of 4 batches"):
        next(iter(again))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_reasons_for_less_than_exact_are_given_with_the_state() -> None:
    """Known limits are said when the snapshot is taken, not discovered after the crash."""
    unordered = state_after(2, loader(num_workers=2, in_order=False))["exactness"]
    assert unordered["level"] == "not restored"
    assert "in_order=False" in unordered["reasons"][0]
    drawing = state_after(2, loader(ShuffledStream()))["exactness"]
    assert drawing["level"] == "order only"
    assert "shuffle buffer" in drawing["reasons"][0]
    kept = loader(Stream(), num_workers=2, persistent_workers=True)
    assert state_after(2, kept)["exactness"] == {"level": "exact", "reasons": []}
    list(kept)
    second = state_after(2, kept)["exactness"]
    assert second["level"] == "not restored"
    assert "persistent workers" in second["reasons"][0]


def test_persistent_workers_that_were_there_before_us_are_said_to_be_unknown() -> None:
    """The order is recorded from the next epoch on, their streams are not."""
    reference = loader(shuffle=True, num_workers=2, persistent_workers=True)
    list(reference)
    state = state_after(2, reference)
    assert state["exactness"]["level"] == "order only"
    assert "attached after the persistent workers were started" in state["exactness"]["reasons"][0]
    seed_everything(1)
    expected = indices_of(reference)[2:]
    again = loader(shuffle=True, num_workers=2, persistent_workers=True)
    attach(again).load_state(state)
    assert indices_of(again) == expected


def test_a_lazily_drawing_sampler_is_exact_but_unverified() -> None:
    """Its past cannot be drawn again, which the report says; what follows is right all the same."""
    reference = loader(sampler=DrawsAtEveryIndex(), num_workers=2, batch_size=2)
    state = state_after(6, reference)
    assert len(state["order"]["outstanding"]) == 4
    again = loader(sampler=DrawsAtEveryIndex(), num_workers=2, batch_size=2)
    position = attach(again)
    position.load_state(state)
    next(iter(again))
    assert position.restoration is not None
    assert position.restoration.exactness.level is Level.ORDER_ONLY
    assert "cannot be verified" in position.restoration.exactness.reasons[0]


class Failing(Augmented):
    """One sample cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 9:
            raise ValueError("unreadable")
        return index, torch.zeros(1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_raised_is_not_counted_and_not_repeated(workers: int) -> None:
    """A trainer that goes on after a bad batch resumes behind it."""
    reference = loader(Failing(), num_workers=workers)
    position = attach(reference)
    iterator = iter(reference)
    for _ in range(2):
        next(iterator)
    with pytest.raises(ValueError, match="unreadable"):
        next(iterator)
    assert next(iterator)[0].tolist() == [12, 13, 14, 15]
    state = position.state()
    assert (state["batches"], state["lost"]) == (3, 1)
    assert "raised while being fetched" in state["exactness"]["reasons"][0]
    again = loader(Failing(), num_workers=workers)
    attach(again).load_state(state)
    assert indices_of(again) == [[16, 17, 18, 19], [20, 21]]


def test_asking_a_position_for_more_than_was_fetched_is_an_error() -> None:
    """The caller's count and ours must agree."""
    position = attach(followed := loader())
    next(iter(followed))
    with pytest.raises(StateError, match="batch 2"):
        position.state(2)
