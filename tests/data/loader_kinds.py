"""Datasets, samplers and one factory per kind of data loader whose position must survive."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_engine.data.exactness import Level

SAMPLES = 22
BATCH = 4


def augmented(index: int) -> tuple[int, torch.Tensor]:
    """A sample that draws from all three host streams."""
    return index, torch.rand(2, dtype=torch.float64) + random.random() + float(np.random.rand())


class Augmented(Dataset[Any]):
    """Map-style; remembers what it loaded in this process."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        self.loaded.append(index)
        return augmented(index)


class Counting(Augmented):
    """Map-style with state: every sample says how many this copy of the dataset made before it."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __getitem__(self, index: int) -> Any:
        self.made += 1
        return index, augmented(index)[1] + self.made

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.made = state["made"]


class WhoMadeIt(Dataset[Any]):
    """Map-style; a sample names the worker that made it and that worker's seeds."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return index, torch.tensor([info.id, info.seed, torch.initial_seed()])


class Stream(IterableDataset[Any]):
    """Iterable, sharded unevenly over workers, in an order drawn once per epoch from the worker's stream."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def shard(self) -> list[int]:
        info = get_worker_info()
        indices = list(range(self.samples))
        return indices if info is None else indices[info.id * 8 : (info.id + 1) * 8 + 6 * info.id]

    def __iter__(self) -> Iterator[Any]:
        for index in self.shard():
            yield augmented(index)


class ShuffledStream(Stream):
    """Iterable whose order comes from the global streams."""

    def __iter__(self) -> Iterator[Any]:
        indices = self.shard()
        random.shuffle(indices)
        for index in indices:
            yield augmented(index)


class QuietStream(Stream):
    """Iterable that draws nothing at random."""

    def __iter__(self) -> Iterator[Any]:
        for index in self.shard():
            yield index, torch.tensor([float(index)])


class StatefulStream(Stream):
    """Iterable with a state: goes on where it was."""

    def __init__(self) -> None:
        super().__init__()
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        shard = self.shard()
        while self.next < len(shard):
            self.next += 1
            yield augmented(shard[self.next - 1])
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Cursor(Iterator[Any]):
    """An iterator with state over a stream without."""

    def __init__(self, shard: list[int]) -> None:
        self.shard = shard
        self.next = 0

    def __next__(self) -> Any:
        if self.next == len(self.shard):
            raise StopIteration
        self.next += 1
        return augmented(self.shard[self.next - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class CursorStream(Stream):
    """Iterable whose iterators have the state (what only StatefulDataLoader knows to ask)."""

    def __iter__(self) -> Iterator[Any]:
        return Cursor(self.shard())


class EagerPermutation(Sampler[int]):
    """Permutes inside `__iter__` itself, so an iterator with workers draws twice."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.samples).tolist())

    def __len__(self) -> int:
        return self.samples


class OwnGenerators(Sampler[int]):
    """Draws from generators of its own, python and numpy ones, that go on from epoch to epoch."""

    def __init__(self) -> None:
        self.python = random.Random(3)
        self.numpy = np.random.default_rng(4)
        self.rounds = 0

    def __iter__(self) -> Iterator[int]:
        self.rounds += 1
        for _ in range(SAMPLES):
            yield (self.python.randrange(SAMPLES) + int(self.numpy.integers(SAMPLES)) + self.rounds) % SAMPLES

    def __len__(self) -> int:
        return SAMPLES


