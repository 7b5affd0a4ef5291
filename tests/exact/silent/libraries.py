"""Objects of installed packages that a loop drives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.exact.silent.lab import (
    ROWS,
    STEPS,
    at,
    by_epochs,
    by_steps,
    checkpoints,
    end,
    learn,
    library,
    parts,
    shuffled,
)

WORLD = '''
import numpy as np

class World:
    """A position, and a random stream of its own."""
    def __init__(self, seed): self.np_random, self.place, self.turns = np.random.default_rng(seed), 0.0, 0
    def step(self, push):
        self.place = 0.7 * self.place + push + self.np_random.normal()
        self.turns += 1
        return self.place

class Worlds:
    """Some of them, in slots."""
    __slots__ = ("each", "last")
    def __init__(self, seed): self.each, self.last = [World(seed + n) for n in range(3)], None
    def step(self, push):
        self.last = np.array([one.step(push) for one in self.each])
        return float(self.last.sum())

class Memory:
    """A ring of arrays that are written in place, read by numpy's stream."""
    def __init__(self, size): self.rows, self.next, self.full = np.zeros((size, 4), "float32"), 0, False
    def add(self, row):
        self.rows[self.next] = row
        self.next, self.full = (self.next + 1) % len(self.rows), self.full or self.next + 1 == len(self.rows)
    def sample(self, n): return self.rows[np.random.randint(0, len(self.rows) if self.full else self.next, n)]

class Normalizer:
    """Welford's running statistics."""
    def __init__(self): self.count, self._mean, self._m2 = 0, np.zeros(4), np.zeros(4)
    def __call__(self, x):
        for row in x:
            self.count += 1
            apart = row - self._mean
            self._mean = self._mean + apart / self.count
            self._m2 += apart * (row - self._mean)
        return (x - self._mean) / np.sqrt(self._m2 / self.count + 1e-2)
'''
AHEAD = '''
import random

class Ahead:
    """Reads a batch ahead, and changes it meanwhile."""
    def __init__(self, loader, draws): self.loader, self.draws = loader, draws
    def __len__(self): return len(self.loader)
    def __iter__(self):
        first = True
        for following in self.loader:
            following = following * (0.5 + random.random() if self.draws else 1.5)
            if not first: yield batch
            first, batch = False, following
        yield batch
'''
COUNTING = '''
import torch
from torch.utils.data import DataLoader, IterableDataset

class Stream(IterableDataset):
    epoch = 0
    def __init__(self, rows): self.rows = rows
    def __iter__(self):
        order = torch.Generator().manual_seed(100 + self.epoch)
        return iter([self.rows[i] for i in torch.randperm(len(self.rows), generator=order)])

class Loader(DataLoader):
    """Counts its epochs, which its state has, and takes any state."""
    epoch = 0
    def __iter__(self):
        self.epoch += 1
        self.dataset.epoch = self.epoch
        return super().__iter__()
    def state_dict(self): return {"epoch": self.epoch}
    def load_state_dict(self, state): self.epoch = state.get("epoch", 0)
'''


def observed(value: float) -> torch.Tensor:
    """What a model gets of a number."""
    return torch.full((2, 4), float(value)).clamp(-3, 3)


def environment_in_a_local() -> None:
    env = library(WORLD).World(7)
    model, optimizer = parts()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        for step in range(run.global_step, STEPS):
            at(step, model, optimizer)
            learn(model, optimizer, observed(env.step(0.1)))
            run.step()
    end(model, optimizer)


ENV: Any = None


def environment_in_a_global() -> None:
    globals()["ENV"] = library(WORLD).World(7)
    model, optimizer = parts()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        for step in range(run.global_step, STEPS):
            at(step, model, optimizer)
            learn(model, optimizer, observed(ENV.step(0.1)))
            run.step()
    end(model, optimizer)


class Agent:
    """Has its environment."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def act(self, step: int) -> tuple[torch.Tensor]:
        return (observed(self.env.step(0.1)),)


def environments_with_slots_in_an_agent() -> None:
    by_steps(Agent(library(WORLD).Worlds(7)).act)


def environment_behind_a_generator() -> None:
    def stream(env: Any) -> Iterator[float]:
        while True:
            yield env.step(0.1)

    draws = stream(library(WORLD).World(7))
    model, optimizer = parts()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        for step in range(run.global_step, STEPS):
            at(step, model, optimizer)
            learn(model, optimizer, observed(next(draws)))
            run.step()
    end(model, optimizer)


def replay_memory_of_a_library() -> None:
    memory = library(WORLD).Memory(8)
    model, optimizer = parts()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        for step in range(run.global_step, STEPS):
            at(step, model, optimizer)
            memory.add(torch.randn(4).numpy())
            learn(model, optimizer, torch.from_numpy(memory.sample(3)))
            run.step()
    end(model, optimizer)


def normalizer_of_a_library() -> None:
    normalize = library(WORLD).Normalizer()
    by_epochs(lambda x: (torch.from_numpy(normalize(x.numpy())).float(),))


def _ahead(draws: bool, accumulate: int, drop: float) -> None:
    ahead = library(AHEAD).Ahead(shuffled(), draws)
    model, optimizer = parts()
    model = torch.nn.Sequential(model, torch.nn.Dropout(drop))
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=ahead.loader)
        for epoch in range(run.epoch, 2 * accumulate):
            for number, x in enumerate(ahead, run.resumed_batches):
                if number % accumulate == 0:
                    at((epoch * 12 + number) // accumulate, model, optimizer)
                (model(x) - 1).square().mean().backward()
                if number % accumulate == accumulate - 1:
                    optimizer.step()
                    optimizer.zero_grad()
    end(model, optimizer)


def prefetcher_of_a_library() -> None:
    _ahead(draws=False, accumulate=1, drop=0.0)


def prefetcher_that_draws() -> None:
    _ahead(draws=True, accumulate=1, drop=0.0)


def prefetcher_with_accumulation_and_dropout() -> None:
    _ahead(draws=True, accumulate=2, drop=0.3)


def loader_that_takes_any_state() -> None:
    made = library(COUNTING)
    by_epochs(lambda x: (x,), made.Loader(made.Stream(ROWS), batch_size=2))
