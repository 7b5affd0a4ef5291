"""The position of one loader: what it says at each moment, and what loading it does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler

from ckpt_engine.data import rng
from ckpt_engine.data.exactness import Level
from ckpt_engine.data.position import attach
from tests.data.loader_kinds import Augmented, Counting, OwnGenerators, QuietStream
from tests.data.loop import recorded, seed_everything, train, train_step

PLAIN = (dict, list, tuple, str, int, float, bool, bytes, type(None))


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented() if dataset is None else dataset, **{"batch_size": 4, **options})


def shuffled(**options: Any) -> DataLoader[Any]:
    return loader(shuffle=True, **options)


def leaves(tree: Any) -> Iterator[Any]:
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    yield tree
    for child in children:
        yield from leaves(child)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_holds_plain_values_only_and_never_changes(workers: int) -> None:
    """A snapshot stores it without pickle, and it may be written while training goes on."""
    seed_everything(1)
    followed = shuffled(num_workers=workers, generator=torch.Generator().manual_seed(1))
    position = attach(followed, lookahead=1)
    iterator = iter(followed)
    for _ in range(3):
        next(iterator)
    state = position.state()
    assert {type(leaf) for leaf in leaves(state)} <= set(PLAIN)
    kept = copy.deepcopy(state)
    list(iterator)
    next(iter(followed))
    assert state == kept


def test_taking_a_state_draws_nothing_and_loads_nothing() -> None:
    """It can be taken at any boundary of any run."""
    dataset = Counting()
    followed = shuffled(dataset=dataset)
    position = attach(followed)
    next(iter(followed))
    before, loaded = rng.capture(), len(dataset.loaded)
    assert position.state() == position.state()
    assert rng.capture() == before
    assert len(dataset.loaded) == loaded


def test_trained_samples_are_not_loaded_again() -> None:
    """Skipping draws indices only: the dataset is asked for nothing but what is delivered."""
    seed_everything(1)
    reference = shuffled()
    position = attach(reference)
    iterator = iter(reference)
    for _ in range(4):
        next(iterator)
    state = position.state()
    rest = [i for indices, _ in iterator for i in indices.tolist()]
    seed_everything(2)
    dataset = Augmented()
    again = shuffled(dataset=dataset)
    attach(again).load_state(state)
    iterator = iter(again)
    assert dataset.loaded == []
    next(iterator)
    assert dataset.loaded == rest[:4]
    list(iterator)
    assert dataset.loaded == rest


def test_phases_of_an_epoch() -> None:
    """Fresh before the first, within while batches are left, ended when all are trained, fresh after the end."""
    followed = shuffled()
    position = attach(followed)
    assert position.state()["phase"] == "fresh"
    iterator = iter(followed)
    phases = [position.state()["phase"], *(position.state()["phase"] for _ in iterator)]
    assert phases == ["within"] * 6 + ["ended"]
    assert position.exhausted
    assert position.state()["phase"] == "fresh"
    assert position.next_epoch_state()["phase"] == "fresh"


def test_all_of_all_batches_resume_into_a_fresh_next_epoch() -> None:
    """A trainer that counts batches and stops at the last gets a whole epoch next, not an empty one."""

    def epoch_of_counting_trainer(followed: DataLoader[Any]) -> list[Any]:
        iterator = iter(followed)
        batches = []
        for _ in range(6):
            batches.append(recorded(next(iterator)))
            train_step()
        return batches

    seed_everything(1)
    reference = shuffled()
    position = attach(reference)
    epoch_of_counting_trainer(reference)
    state, streams = position.state(), rng.capture()
    expected = epoch_of_counting_trainer(reference)
    end = rng.capture()

    seed_everything(2)
    again = shuffled()
    report = attach(again).load_state(state, rng=streams)
    assert (report.phase, report.batches) == ("ended", 0)
    assert epoch_of_counting_trainer(again) == expected
    assert rng.capture() == end


def test_all_of_all_batches_finish_the_epoch_where_the_loop_asks_for_that() -> None:
    """A loop that runs until the iterator ends gets an iterator that ends."""
    seed_everything(1)
    reference = shuffled()
    position = attach(reference)
    iterator = iter(reference)
    for _ in range(6):
        next(iterator)
    state = position.state()
    again = shuffled()
    report = attach(again).load_state(state, at_end="finish_epoch")
    assert (report.phase, report.batches) == ("ended", 6)
    assert list(again) == []
    assert len(list(again)) == 6


@pytest.mark.cells(2)
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "persistent_workers": True}])
@pytest.mark.parametrize("boundary", [0, 3, 7, 8], ids=["start", "within", "between", "start of the second"])
def test_a_loaded_state_holds_until_a_batch_is_fetched(workers: dict[str, Any], boundary: int) -> None:
    """Trainers build iterators and drop them unused; the one that is asked first continues the run."""

    def make() -> DataLoader[Any]:
        return loader(sampler=DistributedSampler(Augmented(43), 2, 1, seed=3), dataset=Augmented(43), **workers)

    reference = train(make)
    at = reference.boundaries[boundary]
    seed_everything(7)
    again = make()
    position = attach(again)
    position.load_state(at.data, rng=at.rng, at_end="finish_epoch")
    for _ in range(3):
        iter(again)
        again.sampler.set_epoch(at.epoch)  # type: ignore[attr-defined]
    assert position.fetched == (0 if at.data["phase"] == "fresh" else at.data["batches"])
    assert position.state()["phase"] == at.data["phase"]
    batches = []
    for epoch in range(at.epoch, 2):
        again.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for batch in again:
            batches.append((epoch, *recorded(batch)))
            train_step()
    assert batches == reference.after(at.seen)
    assert rng.capture() == reference.end


@pytest.mark.cells(1)
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_a_dropped_iterator_of_a_fresh_epoch_leaves_nothing_in_the_samplers(workers: dict[str, Any]) -> None:
    """The dropped iterator drew from the sampler's generators and moved its counter; the next one starts as it did."""

    def make() -> DataLoader[Any]:
        return loader(sampler=OwnGenerators(), **workers)

    reference = train(make)
    at = next(b for b in reference.boundaries if b.where == "between epochs")
    seed_everything(7)
    again = make()
    attach(again).load_state(at.data, rng=at.rng)
    for _ in range(2):
        next(iter(again.sampler))  # another reader uses the sampler before the loader does
        attach(again).load_state(at.data, rng=at.rng)
        iter(again)
        iter(again)
    batches = []
    for batch in again:
        batches.append((at.epoch, *recorded(batch)))
        train_step()
    assert batches == reference.after(at.seen)


