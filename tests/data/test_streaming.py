"""Streamed data sets with a state: each epoch after a resume has the samples of the uninterrupted run, or says why not.

Many of them apply the state they were given at each `iter()`, not at the next one only. Others say less than they know:
a shuffle buffer of the package `datasets` forgets what it holds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_engine.data.exactness import Level
from ckpt_engine.data.position import attach
from ckpt_engine.errors import MismatchError
from tests.data.loop import Boundary, train

EPOCHS = 3
ROWS = 23


def ids(rows: list[Any]) -> tuple[list[int], torch.Tensor]:
    """A batch as the numbers of its samples, and what was drawn for them."""
    numbers = [int(row["n"]) if isinstance(row, dict) else int(row) for row in rows]
    return numbers, torch.rand(1, dtype=torch.float64) + random.random()


class Offset(IterableDataset[int]):
    """Starts each pass where the state that was loaded last says, as many tutorials have it."""

    def __init__(self, seed: int = 0) -> None:
        self.start = 0
        self.seen = 0
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        mine = list(range(ROWS)) if info is None else list(range(ROWS))[info.id :: info.num_workers]
        random.Random(self.seed).shuffle(mine)
        self.seen = self.start
        for number in mine[self.start :]:
            self.seen += 1
            yield number

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.seed = state["seen"], state["seed"]


class Within(IterableDataset[int]):
    """Hands on the samples and the state of another one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        yield from self.inner

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])


class Pending(Offset):
    """Keeps the loaded state as it is, and applies it in each pass of that epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, Any] | None = None
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.start = self.loaded["seen"] if self.loaded and self.loaded["epoch"] == self.epoch else 0
        self.seed = self.epoch
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class ByHalves(Offset):
    """Counts on in attributes that a loaded state sets to other values than a run has them at."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = self.step = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        mine = list(range(ROWS)) if info is None else list(range(ROWS))[info.id :: info.num_workers]
        while self.offset + self.step < len(mine):
            self.step += 1
            yield mine[self.offset + self.step - 1]
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.offset + self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.offset, self.step = state["at"], 0


class NeedsArguments(Offset):
    """Has a `state_dict` that only its own loader can call."""

    def state_dict(self, samples: int) -> dict[str, Any]:  # type: ignore[override]
        return {"seen": samples}


class NotBefore(Offset):
    """Knows its state only once it was iterated."""

    def __init__(self) -> None:
        super().__init__()
        del self.seen


OWN: dict[str, Callable[[], Any]] = {
    "offset": Offset,
    "offset within": lambda: Within(Offset()),
    "pending": Pending,
    "pending within twice": lambda: Within(Within(Pending())),
    "by halves": ByHalves,
    "needs arguments": NeedsArguments,
    "not before": NotBefore,
}
LOADERS: dict[str, dict[str, Any]] = {
    "0": {},
    "2": {"num_workers": 2},
    "2 kept": {"num_workers": 2, "persistent_workers": True},
}


EACH_THIRD = slice(None, None, 3)
IN_WORKERS = slice(10, 11)
"""Each run forks many processes: one boundary of the second epoch."""


def make(dataset: Callable[[], Any], cls: Any = DataLoader, **options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: cls(dataset(), batch_size=4, collate_fn=ids, **options)


def without_draws(batches: list[Any]) -> list[Any]:
    return [(epoch, [number % 1000 for number in batch]) for epoch, batch, _ in batches]


def exact_or_said(loader: Callable[[], DataLoader[Any]], *, exactly: bool = True, starts: slice = EACH_THIRD) -> None:
    """Three processes one after another, from boundaries of each: all that follows is as in the uninterrupted run."""
    alone = train(loader, follow=False, epochs=EPOCHS)
    reference = train(loader, epochs=EPOCHS)
    assert reference.batches == alone.batches
    assert reference.end == alone.end
    assert len({one[0] for one in alone.batches}) == EPOCHS
    for number, first in list(enumerate(reference.boundaries))[starts]:
        boundary: Boundary = first
        for generation, hop in enumerate((2, 5, 0)):
            seed = 1000 + 10 * number + generation
            resumed = train(loader, seed=seed, resume=boundary, epochs=EPOCHS, at_end="finish_epoch")
            at = (first.where, first.epoch, first.seen, generation)
            assert resumed.restoration is not None
            level = resumed.restoration.exactness.level
            assert level is Level.EXACT or not exactly, (at, resumed.restoration)
            if level is Level.NOT_RESTORED:
                break
            expected, found = reference.after(boundary.seen), resumed.batches
            if level is Level.ORDER_ONLY:
                expected, found = without_draws(expected), without_draws(found)
            assert found == expected, at
            if len(resumed.boundaries) <= hop:
                break
            boundary = resumed.boundaries[hop]


@pytest.mark.cells(4)
@pytest.mark.parametrize(
    ("name", "workers"),
    [(name, "0") for name in OWN] + [(name, ("2", "2 kept")[number % 2]) for number, name in enumerate(OWN)],
)
def test_own_streams_begin_each_later_epoch_at_its_beginning(name: str, workers: str) -> None:
    """A resume counts once, however a data set applies its state."""
    said = name in ("needs arguments", "not before")
    exact_or_said(
        make(OWN[name], **LOADERS[workers]),
        exactly=not said,
        starts=IN_WORKERS if workers != "0" else EACH_THIRD,
    )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [name for name in LOADERS if name != "0"])
@pytest.mark.parametrize("name", OWN)
def test_own_streams_in_workers_resume_from_more_boundaries(name: str, workers: str) -> None:
    """The law above, densely, in both kinds of workers: each resume forks many processes."""
    said = name in ("needs arguments", "not before")
    exact_or_said(make(OWN[name], **LOADERS[workers]), exactly=not said)


