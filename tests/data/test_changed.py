"""A loader that is not the one that was saved: between epochs it is taken as it is, within one the user chooses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset, WeightedRandomSampler, random_split

from ckpt_engine.data import rng
from ckpt_engine.data.exactness import Level, OnChange, Restoration
from ckpt_engine.data.position import attach
from ckpt_engine.errors import MismatchError
from tests.data.loader_kinds import SAMPLES, Augmented, QuietStream, StatefulStream, Stream
from tests.data.loop import seed_everything


def loader(samples: int = SAMPLES, **options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(samples), **{"batch_size": 4, "shuffle": True, **options})


def after(batches: int, followed: DataLoader[Any]) -> tuple[Any, Any, list[int]]:
    """The state and the streams after so many batches of the second epoch, and the samples of that epoch."""
    seed_everything(1)
    position = attach(followed)
    list(followed)
    seen: list[int] = []
    state: Any = None
    streams: Any = None
    for number, batch in enumerate(followed, 1):
        seen += batch[0].tolist()
        if number == batches:
            state, streams = position.state(), rng.capture()
    return (state if batches else position.state()), (streams if batches else rng.capture()), seen


def resumed(
    followed: DataLoader[Any], saved: tuple[Any, Any, Any], on_change: str
) -> tuple[list[list[int]], list[int], Restoration]:
    """The rest of the epoch by batches, and the samples of the next one."""
    seed_everything(9)
    position = attach(followed)
    found = position.load_state(saved[0], rng=saved[1], on_change=OnChange(on_change))
    return [b[0].tolist() for b in followed], [i for b in followed for i in b[0].tolist()], found


CHANGES = {
    "batch size": {"batch_size": 3},
    "batch size, workers": {"batch_size": 8, "num_workers": 2},
    "last batch dropped": {"drop_last": True},
    "more samples": {"samples": 31},
    "other batches and more samples": {"samples": 31, "batch_size": 5},
}


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
def test_between_epochs_a_changed_loader_is_taken_and_reported(name: str) -> None:
    """Nothing is refused; the next epoch is a whole one of the loader as it is now."""
    changed = loader(**CHANGES[name])
    rest, _, found = resumed(changed, after(0, loader()), "refuse")
    assert found.exactness.level is Level.NOT_RESTORED
    why = found.exactness.reasons[0]
    assert why.endswith(": the new loader counts from this epoch on")
    assert ("samples then, 31 now" in why) is ("samples" in CHANGES[name])
    assert not ("samples" in CHANGES[name] and "batches" in why)
    assert len(rest) == len(changed)
    assert len({i for batch in rest for i in batch}) == sum(map(len, rest))


def test_at_the_very_start_of_an_epoch_too() -> None:
    """The iterator exists and nothing of it was trained; the order comes from the streams of the snapshot."""
    seed_everything(1)
    followed = loader()
    position = attach(followed)
    iterator = iter(followed)
    saved = (position.state(), rng.capture(), None)
    assert next(iterator) is not None
    assert saved[0]["phase"] == "within"
    first, second = resumed(loader(batch_size=8), saved, "refuse"), resumed(loader(batch_size=8), saved, "refuse")
    assert sorted(i for batch in first[0] for i in batch) == list(range(SAMPLES))
    assert first[0] == second[0]


class Growing(Sampler[int]):
    """Gives more samples in each epoch, as `set_epoch` says."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8 * (1 + self.epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self), generator=torch.Generator().manual_seed(self.epoch)).tolist())


def test_a_length_that_follows_from_the_epoch_is_no_change() -> None:
    """The loop says which epoch it is after the state was loaded, and right before it iterates."""

    def epoch(followed: DataLoader[Any], number: int) -> Iterator[list[int]]:
        followed.sampler.set_epoch(number)  # type: ignore[attr-defined]
        return (batch[0].tolist() for batch in followed)

    first, second = (loader(shuffle=False, sampler=Growing()) for _ in range(2))
    position = attach(first)
    list(epoch(first, 0))
    batches = epoch(first, 1)
    next(batches)
    state = position.state()
    assert attach(second).load_state(state).exactness.level is Level.EXACT
    assert len(second) == 2
    assert list(epoch(second, 1)) == list(batches)
    assert list(epoch(second, 2)) == list(epoch(first, 2))


@pytest.mark.parametrize("name", CHANGES)
def test_within_an_epoch_it_is_refused_with_a_hint_that_can_be_followed(name: str) -> None:
    """The error names both values of the option that allow it."""
    changed = loader(**CHANGES[name])
    with pytest.raises(MismatchError, match="in the middle of an epoch") as caught:
        attach(changed).load_state(after(2, loader())[0])
    assert "data: restart_epoch" in str(caught.value.hint)
    assert "data: continue" in str(caught.value.hint)