def test_a_position_can_be_loaded_in_the_process_that_saved_it() -> None:
    """Rolling back needs no new process; running persistent workers are replaced."""
    followed = shuffled(num_workers=2, persistent_workers=True)
    seed_everything(1)
    position = attach(followed)
    list(followed)
    iterator = iter(followed)
    for _ in range(2):
        next(iterator)
    state, streams = position.state(), rng.capture()
    expected = [recorded(b) for b in iterator] + [recorded(b) for b in followed]
    end = rng.capture()
    iterator = iter(followed)
    next(iterator)
    position.load_state(state, rng=streams)
    assert [recorded(b) for b in followed] + [recorded(b) for b in followed] == expected
    assert rng.capture() == end


def test_streams_are_left_alone_without_rng() -> None:
    """Building iterators and skipping draws in the past: the caller's streams pass through unmoved."""
    state = train(shuffled, stop_after=3).boundaries[-1].data
    again = shuffled()
    attach(again).load_state(state)
    before = rng.capture()
    iter(again)
    assert rng.capture() == before


def test_several_loaders_of_one_trainer() -> None:
    """Each has a position; the streams are given to the one that is asked first."""

    def make() -> list[DataLoader[Any]]:
        generator = torch.Generator().manual_seed(3)
        return [shuffled(), shuffled(dataset=Augmented(30), generator=generator), loader(QuietStream())]

    def go_on(iterators: list[Iterator[Any]], batches: int) -> list[Any]:
        found = []
        for _ in range(batches):
            found.append([recorded(next(iterator)) for iterator in iterators])
            train_step()
        return found

    seed_everything(1)
    loaders = make()
    positions = [attach(one) for one in loaders]
    iterators = [iter(one) for one in loaders]
    go_on(iterators, 2)
    states, streams = [p.state() for p in positions], rng.capture()
    expected = go_on(iterators, 3)

    seed_everything(2)
    loaders = make()
    for number, one in enumerate(loaders):
        attach(one).load_state(states[number], rng=streams if number == 0 else None)
    assert go_on([iter(one) for one in loaders], 3) == expected


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_generator_with_another_user_continues_where_both_left_it(lookahead: int) -> None:
    """What another user drew from the loader's generator in between is kept."""

    def make() -> tuple[DataLoader[Any], torch.Generator]:
        generator = torch.Generator().manual_seed(3)
        return shuffled(generator=generator), generator

    def rest(iterator: Iterator[Any], generator: torch.Generator) -> list[Any]:
        return [(batch[0].tolist(), torch.rand(1, generator=generator).item()) for batch in iterator]

    followed, generator = make()
    position = attach(followed, lookahead=lookahead)
    iterator = iter(followed)
    for _ in range(2):
        next(iterator)
    torch.rand(5, generator=generator)
    state = position.state()
    assert len(state["held"]) == lookahead
    expected = rest(iterator, generator)
    again, generator = make()
    attach(again, lookahead=lookahead).load_state(state)
    iterator = iter(again)
    for _ in range(lookahead):
        next(iterator)
    assert rest(iterator, generator) == expected