class OwnBatches(OwnGenerators):
    """A batch sampler with generators and a counter of its own."""

    def __iter__(self) -> Iterator[Any]:
        indices = list(super().__iter__())
        for start in range(0, SAMPLES, BATCH):
            yield [(i + self.python.randrange(2)) % SAMPLES for i in indices[start : start + BATCH]]

    def __len__(self) -> int:
        return -(-SAMPLES // BATCH)


class DrawsAtEveryIndex(Sampler[int]):
    """Draws each index from the global numpy stream when asked for it."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield int(np.random.randint(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


class PythonBatches(Sampler[list[int]]):
    """A batch sampler that shuffles with python's `random`; as a generator, so at the first `next()`."""

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(range(SAMPLES))
        random.shuffle(indices)
        for start in range(0, SAMPLES, BATCH):
            yield indices[start : start + BATCH]

    def __len__(self) -> int:
        return -(-SAMPLES // BATCH)


def seed_numpy_by_worker(worker: int) -> None:
    """A `worker_init_fn` as tutorials have it."""
    np.random.seed((torch.initial_seed() + worker) % 2**32)


def unbatched() -> list[Any]:
    return [(i, torch.tensor([float(i)])) for i in range(9)]


@dataclass(frozen=True)
class Kind:
    """One kind of loader; `level` is the lowest that any of its states may report."""

    name: str
    make: Callable[[], DataLoader[Any]]
    level: Level = Level.EXACT
    slow: bool = False

    def __str__(self) -> str:
        return self.name


def _loader(dataset: Callable[[], Any] = Augmented, cls: Any = DataLoader, **options: Any) -> Callable[[], Any]:
    return lambda: cls(dataset(), **{"batch_size": BATCH, **options})


def _shuffled(dataset: Callable[[], Any] = Augmented, cls: Any = DataLoader, **options: Any) -> Callable[[], Any]:
    return _loader(dataset, cls, shuffle=True, **options)


def _with(sampler: Callable[[Any], Any], **options: Any) -> Callable[[], Any]:
    def make() -> DataLoader[Any]:
        dataset = Augmented()
        return DataLoader(dataset, batch_size=BATCH, sampler=sampler(dataset), **options)

    return make


def _generator(**options: Any) -> Callable[[], Any]:
    return lambda: _shuffled(generator=torch.Generator().manual_seed(5), **options)()


def _replica(rank: int) -> Callable[[Any], Any]:
    return lambda dataset: DistributedSampler(dataset, num_replicas=2, rank=rank, shuffle=True, seed=11)


def _weighted(dataset: Any) -> Any:
    return WeightedRandomSampler([1.0 + i % 3 for i in range(SAMPLES)], SAMPLES)


def _oversampled(dataset: Any) -> Any:
    return RandomSampler(dataset, num_samples=2 * SAMPLES + 3, generator=torch.Generator().manual_seed(6))


_TWO = {"num_workers": 2}
_KEPT = {"num_workers": 2, "persistent_workers": True}
_THREE = {"num_workers": 3, "persistent_workers": True}
_ORDER = Level.ORDER_ONLY
_NOT = Level.NOT_RESTORED

KINDS = [
    Kind("shuffled", _shuffled()),
    Kind("shuffled, 2 workers", _shuffled(**_TWO)),
    Kind("shuffled, 2 persistent workers", _shuffled(**_KEPT)),
    Kind("shuffled, 3 persistent workers", _shuffled(num_workers=3, persistent_workers=True), slow=True),
    Kind("shuffled, 1 worker", _shuffled(num_workers=1), slow=True),
    Kind("shuffled, 2 workers, prefetch 4", _shuffled(num_workers=2, prefetch_factor=4), slow=True),
    Kind("sequential, 2 workers, drop_last", _loader(drop_last=True, **_TWO), slow=True),
    Kind("shuffled, drop_last", _shuffled(drop_last=True)),
    Kind("generator=", _generator()),
    Kind("generator=, 2 workers", _generator(**_TWO), slow=True),
    Kind("generator=, 2 persistent workers", _generator(**_KEPT)),
    Kind("weighted", _with(_weighted)),
    Kind("weighted, 2 workers", _with(_weighted, **_TWO), slow=True),
    Kind("oversampled with generator", _with(_oversampled)),
    Kind("oversampled with generator, 2 workers", _with(_oversampled, **_TWO), slow=True),
    Kind("eager permutation", _with(lambda d: EagerPermutation())),
    Kind("eager permutation, 2 workers", _with(lambda d: EagerPermutation(), **_TWO), slow=True),
    Kind("eager permutation, 2 persistent workers", _with(lambda d: EagerPermutation(), **_KEPT)),
    Kind("own generators", _with(lambda d: OwnGenerators())),
    Kind("own generators, 2 persistent workers", _with(lambda d: OwnGenerators(), **_KEPT)),
    Kind("own batches", lambda: DataLoader(Augmented(), batch_sampler=OwnBatches())),
    Kind("own batches, 2 workers", lambda: DataLoader(Augmented(), batch_sampler=OwnBatches(), **_TWO), slow=True),
    Kind("own batches, 2 persistent", lambda: DataLoader(Augmented(), batch_sampler=OwnBatches(), **_KEPT)),
    Kind("draws at every index", _with(lambda d: DrawsAtEveryIndex()), _ORDER),
    Kind("draws at every index, 2 workers", _with(lambda d: DrawsAtEveryIndex(), **_TWO), _ORDER),
    Kind("batch sampler", lambda: DataLoader(Augmented(), batch_sampler=PythonBatches())),
    Kind("batch sampler, 2 workers", lambda: DataLoader(Augmented(), batch_sampler=PythonBatches(), **_TWO)),
    Kind("unbatched", _shuffled(unbatched, batch_size=None)),
    Kind("unbatched, 2 workers", _shuffled(unbatched, batch_size=None, **_TWO), slow=True),
    Kind("replica 0 of 2", _with(_replica(0))),
    Kind("replica 1 of 2, 2 workers", _with(_replica(1), **_TWO), slow=True),
    Kind("replica 1 of 2, 2 persistent workers", _with(_replica(1), **_KEPT), slow=True),
    Kind("worker_init_fn", _shuffled(worker_init_fn=seed_numpy_by_worker, **_TWO)),
    Kind("worker_init_fn, persistent", _shuffled(worker_init_fn=seed_numpy_by_worker, **_KEPT), slow=True),
    Kind("worker ids and seeds", _shuffled(WhoMadeIt, num_workers=3), slow=True),
    Kind("worker ids and seeds, persistent", _shuffled(WhoMadeIt, num_workers=3, persistent_workers=True)),
    Kind("stateful dataset", _shuffled(Counting)),
    Kind("stateful dataset, 2 workers", _shuffled(Counting, **_TWO), slow=True),
    Kind("stateful dataset, 2 persistent workers", _shuffled(Counting, **_KEPT)),
    Kind("quiet stream", _loader(QuietStream)),
    Kind("stream", _loader(Stream), _ORDER),
    Kind("stream, 2 workers", _loader(Stream, **_TWO), slow=True),
    Kind("shuffled stream, 2 workers", _loader(ShuffledStream, **_TWO), slow=True),
    Kind("shuffled stream, 2 workers, drop_last", _loader(ShuffledStream, drop_last=True, **_TWO), slow=True),
    Kind("stateful stream", _loader(StatefulStream)),
    Kind("stateful stream, 2 workers", _loader(StatefulStream, **_TWO)),
    Kind("stateful stream, 2 workers, drop_last", _loader(StatefulStream, drop_last=True, **_TWO), slow=True),
    Kind("stateful stream, 2 persistent workers", _loader(StatefulStream, **_KEPT)),
    Kind("stateful stream, 3 persistent, drop_last", _loader(StatefulStream, drop_last=True, **_THREE), slow=True),
    Kind("stateful stream, unbatched, 2 persistent", _loader(StatefulStream, **_KEPT, batch_size=None), slow=True),
    Kind("StatefulDataLoader", _shuffled(cls=StatefulDataLoader)),
    Kind("StatefulDataLoader, 2 workers", _shuffled(cls=StatefulDataLoader, **_TWO)),
    Kind("StatefulDataLoader, 2 persistent workers", _shuffled(cls=StatefulDataLoader, **_KEPT)),
    Kind("StatefulDataLoader, stateful dataset, 2 workers", _shuffled(Counting, StatefulDataLoader, **_TWO), slow=True),
    Kind("StatefulDataLoader, stateful stream", _loader(StatefulStream, StatefulDataLoader)),
    Kind(
        "StatefulDataLoader, stateful stream, 2 workers", _loader(StatefulStream, StatefulDataLoader, **_TWO), slow=True
    ),
    Kind(
        "StatefulDataLoader, stateful stream, persistent",
        _loader(StatefulStream, StatefulDataLoader, **_KEPT),
        slow=True,
    ),
    Kind("StatefulDataLoader, cursor", _loader(CursorStream, StatefulDataLoader)),
    Kind("StatefulDataLoader, cursor, 2 workers", _loader(CursorStream, StatefulDataLoader, **_TWO), slow=True),
    Kind("StatefulDataLoader, cursor, persistent", _loader(CursorStream, StatefulDataLoader, **_KEPT), slow=True),
    Kind("StatefulDataLoader, stream", _loader(Stream, StatefulDataLoader), _ORDER, slow=True),
    Kind("StatefulDataLoader, stream, 2 workers", _loader(Stream, StatefulDataLoader, **_TWO), slow=True),
]


def shared(kind: Kind, boundaries: Sequence[Any]) -> Sequence[Any]:
    """All of them; for a quick kind with workers each third one, as the next two such kinds have the others.

    Each run from one forks workers. The slow suite resumes each kind from every boundary.
    """
    return boundaries[_WITH_WORKERS.index(kind.name) % 3 :: 3] if kind.name in _WITH_WORKERS else boundaries


_WITH_WORKERS = [kind.name for kind in KINDS if not kind.slow and ("worker" in kind.name or "persistent" in kind.name)]
