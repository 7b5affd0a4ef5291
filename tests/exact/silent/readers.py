"""Where a script gets its rows: files, iterators, samplers and pools, each with a place or an order of its own."""

from __future__ import annotations

import collections
import csv
import itertools
import queue
import random
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
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
)

from tests.exact.silent.lab import ROWS, STEPS, at, by_epochs, by_steps, checkpoints, end, learn, parts, shuffled


def _written(name: str) -> Path:
    path = Path(name)
    path.write_text("".join(",".join(map(str, row.tolist())) + "\n" for row in ROWS))
    return path


def _row(text: Any) -> torch.Tensor:
    return torch.tensor([[float(one) for one in text]])


def file_read_line_by_line() -> None:
    model, optimizer = parts()
    with _written("rows.csv").open() as lines, checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        for step in range(run.global_step, STEPS):
            at(step, model, optimizer)
            learn(model, optimizer, _row(next(lines).split(",")))
            run.step()
    end(model, optimizer)


def table_behind_a_csv_reader() -> None:
    rows = csv.reader(_written("rows.csv").open())
    by_steps(lambda step: (_row(next(rows)),))


class Lines:
    """Reads on, and begins again at the end of the file."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")

    def next(self, step: int) -> tuple[torch.Tensor]:
        line = self.file.readline()
        if not line:
            self.file.seek(0)
            line = self.file.readline()
        return (_row(line.decode().split(",")),)


def file_in_an_object() -> None:
    by_steps(Lines(_written("rows.csv")).next)


def cursor_of_a_database() -> None:
    table = sqlite3.connect(":memory:")
    table.execute("create table rows (a, b, c, d)")
    table.executemany("insert into rows values (?, ?, ?, ?)", ROWS.tolist())
    cursor = table.execute("select * from rows")
    by_steps(lambda step: (_row(cursor.fetchone()),))


class Mapped:
    """A file of numbers in memory, and a place in it."""

    def __init__(self) -> None:
        ROWS.numpy().tofile("rows.bin")
        self.rows, self.place = np.memmap("rows.bin", "float32", "r", shape=(24, 4)), 0

    def next(self, step: int) -> tuple[torch.Tensor]:
        self.place = (self.place + 5) % 24
        return (torch.from_numpy(self.rows[self.place : self.place + 1].copy()),)


def place_in_a_mapped_file() -> None:
    by_steps(Mapped().next)


def place_in_a_local() -> None:
    model, optimizer = parts()
    place = 0
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        for step in range(run.global_step, STEPS):
            at(step, model, optimizer)
            learn(model, optimizer, ROWS[place : place + 2])
            place = (place + 5) % 22
            run.step()
    end(model, optimizer)


def cycle_over_a_loader() -> None:
    model, optimizer = parts()
    batches = itertools.cycle(DataLoader(ROWS[:14], batch_size=2, shuffle=True))  # type: ignore[arg-type]
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        for step in range(run.global_step, STEPS):
            at(step, model, optimizer)
            learn(model, optimizer, next(batches))
            run.step()
    end(model, optimizer)


def cycle_over_the_tracked_loader() -> None:
    model, optimizer = parts()
    loader = DataLoader(ROWS[:14], batch_size=2, shuffle=True)  # type: ignore[arg-type]
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        begin = run.global_step
        for step, x in zip(range(begin, STEPS), itertools.cycle(loader), strict=False):
            at(step, model, optimizer)
            learn(model, optimizer, x)
            run.step()
    end(model, optimizer)


class Endless:
    """Begins its loader when it is made, before it is tracked."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.batches = iter(loader)

    def next(self) -> torch.Tensor:
        try:
            batch = next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            batch = next(self.batches)
        found: torch.Tensor = batch
        return found


def iterator_made_before_it_is_tracked() -> None:
    loader = shuffled()
    batches = Endless(loader)
    model, optimizer = parts()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for step in range(run.global_step, STEPS):
            at(step, model, optimizer)
            learn(model, optimizer, batches.next())
            run.step()
    end(model, optimizer)


def second_loader_that_nothing_tracks() -> None:
    others = iter(DataLoader(ROWS, batch_size=1, shuffle=True))  # type: ignore[arg-type]
    by_epochs(lambda x: (x + next(others),))


def generator_that_reads_ahead() -> None:
    def ahead(loader: Any) -> Iterator[torch.Tensor]:
        before = None
        for x in loader:
            if before is not None:
                yield before
            before = x * random.random()
        assert before is not None
        yield before

    model, optimizer = parts()
    loader = shuffled()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(ahead(loader), run.resumed_batches):
                at(epoch * 12 + number, model, optimizer)
                learn(model, optimizer, x)
    end(model, optimizer)