@pytest.mark.parametrize("name", CHANGES)
def test_restart_epoch_starts_the_epoch_again(name: str) -> None:
    """In the order that it had, where the samplers can repeat it; the batches that were trained count for nothing."""
    saved = after(3, loader())
    changed = loader(**CHANGES[name])
    rest, following, found = resumed(changed, saved, "restart_epoch")
    assert found.restarted
    assert found.batches == 0
    assert found.exactness.level is Level.NOT_RESTORED
    assert "data: restart_epoch" in found.exactness.reasons[0]
    samples = [i for batch in rest for i in batch]
    assert len(rest) == len(changed)
    if "samples" not in CHANGES[name]:
        assert samples == saved[2][: len(samples)]
    assert sorted(set(following)) == sorted(following)
    assert following != samples


@pytest.mark.parametrize("name", CHANGES)
def test_continue_gives_each_sample_that_is_left_once(name: str) -> None:
    """In the order of the interrupted epoch; new samples come from the next one on."""
    saved = after(3, loader())
    changed = loader(**CHANGES[name])
    rest, following, found = resumed(changed, saved, "continue")
    samples = [i for batch in rest for i in batch]
    left = saved[2][12:]
    assert samples == (left[: len(left) // 4 * 4] if changed.drop_last else left)
    assert {len(batch) for batch in rest[:-1]} <= {changed.batch_size}
    assert found.exactness.level is Level.ORDER_ONLY
    assert "data: continue" in found.exactness.reasons[0]
    whole = len(changed.dataset) - (len(changed.dataset) % 4 if changed.drop_last else 0)  # type: ignore[arg-type]
    assert len(following) == len(set(following)) == whole


def test_a_continued_epoch_is_resumed_again() -> None:
    """A snapshot of a continued epoch goes on as any other, also under another change."""
    saved = after(2, loader())
    seed_everything(5)
    position = attach(second := loader(batch_size=3))
    position.load_state(saved[0], rng=saved[1], on_change=OnChange.CONTINUE)
    iterator = iter(second)
    seen = [i for _ in range(2) for i in next(iterator)[0].tolist()]
    state, streams = position.state(), rng.capture()
    again, _, found = resumed(loader(batch_size=3), (state, streams, None), "refuse")
    assert seen + [i for batch in again for i in batch] == saved[2][8:]
    assert found.exactness.level is Level.EXACT
    third, _, _ = resumed(loader(batch_size=5), (state, streams, None), "continue")
    assert seen + [i for batch in third for i in batch] == saved[2][8:]


def weighted() -> DataLoader[Any]:
    return loader(shuffle=False, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))


@pytest.mark.parametrize(
    ("saved", "now", "why"),
    [
        (loader, lambda: loader(shuffle=False), "samplers is another"),
        (loader, lambda: loader(9), "13 of its samples are gone"),
        (
            weighted,
            lambda: loader(9, shuffle=False, sampler=WeightedRandomSampler([1.0] * 9, 9)),
            "WeightedRandomSampler",
        ),
    ],
)
def test_continue_says_where_it_has_no_meaning(saved: Any, now: Any, why: str) -> None:
    """The error also says that the epoch can be started again instead."""
    changed = now()
    with pytest.raises(MismatchError, match=why) as caught:
        attach(changed).load_state(after(2, saved())[0], on_change=OnChange.CONTINUE)
    assert "data: restart_epoch" in str(caught.value.hint)
    assert resumed(now(), after(2, saved()), "restart_epoch")[2].restarted


def test_a_stream_that_knows_its_place_continues_in_other_batches() -> None:
    """Its state is that of a sample."""
    saved = after(2, DataLoader(StatefulStream(), batch_size=4))
    rest, _, _ = resumed(DataLoader(StatefulStream(), batch_size=5), saved, "continue")
    assert [i for batch in rest for i in batch] == list(range(8, SAMPLES))
    with pytest.raises(MismatchError, match="cannot say where it is"):
        resumed(DataLoader(QuietStream(), batch_size=5), after(2, DataLoader(QuietStream(), batch_size=4)), "continue")


def test_a_stream_starts_its_epoch_again() -> None:
    """That works with another number of workers too, which share out the stream."""
    changed = DataLoader(Stream(), batch_size=4, num_workers=1)
    rest, _, _ = resumed(changed, after(2, DataLoader(Stream(), batch_size=4)), "restart_epoch")
    assert rest[0] == [0, 1, 2, 3]


# ---- other samples


class Files:
    """A dataset of someone who splits a list of names."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index]), self.names[index]


def names() -> list[str]:
    return [f"/data/{number}.png" for number in torch.randperm(40).tolist()]


SPLITS = {
    "random_split": lambda: random_split(Augmented(40), [30, 10])[0],
    "a split of a split": lambda: Subset(random_split(Augmented(40), [30, 10])[0], range(20)),
    "a list of names": lambda: Files(names()[:30]),
    "labels": lambda: TensorDataset(torch.arange(30), torch.randint(1000, (30,))),
    "features": lambda: TensorDataset(torch.arange(30), torch.randn(30, 3)),
    "a list": lambda: [(torch.tensor([i]), i) for i in torch.randperm(40).tolist()[:30]],
}


def split(name: str, seed: int) -> DataLoader[Any]:
    torch.manual_seed(seed)
    return DataLoader(SPLITS[name](), batch_size=4, shuffle=True)


@pytest.mark.parametrize("batches", [0, 2])
@pytest.mark.parametrize("name", [name for name in SPLITS if name != "a list"])
def test_an_unseeded_split_is_refused_with_its_cause(name: str, batches: int) -> None:
    """It is refused between epochs too: training on samples that were kept for validation is never right."""
    saved = after(batches, split(name, 1))
    other = split(name, 2)
    with pytest.raises(MismatchError, match="split or order differs") as caught:
        attach(other).load_state(saved[0])
    assert "random_split(..., generator=" in str(caught.value.hint)
    same = split(name, 1)
    assert attach(same).load_state(saved[0]).exactness.level is Level.EXACT
    if batches:
        accepted = split(name, 2)
        assert attach(accepted).load_state(saved[0], on_change=OnChange.RESTART_EPOCH).restarted


def test_samples_are_looked_at_before_training_changes_them() -> None:
    """A cache that fills, or a log of what was loaded, is no other split."""

    class Caching(Augmented):
        def __init__(self) -> None:
            super().__init__()
            self.cache: list[Any] = [None] * SAMPLES

        def __getitem__(self, index: int) -> Any:
            self.cache[index] = index
            return super().__getitem__(index)

    saved = after(2, DataLoader(Caching(), batch_size=4))
    again = DataLoader(Caching(), batch_size=4)
    assert attach(again).load_state(saved[0]).exactness.level is Level.EXACT


def test_features_of_another_machine_are_the_same() -> None:
    """They may differ in their last bits."""
    features = torch.randn(30, 3)
    saved = after(2, DataLoader(TensorDataset(torch.arange(30), features), batch_size=4))
    again = DataLoader(TensorDataset(torch.arange(30), features * (1 + 1e-7)), batch_size=4)
    assert attach(again).load_state(saved[0]).exactness.level is Level.EXACT


def test_features_that_an_earlier_version_has_saved_as_numbers_are_compared() -> None:
    """Later ones have them as bytes."""
    features = torch.randn(30, 3)
    state, _, _ = after(2, DataLoader(TensorDataset(torch.arange(30), features), batch_size=4))
    (row,) = [one for one in state["fingerprint"]["samples"].values() if "floats" in one]
    row["floats"] = features.double().reshape(-1).tolist()
    same, other = (DataLoader(TensorDataset(torch.arange(30), one), batch_size=4) for one in (features, features + 1))
    assert attach(same).load_state(state).exactness.level is Level.EXACT
    with pytest.raises(MismatchError, match="split"):
        attach(other).load_state(state)


def test_no_sample_is_loaded_to_tell_a_split() -> None:
    """A sample may take seconds, and may draw."""

    class Untouchable(Augmented):
        def __init__(self) -> None:
            super().__init__()
            self.names = [f"{i}.png" for i in range(SAMPLES)]

        def __getitem__(self, index: int) -> Any:
            raise AssertionError

    streams = rng.capture()
    position = attach(kept := DataLoader(Subset(Untouchable(), range(7)), batch_size=4))
    assert set(position.state()["fingerprint"]["samples"]) == {"dataset.indices", "dataset.dataset.names"}
    assert rng.capture() == streams
    assert len(kept) == 2


def test_a_split_of_a_hugging_face_dataset_is_recognised_by_its_rows() -> None:
    """They are read as they are stored."""
    datasets = pytest.importorskip("datasets")

    def part(seed: int) -> Any:
        rows = datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(40)]})
        return rows.train_test_split(test_size=10, seed=seed)["train"].with_format("torch")

    saved = after(0, DataLoader(Wrapped(part(1)), batch_size=4))
    for other in (Wrapped(part(2)), part(2)):
        with pytest.raises(MismatchError, match="split or order differs"):
            attach(kept := DataLoader(other, batch_size=4)).load_state(
                saved[0] if isinstance(other, Wrapped) else after_raw(part(1))
            )
        assert kept is not None
    again = DataLoader(Wrapped(part(1)), batch_size=4)
    assert attach(again).load_state(saved[0]).exactness.level is Level.EXACT


class Wrapped:
    """A dataset that holds another one."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index]), index


def after_raw(rows: Any) -> Any:
    position = attach(kept := DataLoader(rows, batch_size=4))
    list(kept)
    return position.state()