def test_the_global_generator_given_as_generator_is_no_trap() -> None:
    """`generator=torch.default_generator` makes the loader's stream the global one."""

    def make() -> DataLoader[Any]:
        return shuffled(generator=torch.default_generator)

    reference = train(make)
    for boundary in reference.boundaries[1:4]:
        resumed = train(make, seed=9, resume=boundary)
        assert resumed.batches == reference.after(boundary.seen)
        assert resumed.end == reference.end


class Seedable(RandomSampler):
    """As Accelerate's `SeedableRandomSampler`: makes its generator on first use and counts epochs when it ends."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self.epoch = 0
        self.initial_seed = 5

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.epoch += 1


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_counts_its_epochs(workers: int) -> None:
    """Counters and generators made on first use are part of the position."""

    def make() -> DataLoader[Any]:
        return loader(sampler=Seedable(Augmented()), num_workers=workers)

    reference = train(make)
    for boundary in reference.boundaries[:: 4 if workers else 1]:
        resumed = train(make, seed=9, resume=boundary, at_end="finish_epoch")
        assert resumed.batches == reference.after(boundary.seen)
        assert resumed.end == reference.end


class Forever(Sampler[Any]):
    """Repeats a batch sampler without end, as timm's `MultiEpochsDataLoader` does."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.inner


class MultiEpochs(DataLoader[Any]):
    """Keeps one iterator, made in the constructor, for all epochs: it never asks a sampler of ours."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.__dict__["batch_sampler"] = Forever(self.batch_sampler)
        self.kept = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.inner)  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.kept)


def test_a_loader_that_does_not_ask_its_sampler_is_replayed() -> None:
    """The order of such a loader is still right; what was trained is fetched again."""

    def make() -> DataLoader[Any]:
        return MultiEpochs(Augmented(), batch_size=4)

    followed = make()
    position = attach(followed)
    iterator = iter(followed)
    for _ in range(2):
        next(iterator)
    assert position.mode == "replay"
    state = position.state()
    expected = [batch[0].tolist() for batch in iterator]
    again = make()
    attach(again).load_state(state)
    assert [batch[0].tolist() for batch in again] == expected


def test_a_position_before_any_epoch_starts_one() -> None:
    """The state of a loader that was never iterated leads to the same epoch."""
    generator = torch.Generator().manual_seed(8)
    state = attach(untouched := shuffled(generator=generator)).state()
    expected = [batch[0].tolist() for batch in untouched]
    again = shuffled(generator=torch.Generator().manual_seed(9))
    report = attach(again).load_state(state)
    assert report.exactness.level is Level.EXACT
    assert [batch[0].tolist() for batch in again] == expected


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_spawned_workers_resume_exactly(persistent: bool) -> None:
    """Everything that travels to a spawned worker can be pickled, and its streams are put back there."""

    def make() -> DataLoader[Any]:
        return shuffled(num_workers=2, multiprocessing_context="spawn", persistent_workers=persistent)

    alone, reference = train(make, follow=False), train(make)
    assert reference.batches == alone.batches
    for number in (4, 10):
        resumed = train(make, seed=9, resume=reference.boundaries[number])
        assert resumed.batches == reference.after(reference.boundaries[number].seen)
        assert resumed.end == reference.end