def _rows(shards: int = 4) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"n": list(range(ROWS))}).to_iterable_dataset(num_shards=shards)


def _python_rows() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.IterableDataset.from_generator(_generate, gen_kwargs={"parts": [0, 1, 2, 3]})


def _generate(parts: list[int]) -> Iterator[dict[str, int]]:
    for part in parts:
        for number in range(part, ROWS, 4):
            yield {"n": number}


def _interleaved(**options: Any) -> Any:
    datasets = pytest.importorskip("datasets")
    shift = [_rows(2), _rows(2).map(_plus), _python_rows()]
    return datasets.interleave_datasets(shift, **options)


def _plus(row: dict[str, Any]) -> dict[str, Any]:
    return {"n": row["n"] + 100}


def _twice(rows: dict[str, Any]) -> dict[str, Any]:
    return {"n": [n + add for n in rows["n"] for add in (0, 200)]}


def _drawing(rows: dict[str, Any]) -> dict[str, Any]:
    return {"n": [n + 1000 * random.randrange(9) for n in rows["n"]]}


HF: dict[str, Callable[[], Any]] = {
    "arrow": _rows,
    "generator": _python_rows,
    "map": lambda: _rows().map(_plus),
    "batched map": lambda: _rows().map(_twice, batched=True, batch_size=5),
    "filter": lambda: _python_rows().filter(lambda row: row["n"] % 3 > 0),
    "torch format": lambda: _rows().with_format("torch").map(_plus),
    "arrow format, batched map": lambda: (
        _rows().with_format("arrow").map(lambda table: table, batched=True, batch_size=3).with_format(None)
    ),
    "batch": lambda: _rows().batch(3).map(lambda row: {"n": row["n"][0]}),
    "interleave": _interleaved,
    "interleave with probabilities": lambda: _interleaved(
        probabilities=[0.5, 0.3, 0.2], seed=3, stopping_strategy="all_exhausted"
    ),
    "batched map that draws": lambda: _rows().map(_drawing, batched=True, batch_size=5),
    "concatenate": lambda: pytest.importorskip("datasets").concatenate_datasets([_rows(2), _python_rows()]),
    "skip and take": lambda: _rows().skip(3).take(15),
    "repeat": lambda: _rows().repeat(2),
    "shuffle buffer": lambda: _rows().shuffle(seed=5, buffer_size=6),
    "shuffle buffer within": lambda: Within(_python_rows().shuffle(seed=5, buffer_size=6).map(_plus)),
    "distributed": lambda: pytest.importorskip("datasets.distributed").split_dataset_by_node(_rows(3), 1, 2),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(Caught UserWarning|To copy construct)")
@pytest.mark.parametrize("workers", LOADERS)
@pytest.mark.parametrize("name", HF)
def test_streams_of_the_package_datasets(name: str, workers: str) -> None:
    """Each of its building blocks, alone."""
    exact_or_said(
        make(HF[name], **LOADERS[workers]), exactly=False, starts=slice(None, None, 9 if workers != "0" else 2)
    )


@pytest.mark.cells(1)
@pytest.mark.parametrize("workers", LOADERS)
def test_a_stateful_loader_of_such_streams(workers: str) -> None:
    """torchdata's loader asks the data set itself."""
    exact_or_said(
        make(Pending, StatefulDataLoader, **LOADERS[workers]),
        starts=IN_WORKERS if workers != "0" else slice(None, None, 9),
    )


@pytest.mark.parametrize("where", ["after a batch", "between epochs"])
def test_an_unseeded_shuffle_is_refused(where: str) -> None:
    """Its order is another one in each process."""
    loader = make(lambda: _python_rows().shuffle(buffer_size=6))
    boundary = next(one for one in train(loader, epochs=2).boundaries if one.where == where)
    with pytest.raises(MismatchError, match="other values"):
        train(loader, seed=7, resume=boundary, epochs=2)


@pytest.mark.parametrize("dataset", ["own", "datasets"])
def test_an_epoch_that_was_set_before_the_process_ended_is_set_again(dataset: str) -> None:
    """A loop may set the next epoch when one ends; a state that does not say so is not enough."""

    def epoch(loader: Any, numbers: list[int], stop: int | None = None) -> None:
        for batch, _ in loader:
            numbers.extend(batch)
            if stop is not None and len(numbers) >= stop:
                return
        loader.dataset.set_epoch(loader.dataset.epoch + 1)

    make_loader = make({"own": Pending, "datasets": lambda: _python_rows().shuffle(seed=3, buffer_size=6)}[dataset])
    loader, whole = make_loader(), []
    for _ in range(3):
        epoch(loader, whole)
    loader, first = make_loader(), []
    position = attach(loader)
    epoch(loader, first)
    epoch(loader, first, stop=ROWS + 8)
    state = position.state()
    loader, rest = make_loader(), []
    attach(loader).load_state(state, at_end="finish_epoch")
    epoch(loader, rest)
    epoch(loader, rest)
    assert first + rest == whole


def test_a_shuffle_buffer_is_loaded_again_and_that_is_said() -> None:
    """The state of a streamed shuffle does not have what is in its buffer."""
    loader = make(HF["shuffle buffer within"])
    reference = train(loader, epochs=2)
    boundary = reference.boundaries[4]
    restoration = train(loader, seed=7, resume=boundary, epochs=2).restoration
    assert restoration is not None
    assert restoration.again.startswith(f"{boundary.seen} batches are loaded again and dropped, as the shuffle buffer")
