"""Other numbers of ranks go on in the middle of an epoch: each sample of it comes once, and the next epoch is whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from ckpt_engine.data import rng
from ckpt_engine.data.position import attach
from ckpt_engine.errors import MismatchError, NewerFormatError, ResumeError

Make = Callable[[int, int, int, int], DataLoader[Any]]
"""Of samples, batch size, rank, size."""


def distributed(count: int, batch: int, rank: int, size: int, *, shuffle: bool = True, **more: Any) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(range(count), size, rank, shuffle=shuffle, seed=3, **more)  # type: ignore[arg-type]
    return DataLoader(range(count), batch, sampler=sampler)  # type: ignore[arg-type]


def in_order(count: int, batch: int, rank: int, size: int) -> DataLoader[Any]:
    return distributed(count, batch, rank, size, shuffle=False)


def lightning(count: int, batch: int, rank: int, size: int) -> DataLoader[Any]:
    """One process has no `DistributedSampler`."""
    if size == 1:
        return DataLoader(range(count), batch, shuffle=True)  # type: ignore[arg-type]
    return distributed(count, batch, rank, size)


def accelerate(count: int, batch: int, rank: int, size: int, *, split: bool = False, seedable: bool = False) -> Any:
    """As `Accelerator.prepare` makes it."""
    source: Any = range(count)
    sampler: Any = RandomSampler(source)
    if seedable:
        sampler = SeedableRandomSampler(source, data_seed=11)  # type: ignore[no-untyped-call]
    elif size > 1:
        sampler = RandomSampler(source, generator=torch.Generator().manual_seed(5))
    batches: Any = BatchSampler(sampler, batch * (size if split else 1), drop_last=False)
    if size > 1:
        batches = BatchSamplerShard(batches, size, rank, split_batches=split)
    return DataLoader(source, batch_sampler=batches)


def accelerate_split(count: int, batch: int, rank: int, size: int) -> Any:
    return accelerate(count, batch, rank, size, split=True)


def accelerate_seedable(count: int, batch: int, rank: int, size: int) -> Any:
    return accelerate(count, batch, rank, size, seedable=True)


def unbatched(count: int, batch: int, rank: int, size: int) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(range(count), size, rank, seed=1)  # type: ignore[arg-type]
    return DataLoader(range(count), None, sampler=sampler)  # type: ignore[arg-type]


KINDS: list[Make] = [distributed, in_order, lightning, accelerate, accelerate_split, accelerate_seedable, unbatched]


COMMON = rng.capture()


class Fleet:
    """The loaders of all ranks, in this process."""

    def __init__(self, make: Make, count: int, batch: int, size: int) -> None:
        torch.manual_seed(size)
        self.size = size
        self.loaders = [make(count, batch, rank, size) for rank in range(size)]
        self.positions = [attach(loader) for loader in self.loaders]
        self.streams = rng.capture()

    def resume(self, states: Sequence[Any]) -> None:
        for rank, position in enumerate(self.positions):
            saved = position.for_another_number(states, rank, self.size, self.streams, COMMON)
            position.load_state(saved, rng=self.streams)

    def take(self, batches: int | None) -> tuple[list[list[int]], list[Any]]:
        """What each rank gets, and their positions then; all that is left for None."""
        found, states = [], []
        for loader, position in zip(self.loaders, self.positions, strict=True):
            rng.restore(self.streams)
            iterator, given = iter(loader), []
            while batches is None or len(given) < batches:
                batch = next(iterator, None)
                if batch is None:
                    break
                ids = batch[0] if isinstance(batch, list) else batch
                given.append(torch.as_tensor(ids).reshape(-1).tolist())
            found.append(given)
            states.append(position.state())
        assert len({len(given) for given in found}) == 1, "the ranks have different numbers of batches"
        return [[sample for batch in given for sample in batch] for given in found], states


def surplus(seen: Counter[int], count: int) -> int:
    """How often samples came again; none may be missing."""
    assert set(seen) == set(range(count))
    return sum(seen.values()) - count


@pytest.mark.cells(2)
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@settings(max_examples=settings.default.max_examples // 8)
@given(
    st.integers(9, 70),
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(1, 4)), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4]),
)
def test_every_sample_comes_once(
    make: Make, count: int, batch: int, lives: list[tuple[int, int]], last_size: int
) -> None:
    """Over any generations of ranks: only the padding of the last step comes twice, and the next epoch is as ever."""
    seen: Counter[int] = Counter()
    states: list[Any] = []
    taken = 0
    for size, batches in lives:
        if taken + batches * size * batch >= count:
            break
        fleet = Fleet(make, count, batch, size)
        if states and size != len(states):
            fleet.resume(states)
        elif states:
            for position, state in zip(fleet.positions, states, strict=True):
                position.load_state(state, rng=fleet.streams)
        if make is unbatched:
            batches *= batch
        found, states = fleet.take(batches)
        seen.update(sample for given in found for sample in given)
        taken = sum(seen.values())
    fleet = Fleet(make, count, batch, last_size)
    if states and last_size != len(states):
        fleet.resume(states)
    elif states:
        for position, state in zip(fleet.positions, states, strict=True):
            position.load_state(state, rng=fleet.streams)
    found, _ = fleet.take(None)
    seen.update(sample for given in found for sample in given)
    padding = batch * last_size if make in (accelerate, accelerate_split, accelerate_seedable) else last_size
    assert surplus(seen, count) < padding
    if make is not lightning or last_size == 1:
        assert surplus(Counter(s for given in fleet.take(None)[0] for s in given), count) < padding


def two(make: Make, batches: int = 3, count: int = 64) -> list[Any]:
    return Fleet(make, count, 4, 2).take(batches)[1]


def test_a_state_says_how_many_batches_the_epoch_has_and_where_it_ends() -> None:
    """Before the first batch, in the middle and after the last: as a trainer counts."""
    fleet = Fleet(distributed, 64, 4, 1)
    fleet.resume(two(distributed))
    (position,) = fleet.positions
    dealt = position.dealt
    assert dealt is not None
    assert dealt[1] == 3 + (64 - 24) // 4
    assert position.fetched == 3
    _, (state,) = fleet.take(9)
    assert (state["phase"], state["batches"]) == ("within", 12)
    other = Fleet(distributed, 64, 4, 1)
    other.positions[0].load_state(state, rng=other.streams)
    _, (state,) = other.take(1)
    assert (state["phase"], state["batches"]) == ("ended", 13)
    _, (state,) = other.take(2)
    assert other.positions[0].dealt is None, "the next epoch is an ordinary one"
    assert (state["phase"], state["batches"]) == ("within", 2)


def test_between_two_epochs_nothing_is_divided() -> None:
    """Counters and generators of the samplers go on under the paths that they have now."""
    fleet = Fleet(accelerate, 64, 4, 2)
    fleet.take(None)
    states = [position.next_epoch_state() for position in fleet.positions]
    expected = [sample for given in fleet.take(None)[0] for sample in given]
    one = Fleet(accelerate, 64, 4, 1)
    one.resume(states)
    assert one.positions[0].dealt is None
    found = [sample for given in one.take(None)[0] for sample in given]
    assert sorted(found) == sorted(expected) == list(range(64))
    first, second = expected[:32], expected[32:]
    assert found == [s for at in range(0, 32, 4) for s in first[at : at + 4] + second[at : at + 4]], "another shuffle"


@pytest.mark.parametrize("make", [lightning, accelerate], ids=lambda make: make.__name__)
def test_the_seed_of_the_script_does_not_matter(make: Make) -> None:
    """A sampler that takes the place of one without a seed shuffles all following epochs alike at every resume."""
    _, states = Fleet(make, 64, 4, 1).take(5)
    found = []
    for seed in range(2):
        fleet = Fleet(make, 64, 4, 2)
        for loader in fleet.loaders:
            if isinstance(loader.sampler, DistributedSampler):
                loader.sampler.seed = seed
            else:
                loader.batch_sampler.batch_sampler.sampler.generator.manual_seed(seed)  # type: ignore[union-attr]
        fleet.resume(states)
        found.append((fleet.take(None)[0], fleet.take(None)[0]))
    assert found[0] == found[1]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(64))


def weighted(count: int, batch: int, rank: int, size: int) -> DataLoader[Any]:
    return DataLoader(range(count), batch, sampler=WeightedRandomSampler([1.0] * count, count))  # type: ignore[arg-type]


def stream(count: int, batch: int, rank: int, size: int) -> DataLoader[Any]:
    return DataLoader(Stream(), batch)


def each_its_own(count: int, batch: int, rank: int, size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(rank)
    return DataLoader(range(count), batch, sampler=RandomSampler(range(count), generator=generator))  # type: ignore[arg-type]


def some_divide(count: int, batch: int, rank: int, size: int) -> DataLoader[Any]:
    return in_order(count, batch, *((rank, size) if rank else (0, 1)))


def pairs(count: int, batch: int, rank: int, size: int) -> DataLoader[Any]:
    """Two ranks at a time share a model, and have the same samples."""
    return distributed(count, batch, rank // 2, -(-size // 2))


def test_ranks_that_share_a_model_have_the_same_samples() -> None:
    """The loader divides by less than the number of ranks."""
    before, states = Fleet(pairs, 64, 4, 4).take(3)
    fleet = Fleet(pairs, 64, 4, 2)
    fleet.resume(states)
    (first, second), states = fleet.take(2)
    assert first == second
    last = Fleet(pairs, 64, 4, 4)
    last.resume(states)
    a, b, c, d = last.take(None)[0]
    assert (a, c) == (b, d)
    assert sorted(before[0] + before[2] + first + a + c) == list(range(64))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (weighted, "WeightedRandomSampler orders"),
        (stream, "Stream, is iterable"),
        (each_its_own, "shuffled it in different ways"),
        (some_divide, "did not divide its samples in one way"),
    ],
)
def test_what_cannot_be_divided_is_refused(make: Make, why: str) -> None:
    """The message says why, and how to go on."""
    states = two(make)
    with pytest.raises(ResumeError, match=why) as caught:
        Fleet(make, 64, 4, 4).resume(states)
    assert "resume with 2 ranks to the end of the epoch" in str(caught.value.hint)


def test_another_dataset_is_refused() -> None:
    """The loader of this run must have the same samples."""
    states = two(distributed)
    with pytest.raises(ResumeError, match="had 64 samples, and has 65"):
        Fleet(distributed, 65, 4, 4).resume(states)


def test_samples_that_do_not_follow_from_the_seed_are_found_out() -> None:
    """What was given is compared with what the seed says: nothing is left out or repeated in silence."""
    states = two(distributed)
    states[1]["order"]["digest"] += 1
    with pytest.raises(ResumeError, match="other samples than its seed says"):
        Fleet(distributed, 64, 4, 1).resume(states)
    states = two(distributed)
    states[1]["batches"] += 1
    with pytest.raises(ResumeError, match="not at the same place"):
        Fleet(distributed, 64, 4, 1).resume(states)
    states = two(distributed)
    states[1]["order"]["at_first"]["counters"]["sampler.seed"] += 1
    with pytest.raises(ResumeError, match="shuffled it in different ways"):
        Fleet(distributed, 64, 4, 1).resume(states)


def test_positions_of_earlier_versions_are_refused_and_of_later_ones_too() -> None:
    """Earlier versions lack the recipe, and what later versions contain is unknown."""
    states = [{key: value for key, value in state.items() if key != "recipe"} for state in two(distributed)]
    with pytest.raises(ResumeError, match="an earlier version"):
        Fleet(distributed, 64, 4, 1).resume(states)
    fleet = Fleet(distributed, 64, 4, 2)
    with pytest.raises(NewerFormatError):
        fleet.positions[0].load_state({**states[0], "version": 3})


def test_the_batch_size_may_change_with_the_number_of_ranks() -> None:
    """Another batch size per rank keeps the batch of all ranks together as large."""
    states = two(distributed)
    fleet = Fleet(distributed, 64, 8, 1)
    fleet.resume(states)
    (found,), _ = fleet.take(None)
    assert len(found) == 40
    same = Fleet(distributed, 64, 8, 2)
    with pytest.raises(MismatchError, match="batch_size"):
        same.positions[0].load_state(states[0])


def with_drop_last(count: int, batch: int, rank: int, size: int) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(range(count), size, rank, drop_last=True)  # type: ignore[arg-type]
    return DataLoader(range(count), batch, sampler=sampler, drop_last=True)  # type: ignore[arg-type]


def test_what_the_loader_drops_is_dropped() -> None:
    """With `drop_last` all batches are whole, and none comes twice."""
    states = two(with_drop_last, count=71)
    fleet = Fleet(with_drop_last, 71, 4, 4)
    fleet.resume(states)
    found, _ = fleet.take(None)
    samples = [sample for given in found for sample in given]
    assert len(samples) == len(set(samples)) == 32
    assert {len(given) for given in found} == {8}


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_with_workers(persistent: bool) -> None:
    """New workers fetch the rest of the epoch; a second resume of the same ranks repeats their batches exactly."""

    def make(count: int, batch: int, rank: int, size: int) -> DataLoader[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(range(count), size, rank, seed=3)  # type: ignore[arg-type]
        return DataLoader(Noisy(count), batch, sampler=sampler, num_workers=2, persistent_workers=persistent)

    before, states = Fleet(make, 80, 4, 2).take(3)
    fleet = Fleet(make, 80, 4, 1)
    fleet.resume(states)
    (loader,), (position,) = fleet.loaders, fleet.positions
    iterator = iter(loader)
    first = [next(iterator) for _ in range(3)]
    state = position.state()
    rest = list(iterator)
    seen = [sample for given in before for sample in given]
    assert sorted(seen + [int(sample) for ids, _ in first + rest for sample in ids]) == list(range(80))
    rest += list(loader)
    again = Fleet(make, 80, 4, 1)
    again.positions[0].load_state(state, rng=again.streams)
    (loader,) = again.loaders
    found = list(loader) + list(loader)
    assert [torch.cat((ids, draws)).tolist() for ids, draws in found] == [
        torch.cat((ids, draws)).tolist() for ids, draws in rest
    ]


class Noisy(torch.utils.data.Dataset[Any]):
    """Each sample with a draw of the worker's stream."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(())