def thread_that_makes_batches() -> None:
    made = queue.Queue[torch.Tensor](2)
    own = torch.Generator().manual_seed(3)

    def make() -> None:
        while True:
            made.put(torch.randn(2, 4, generator=own))

    threading.Thread(target=make, daemon=True).start()
    model, optimizer = parts()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        for step in range(run.global_step, STEPS):
            at(step, model, optimizer)
            learn(model, optimizer, made.get(timeout=60))
            run.step()
    end(model, optimizer)


class Pool:
    """Gives back an older batch now and then."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def query(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        if len(self.kept) < 5:
            self.kept.append(x)
            return (x,)
        place = random.randrange(5)
        older, self.kept[place] = self.kept[place], x
        return (older,)


def pool_of_older_batches() -> None:
    by_epochs(Pool().query)


def pool_in_a_local_list() -> None:
    model, optimizer = parts()
    loader, pool = shuffled(), []
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, optimizer)
                pool.append(x)
                learn(model, optimizer, pool[len(pool) // 2])
    end(model, optimizer)


def replay_from_a_deque() -> None:
    model, optimizer = parts()
    memory = collections.deque[torch.Tensor](maxlen=9)
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        for step in range(run.global_step, STEPS):
            at(step, model, optimizer)
            memory.append(torch.randn(4))
            learn(model, optimizer, torch.stack(random.sample(memory, min(3, len(memory)))))
            run.step()
    end(model, optimizer)


class OwnOrder(Sampler[int]):
    """Shuffles by a stream of its own."""

    def __init__(self, rows: int) -> None:
        self.rows, self.own = rows, torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.rows, generator=self.own).tolist())

    def __len__(self) -> int:
        return self.rows


def sampler_with_a_stream() -> None:
    by_epochs(lambda x: (x,), DataLoader(ROWS, batch_size=2, sampler=OwnOrder(24)))  # type: ignore[arg-type]


def sampler_whose_weights_change() -> None:
    weights = torch.ones(24, dtype=torch.float64)
    loader: Any = DataLoader(ROWS, batch_size=2, sampler=WeightedRandomSampler(weights, 24))  # type: ignore[arg-type]
    loader.sampler.weights = weights

    def hardest(x: torch.Tensor) -> tuple[torch.Tensor]:
        weights[int(x.abs().sum() * 7) % 24] *= 3
        return (x,)

    by_epochs(hardest, loader)


def _nodes(sampler: Any) -> None:
    from torchdata.nodes import Batcher, Loader, Mapper, SamplerWrapper

    rows = Mapper(SamplerWrapper(sampler), ROWS.__getitem__)
    loader = Loader(Mapper(Batcher(rows, 2), torch.stack))
    model, optimizer = parts()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        while run.global_step < STEPS:
            for x in loader:
                at(run.global_step, model, optimizer)
                learn(model, optimizer, x)
                run.step()
    end(model, optimizer)


def nodes_shuffled_by_a_stream() -> None:
    _nodes(RandomSampler(range(12), generator=torch.Generator().manual_seed(3)))


def nodes_shuffled_without_a_stream() -> None:
    _nodes(RandomSampler(range(12)))


def nodes_shuffled_by_a_sampler() -> None:
    _nodes(OwnOrder(12))


def nodes_shuffled_by_epochs() -> None:
    _nodes(DistributedSampler(range(12), num_replicas=1, rank=0))  # type: ignore[arg-type]


class Buffered(IterableDataset[torch.Tensor]):
    """Shuffles rows in a buffer by a stream of its own."""

    def __init__(self) -> None:
        self.dice = random.Random(4)

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer: list[torch.Tensor] = []
        for row in ROWS:
            buffer.append(row)
            if len(buffer) > 6:
                yield buffer.pop(self.dice.randrange(len(buffer)))
        self.dice.shuffle(buffer)
        yield from buffer


def rows_shuffled_in_a_buffer() -> None:
    by_epochs(lambda x: (x,), DataLoader(Buffered(), batch_size=2))


class Priorities(Dataset[torch.Tensor]):
    """Rows that are scaled by an array, which the loop changes in place."""

    def __init__(self) -> None:
        self.scale = np.ones(24)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return ROWS[index] * float(self.scale[index])


def array_of_a_dataset_changed_in_place() -> None:
    rows = Priorities()

    def change(x: torch.Tensor) -> tuple[torch.Tensor]:
        rows.scale *= 1 + 0.1 * float(x.mean())
        return (x,)

    by_epochs(change, DataLoader(rows, batch_size=2, shuffle=True))
