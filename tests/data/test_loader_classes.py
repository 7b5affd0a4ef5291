"""Loader classes of users and libraries, with a state and counters of their own: nothing is assumed about what their
`load_state_dict` means, and each epoch after a resume has the samples of the uninterrupted run, or says why not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ckpt_engine.data.exactness import Level
from tests.data.loop import train

ROWS, EPOCHS = 11, 3


class Stream(IterableDataset[int]):
    """Each epoch in another order, which its loader decides."""

    order = 0

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.order).sample(range(ROWS), ROWS))


class Rows(Dataset[int]):
    order = 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        return index + 100 * self.order


class Counts(DataLoader[Any]):
    """Counts its epochs, and gives the count to its dataset."""

    epochs = 0

    def __iter__(self) -> Any:
        self.epochs += 1
        self.dataset.order = self.epochs  # type: ignore[attr-defined]
        return super().__iter__()


class Strict(Counts):
    """Needs all of its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


class Lenient(Strict):
    """Takes an empty state as the beginning of training."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state.get("epochs", 0)


class Continues(Strict):
    """A loaded state continues the epoch that it was saved in, and only the next pass counts again; the pass begins,
    and torch draws its seed, when the first batch is asked for."""

    restored = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.restored = True

    def __iter__(self) -> Any:
        self.epochs -= self.restored
        self.restored = False
        yield from super().__iter__()


class DrawsByItself(Strict):
    """Draws the order of an epoch from a stream of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.stream = random.Random(5)

    def __iter__(self) -> Any:
        self.epochs = self.stream.randrange(1000)
        return super().__iter__()


class Shuffles(Strict):
    """Keeps a list that each pass shuffles further, under no state."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.orders = list(range(20))

    def __iter__(self) -> Any:
        random.Random(3).shuffle(self.orders)
        self.epochs = self.orders[0]
        return super().__iter__()


CLASSES = (Counts, Strict, Lenient, Continues, DrawsByItself)


def make(kind: type[DataLoader[Any]], dataset: Callable[[], Any], workers: int) -> Callable[[], DataLoader[Any]]:
    shuffle = True if dataset is Rows else None
    return lambda: kind(dataset(), batch_size=3, shuffle=shuffle, num_workers=workers, collate_fn=numbers)


def numbers(rows: list[int]) -> list[Any]:
    return [rows]


@pytest.mark.cells(3)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dataset", [Stream, Rows])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_loader_class_of_its_own_resumes_exactly(kind: type[Any], dataset: type[Any], workers: int) -> None:
    """At each boundary, whatever its methods make of a state."""
    loader = make(kind, dataset, workers)
    whole = train(loader, epochs=EPOCHS)
    assert len({row[0] for row in whole.batches}) == EPOCHS
    for boundary in whole.boundaries[:: 3 if workers else 1]:
        resumed = train(loader, seed=7, resume=boundary, epochs=EPOCHS, at_end="finish_epoch")
        assert resumed.batches == whole.after(boundary.seen), boundary.where
        assert resumed.end == whole.end
        assert resumed.restoration is not None
        level = resumed.restoration.exactness.level
        assert level is Level.EXACT or (kind is Continues and level is Level.ORDER_ONLY), resumed.restoration.exactness


@pytest.mark.parametrize("dataset", [Stream, Rows])
def test_containers_that_a_loader_class_changes_are_named(dataset: type[Any]) -> None:
    """No snapshot has them."""
    loader = make(Shuffles, dataset, 0)
    boundary = train(loader, epochs=EPOCHS).boundaries[-2]
    restoration = train(loader, seed=7, resume=boundary, epochs=EPOCHS).restoration
    assert restoration is not None
    assert "Shuffles.orders" in "".join(restoration.exactness.reasons)
