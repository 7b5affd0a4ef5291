"""Random numbers of streams of a script's own, and numbers that are drawn once and used later."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.exact.silent.lab import ROWS, STEPS, at, by_epochs, by_steps, checkpoints, end, learn, parts, shuffled


def generator_in_a_local() -> None:
    own = torch.Generator().manual_seed(3)
    model, optimizer = parts()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        for step in range(run.global_step, STEPS):
            at(step, model, optimizer)
            learn(model, optimizer, torch.randn(2, 4, generator=own))
            run.step()
    end(model, optimizer)


def generators_of_numpy_and_python() -> None:
    numbers, dice = np.random.default_rng(3), random.Random(3)
    by_epochs(lambda x: (x * (1 + dice.random()), 1 + float(numbers.beta(0.4, 0.4))))


def stream_in_a_default(x: torch.Tensor, dice: random.Random = random.Random(5)) -> tuple[torch.Tensor]:  # noqa: B008
    return (x + dice.gauss(0, 1),)


def stream_of_a_default_argument() -> None:
    by_epochs(stream_in_a_default)


def legacy_stream_of_numpy() -> None:
    state = np.random.RandomState(3)
    by_epochs(lambda x: (x + float(state.randn()),))


def quasi_random_points() -> None:
    points = torch.quasirandom.SobolEngine(4, scramble=True, seed=3)
    by_steps(lambda step: (points.draw(2),))


def stream_behind_a_generator() -> None:
    def noise() -> Iterator[float]:
        dice = random.Random(3)
        while True:
            yield dice.random()

    weights = noise()
    model, optimizer = parts()
    loader = shuffled()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, optimizer)
                learn(model, optimizer, x, 1 + next(weights))
    end(model, optimizer)


def noise_drawn_before_the_loop() -> None:
    model, optimizer = parts()
    model.append(nn.BatchNorm1d(1))
    noise, loader = torch.randn(8, 4), shuffled()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, optimizer)
                learn(model, optimizer, x)
                model(noise)
    end(model, optimizer)


def weights_drawn_before_the_loop() -> None:
    weights = np.random.rand(4).astype("float32")
    model, optimizer = parts()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        for step in range(run.global_step, STEPS):
            at(step, model, optimizer)
            learn(model, optimizer, torch.randn(2, 4) * torch.from_numpy(weights))
            run.step()
    end(model, optimizer)


def rows_split_before_the_loop() -> None:
    rows = torch.utils.data.random_split(ROWS, [12, 12])[0]  # type: ignore[arg-type]
    by_epochs(lambda x: (x,), torch.utils.data.DataLoader(rows, batch_size=1))


def split_by_a_shuffled_list() -> None:
    order = list(range(24))
    random.shuffle(order)
    model, optimizer = parts()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        for step in range(run.global_step, STEPS):
            at(step, model, optimizer)
            learn(model, optimizer, ROWS[order[step]][None])
            run.step()
    end(model, optimizer)


def draws_between_track_and_loop() -> None:
    model, optimizer = parts()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        begin = run.global_step
        nn.init.normal_(torch.empty(5))
        for step in range(begin, STEPS):
            at(step, model, optimizer)
            learn(model, optimizer, torch.randn(2, 4))
            run.step()
    end(model, optimizer)


def draws_behind_the_step() -> None:
    model, optimizer = parts()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        for step in range(run.global_step, STEPS):
            at(step, model, optimizer)
            learn(model, optimizer, torch.randn(2, 4))
            run.step()
            torch.randn(3)
    end(model, optimizer)


def noise_kept_for_some_steps() -> None:
    model, optimizer = parts()
    loader, noise = shuffled(), torch.zeros(4)
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, optimizer)
                if number % 7 == 0:
                    noise = torch.randn(4)
                learn(model, optimizer, x + noise)
    end(model, optimizer)


@functools.lru_cache
def _shift(kind: int) -> float:
    return random.random()


def numbers_that_a_cache_keeps() -> None:
    by_epochs(lambda x: (x, 1 + _shift(int(x[0, 0] > 0))))


def noise_of(shape: Any) -> torch.Tensor:
    """Draws at its first call."""
    if not hasattr(noise_of, "kept"):
        noise_of.kept = torch.randn(shape)  # type: ignore[attr-defined]
    kept: torch.Tensor = noise_of.kept  # type: ignore[attr-defined]
    return kept


def noise_that_a_function_keeps() -> None:
    by_epochs(lambda x: (x + noise_of(x.shape),))


class Masks(nn.Module):
    """Draws a mask at its first call, which is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.bernoulli(torch.full_like(x[0], 0.5))
        return x * self.mask


def mask_that_a_layer_keeps() -> None:
    layer = Masks()
    by_epochs(lambda x: (layer(x),))


def noise_scaled_in_a_hook() -> None:
    own, calls = torch.Generator().manual_seed(4), 0

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return gradient + torch.randn(gradient.shape, generator=own) / calls

    model, optimizer = parts()
    for one in model.parameters():
        one.register_hook(hook)
    loader = shuffled()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, optimizer)
                learn(model, optimizer, x)
    end(model, optimizer)
