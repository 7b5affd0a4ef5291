"""Scripts as users write them: what they keep in variables, closures, functions and workers goes on, or is named."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ckpt_engine import Checkpointer
from tests.loop.test_hidden import Killed, for_a_death_at, report
from tests.support.digests import seed_everything


class Rows(Dataset[Any]):
    """Eight rows; `shift` changes what is loaded."""

    def __init__(self, shift: Callable[[int], float] = float) -> None:
        self.rows = torch.arange(24.0).view(8, 3) / 24
        self.shift = shift

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] + self.shift(index) / 10


class Script:
    """One process of a script: its model, optimizer and loader, and the losses of its steps as text."""

    def __init__(self, folder: Path, seed: int, die_at: int | None) -> None:
        seed_everything(seed)
        self.folder, self.die_at = folder, die_at
        self.net = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.losses: list[str] = []
        self.ckpt: Checkpointer | None = None

    def track(self, dataset: Dataset[Any] | None = None, **options: Any) -> Any:
        return self.track_loader(DataLoader(dataset or Rows(), batch_size=2, shuffle=True, **options))

    def track_loader(self, loader: DataLoader[Any]) -> Any:
        self.loader = loader
        self.ckpt = Checkpointer(self.folder, **for_a_death_at(self.die_at))
        self.run = self.ckpt.track(net=self.net, optimizer=self.optimizer, loader=self.loader)
        return self.run

    def epochs(self) -> range:
        return range(self.run.epoch, 3)

    def step(self, x: torch.Tensor, weight: float = 1.0) -> float:
        """Train on a batch, and die where that was asked for."""
        assert self.ckpt is not None
        self.ckpt.wait(60)
        if self.run.global_step == self.die_at:
            raise Killed
        loss = self.net(x).square().mean()
        self.optimizer.zero_grad()
        (loss * weight).backward()
        self.optimizer.step()
        self.losses.append(f"{self.run.global_step} {loss.item().hex()} {weight:.6f}")
        return float(loss.item())


def live(folder: Path, loop: Callable[[Script], None], seed: int = 1, die_at: int | None = None) -> list[str]:
    """One process; global variables are those of a new one."""
    STATE.update(steps=0, scale=1.0)
    REMEMBERED.clear()
    DRAWN.clear()
    damped.__defaults__[0].clear()  # type: ignore[index]
    counted.calls = 0  # type: ignore[attr-defined]
    noise.cache_clear()
    OfClass.history.clear()
    as_in_a_new_process()
    script = Script(folder, seed, die_at)
    with contextlib.suppress(Killed):
        try:
            loop(script)
        finally:
            assert script.ckpt is not None
            script.ckpt.close()
    return script.losses


# ---- scripts whose resume is exact


def averages_in_a_list(script: Script) -> None:
    average = [one.detach().clone() for one in script.net.parameters()]
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x, 1 + average[0].sum().item())
            with torch.no_grad():
                for mine, other in zip(average, script.net.parameters(), strict=True):
                    mine.lerp_(other, 0.2)


def stops_early_by_a_dict(script: Script) -> None:
    best = {"loss": float("inf"), "bad": 0}
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            loss = script.step(x, 1 / (1 + best["bad"]))
            best["bad"] = 0 if loss < best["loss"] else best["bad"] + 1
            best["loss"] = min(best["loss"], loss)


def takes_from_a_list(script: Script) -> None:
    weights = [1.0 + number / 10 for number in range(20)]
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x, weights.pop(0))


def draws_from_streams_of_its_own(script: Script) -> None:
    numbers, dice = np.random.default_rng(3), random.Random(3)
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x, 1 + numbers.beta(0.4, 0.4) + dice.random())


def counts_in_a_closure(script: Script) -> None:
    def counter() -> Callable[[], float]:
        calls, last = 0, [1.0, 1.0]

        def weight() -> float:
            nonlocal calls
            calls += 1
            last[calls % 2] += 0.1 * calls
            return sum(last)

        return weight

    weight = counter()
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x, weight())


STATE: dict[str, float] = {"steps": 0, "scale": 1.0}
REMEMBERED: dict[int, float] = {}
DRAWN: dict[int, float] = {}


def scaled() -> float:
    STATE["steps"] += 1
    STATE["scale"] *= 0.9
    return STATE["scale"]


def damped(kept: dict[str, int] = {}) -> float:  # noqa: B006
    kept["calls"] = kept.get("calls", 0) + 1
    return 1 / kept["calls"]


def counted() -> float:
    counted.calls += 1  # type: ignore[attr-defined]
    return 1 / counted.calls  # type: ignore[attr-defined, no-any-return]


class OfClass:
    """A dataset part that keeps a history for all of its objects."""

    history: list[float] = []  # noqa: RUF012

    def __call__(self, index: int) -> float:
        self.history.append(float(index))
        return sum(self.history[-3:])


def keeps_state_in_functions(script: Script) -> None:
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x, scaled() + damped() + counted())


def remembered(index: int) -> float:
    if index not in REMEMBERED:
        REMEMBERED[index] = random.random()
    return REMEMBERED[index]


def remembers_what_it_drew(script: Script) -> None:
    script.track(Rows(remembered))
    for _ in script.epochs():
        for x in script.loader:
            script.step(x)


def keeps_a_history_in_a_class(script: Script) -> None:
    script.track(Rows(OfClass()))
    for _ in script.epochs():
        for x in script.loader:
            script.step(x)


METRIC = torchmetrics.MeanMetric()


def seen_so_far(loss: float) -> float:
    METRIC.update(loss)
    return float(METRIC.compute())


def counts_in_metrics_that_nothing_tracks(script: Script) -> None:
    METRIC.reset()
    metrics = {"mean": torchmetrics.MeanMetric()}
    metrics["mean"].update(1.0)
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            loss = script.step(x, float(metrics["mean"].compute()))
            metrics["mean"].update(seen_so_far(loss))


class Warming:
    """Shifts more with each call, by a stream of its own."""

    def __init__(self) -> None:
        self.calls, self.dice = 0, random.Random(3)

    def __call__(self, index: int) -> float:
        self.calls += 1
        return self.calls + self.dice.random()


def warms_up_in_workers(script: Script) -> None:
    script.track(Rows(Warming()), num_workers=2)
    for _ in script.epochs():
        for x in script.loader:
            script.step(x)


def warms_up_in_workers_that_stay(script: Script) -> None:
    script.track(Rows(Warming()), num_workers=2, persistent_workers=True)
    for _ in script.epochs():
        for x in script.loader:
            script.step(x)


def draws_in_the_collate_function_of_workers(script: Script) -> None:
    def noisy() -> Callable[[Any], torch.Tensor]:
        own = torch.Generator().manual_seed(3)
        return lambda rows: torch.stack(rows) + torch.rand(1, generator=own)

    script.track(collate_fn=noisy(), num_workers=2)
    for _ in script.epochs():
        for x in script.loader:
            script.step(x)


# ---- scripts whose resume cannot be exact


def ramps(script: Script) -> None:
    def ramp() -> Iterator[float]:
        for number in itertools.count():
            yield 1 + number / 10

    weights = ramp()
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x, next(weights))


def trains_on_a_loader_that_nothing_tracks(script: Script) -> None:
    others = itertools.chain.from_iterable(DataLoader(Rows(), batch_size=1, shuffle=True) for _ in range(3))
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x, 1 + next(others).mean().item())


def shrinks_by_a_list_of_its_own(script: Script) -> None:
    weights = [1.0]
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x, weights[-1])
            weights.append(0.9 * weights[-1])


def evaluates_with_workers_that_stay(script: Script) -> None:
    evaluation = DataLoader(Rows(lambda index: random.random()), batch_size=4, num_workers=1, persistent_workers=True)
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x)
        script.losses.append(f"{script.run.global_step} {sum(x.sum().item() for x in evaluation)}")


class Prefetcher:
    """Moves batches to a device, say."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return (batch * 1.0 for batch in self.loader)


def evaluates_with_workers_within_an_object(script: Script) -> None:
    evaluation = Prefetcher(DataLoader(Rows(), batch_size=4, num_workers=1, persistent_workers=True))
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x)
        script.losses.append(f"{script.run.global_step} {sum(x.sum().item() for x in evaluation)}")


def evaluates_with_a_stream_within_two(script: Script) -> None:
    loader = DataLoader(Rows(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
    evaluation = Prefetcher([Prefetcher(loader)][0])
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x)
        script.losses.append(f"{script.run.global_step} {next(iter(evaluation)).sum().item()}")


@functools.lru_cache
def noise(index: int) -> float:
    return random.random()


def keeps_noise_in_a_cache(script: Script) -> None:
    script.track(Rows(noise))
    for _ in script.epochs():
        for x in script.loader:
            script.step(x)


def sets_the_rate_from_a_list(script: Script) -> None:
    rates = [0.1, 0.05, 0.02]
    script.track()
    for _ in script.epochs():
        for group in script.optimizer.param_groups:
            group["lr"] = rates[0]
        rates.pop(0)
        for x in script.loader:
            script.step(x)


NUMBERS = itertools.count()


def numbered(rows: Any) -> torch.Tensor:
    return torch.stack(rows) * (1 + next(NUMBERS) % 3 / 10)


def numbers_its_batches(script: Script) -> None:
    script.track(collate_fn=numbered)
    for _ in script.epochs():
        for x in script.loader:
            script.step(x)


def numbers_its_batches_in_workers(script: Script) -> None:
    script.track(collate_fn=numbered, num_workers=1)
    for _ in script.epochs():
        for x in script.loader:
            script.step(x)


def tracked(script: Script, **loaders: DataLoader[Any]) -> None:
    script.ckpt = Checkpointer(script.folder, **for_a_death_at(script.die_at))
    script.run = script.ckpt.track(net=script.net, optimizer=script.optimizer, **loaders)


def asks_another_loader_before_its_loop(script: Script) -> None:
    loader, other = (DataLoader(Rows(), batch_size=size, shuffle=True) for size in (2, 1))
    tracked(script, loader=loader, other=other)
    for _ in script.epochs():
        scale = next(iter(other)).mean().item()
        for x in loader:
            script.step(x, 1 + scale)


def keeps_the_iterator_that_it_asks_before(script: Script) -> None:
    loader, other = (DataLoader(Rows(), batch_size=size, shuffle=True) for size in (2, 1))
    tracked(script, loader=loader, other=other)
    for _ in script.epochs():
        batches = iter(other)
        scale = next(batches).mean().item()
        for x in loader:
            script.step(x, 1 + scale)


class Wearing(Rows):
    """Each look at a row wears it off."""

    def __getitem__(self, index: int) -> torch.Tensor:
        self.rows[index] *= 0.9
        return self.rows[index].clone()


def wears_its_rows_off_in_workers(script: Script) -> None:
    script.track(Wearing(), num_workers=1, persistent_workers=True)
    for _ in script.epochs():
        for x in script.loader:
            script.step(x)


def _learn(alpha: torch.Tensor, optimizer: torch.optim.Optimizer, loss: float) -> None:
    """A step of a tensor that belongs to no module, as a temperature in reinforcement learning."""
    (alpha.square().sum() * loss + alpha.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


class Temperature:
    """Learned beside the model."""

    def __init__(self) -> None:
        self.alpha = torch.zeros(1, requires_grad=True)


def learns_a_variable(script: Script) -> None:
    alpha = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([alpha], lr=0.1)
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            loss = script.step(x, 1 + alpha.item())
            _learn(alpha, optimizer, loss)


def learns_an_attribute(script: Script) -> None:
    temperature = Temperature()
    optimizer = torch.optim.SGD([temperature.alpha], lr=0.1)
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            loss = script.step(x, 1 + temperature.alpha.item())
            _learn(temperature.alpha, optimizer, loss)


ALPHA = torch.zeros(1, requires_grad=True)


def as_in_a_new_process() -> None:
    """No function names both the variable and a method that changes something within."""
    ALPHA.data = torch.zeros(1)


def learns_a_global_variable(script: Script) -> None:
    optimizer = torch.optim.SGD([ALPHA], lr=0.1)
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            loss = script.step(x, 1 + ALPHA.item())
            _learn(ALPHA, optimizer, loss)


def learns_a_list_by_hand(script: Script) -> None:
    weights = [torch.zeros(1, requires_grad=True), torch.ones(2, requires_grad=True)]
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            loss = script.step(x, 1 + weights[0].item())
            (weights[0].square().sum() * loss + weights[0].sum() * weights[1].sum()).backward()
            for one in weights:
                assert one.grad is not None
                one.data -= 0.1 * one.grad
                one.grad = None


IN_THE_FIRST_EPOCH: dict[Callable[[Script], None], str] = {
    asks_another_loader_before_its_loop: "the batch of 'other' that is asked for before the loop over 'loader'",
}
EXACT: tuple[Callable[[Script], None], ...] = (
    averages_in_a_list,
    stops_early_by_a_dict,
    takes_from_a_list,
    draws_from_streams_of_its_own,
    counts_in_a_closure,
    keeps_state_in_functions,
    remembers_what_it_drew,
    keeps_a_history_in_a_class,
    counts_in_metrics_that_nothing_tracks,
    warms_up_in_workers,
    warms_up_in_workers_that_stay,
    draws_in_the_collate_function_of_workers,
    learns_a_variable,
    learns_an_attribute,
    learns_a_global_variable,
    learns_a_list_by_hand,
)
NAMED: dict[Callable[[Script], None], str] = {
    evaluates_with_workers_that_stay: "track(…, evaluation=evaluation)",
    evaluates_with_workers_within_an_object: "track(…, evaluation=evaluation.loader)",
    evaluates_with_a_stream_within_two: "track(…, evaluation=evaluation.loader.loader)",
    sets_the_rate_from_a_list: "optimizer.param_groups[0]['lr'] was 0.02",
    keeps_the_iterator_that_it_asks_before: "the batch of 'other' that is asked for before the loop over 'loader'",
    numbers_its_batches: "tests.loop.test_scripts.NUMBERS",
    numbers_its_batches_in_workers: "loader workers change collate_fn.NUMBERS",
    wears_its_rows_off_in_workers: "loader workers change dataset.rows",
}


@pytest.mark.cells(4)
@pytest.mark.parametrize("loop", EXACT, ids=lambda loop: loop.__name__)
def test_it_goes_on_where_it_was(loop: Callable[[Script], None], tmp_path: Path) -> None:
    """Over three processes, each with another seed, and nothing is named."""
    wanted = live(tmp_path / "whole", loop)
    got = live(tmp_path / "killed", loop, 1, 5) + live(tmp_path / "killed", loop, 2, 7)
    assert got + live(tmp_path / "killed", loop, 3) == wanted
    assert report(tmp_path / "killed")["not_restored"] == []


@pytest.mark.cells(2)
@pytest.mark.parametrize("loop", NAMED, ids=lambda loop: loop.__name__)
def test_it_says_what_is_not_as_it_was(loop: Callable[[Script], None], tmp_path: Path) -> None:
    """The true cause, and what to write instead."""
    live(tmp_path, loop, 1, 2)
    live(tmp_path, loop, 2, 10)
    live(tmp_path, loop, 3)
    said = [f"{row['name']}: {row['why']}" for row in report(tmp_path)["not_restored"]]
    assert [one for one in said if NAMED[loop] in one], said


PROVED: dict[Callable[[Script], None], str] = {
    ramps: "weights",
    trains_on_a_loader_that_nothing_tracks: "random",  # a pass draws the seed of its workers
    keeps_noise_in_a_cache: "batch",
    shrinks_by_a_list_of_its_own: "weights",
}


@pytest.mark.cells(1)
@pytest.mark.parametrize("loop", PROVED, ids=lambda loop: loop.__name__)
def test_what_nothing_names_shows_in_the_steps_that_are_repeated(
    loop: Callable[[Script], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An iterator or a list of the script, or a cache of random results: a step after the snapshot differs."""
    options = {"every_n_steps": 6, "at_end": False, "writer": "thread"}
    monkeypatch.setattr(f"{__name__}.for_a_death_at", lambda _: options)
    live(tmp_path, loop, 1, 11)
    live(tmp_path, loop, 2)
    replay = report(tmp_path)["replay"]
    assert replay["result"] == "different"
    assert replay["first"]["what"] == PROVED[loop]
    assert replay["first"]["step"] <= 8


@pytest.mark.parametrize("loop", IN_THE_FIRST_EPOCH, ids=lambda loop: loop.__name__)
def test_what_comes_before_a_loop_is_named_in_the_first_epoch_too(
    loop: Callable[[Script], None], tmp_path: Path
) -> None:
    """No later value shows yet that it changes."""
    live(tmp_path, loop, 1, 2)
    live(tmp_path, loop, 9)
    assert [row for row in report(tmp_path)["not_restored"] if IN_THE_FIRST_EPOCH[loop] in row["why"]]
