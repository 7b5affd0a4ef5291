"""Scripts whose resume was silently another run once: each is exact now, or says what is not as it was."""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from tests.tracking.test_hidden import Killed, report
from tests.tracking.test_scripts import Script, live

MEAN = torch.zeros(3)
AVERAGES: dict[str, torch.Tensor] = {}


@pytest.fixture(autouse=True)
def _a_new_process() -> None:
    _forget()


def _forget() -> None:
    MEAN.zero_()
    AVERAGES.clear()


@dataclass
class Progress:
    """Damps the step when the mean of the last losses is above the best one."""

    best: float = float("inf")
    window: list[float] = field(default_factory=list)
    scale: float = 1.0

    def update(self, loss: float) -> None:
        self.window.append(loss)
        self.window = self.window[-4:]
        mean = sum(self.window) / len(self.window)
        self.scale *= 1.0 if mean < self.best else 0.9
        self.best = min(mean, self.best)


class Pool:
    """Gives back an older batch now and then."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def query(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.kept) < 6:
            self.kept.append(x)
            return x
        place = random.randrange(6)
        older = self.kept[place].clone()
        self.kept[place] = x
        return older


def keeps_a_window_in_an_object(script: Script) -> None:
    progress = Progress()
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            progress.update(script.step(x, progress.scale))


def keeps_a_pool_in_an_object(script: Script) -> None:
    pool = Pool()
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(pool.query(x))


def noisy() -> Callable[[torch.Tensor], torch.Tensor]:
    """A hook of a gradient, with a random stream and a count of its own."""
    stream, calls = torch.Generator().manual_seed(4), 0

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return gradient + torch.randn(gradient.shape, generator=stream) / calls

    return hook


def adds_noise_in_hooks(script: Script) -> None:
    for one in script.net.parameters():
        one.register_hook(noisy())
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x)


def stepper(script: Script) -> Callable[[torch.Tensor], None]:
    """A step with a sum in its closure that is a tensor."""
    total = torch.zeros(())

    def step(x: torch.Tensor) -> None:
        total.add_(script.step(x, 1 / (1 + total.item())))

    return step


def sums_up_in_a_closure(script: Script) -> None:
    steps = {"only": stepper(script)}
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            steps["only"](x)


def normalised(x: torch.Tensor) -> torch.Tensor:
    MEAN.lerp_(x.mean(0), 0.2)
    return x - MEAN


def averages_in_a_global_tensor(script: Script) -> None:
    _forget()
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(normalised(x))


def average(script: Script) -> float:
    for name, one in script.net.state_dict().items():
        AVERAGES[name] = AVERAGES[name] * 0.8 + one * 0.2 if name in AVERAGES else one.clone()
    return float(AVERAGES["bias"])


def fills_a_global_dict_of_tensors(script: Script) -> None:
    _forget()
    script.track()
    weight = 0.0
    for _ in script.epochs():
        for x in script.loader:
            script.step(x, 1 + (float(AVERAGES["bias"]) if AVERAGES else weight))
            average(script)


@pytest.mark.parametrize(
    "loop",
    [
        keeps_a_window_in_an_object,
        keeps_a_pool_in_an_object,
        adds_noise_in_hooks,
        sums_up_in_a_closure,
        averages_in_a_global_tensor,
        fills_a_global_dict_of_tensors,
    ],
    ids=lambda loop: loop.__name__,
)
def test_it_goes_on_where_it_was(loop: Callable[[Script], None], tmp_path: Path) -> None:
    """Over three processes, each with another seed."""
    wanted = live(tmp_path / "whole", loop)
    got = live(tmp_path / "killed", loop, 1, 5) + live(tmp_path / "killed", loop, 2, 7)
    assert got + live(tmp_path / "killed", loop, 3) == wanted


@pytest.mark.parametrize("loop", [averages_in_a_global_tensor, fills_a_global_dict_of_tensors])
def test_what_is_restored_is_not_named(
    loop: Callable[[Script], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also what begins empty and grows in the first step of a run."""
    live(tmp_path, loop, 1, 5)
    live(tmp_path, loop, 2, 7)
    assert report(tmp_path)["not_restored"] == []
    assert [one for one in caplog.messages if "carried from step to step" in one] == []


def draws_before_it_asks(script: Script) -> None:
    script.track()
    batches = iter(script.loader)
    for _ in range(script.run.global_step, 12):
        noise = torch.randn(2, 3)
        try:
            x = next(batches)
        except StopIteration:
            batches = iter(script.loader)
            x = next(batches)
        script.step(x + noise)


def test_what_a_loop_draws_before_it_asks_is_named(tmp_path: Path) -> None:
    """The loop begins the step again after a resume, and draws again."""
    live(tmp_path, draws_before_it_asks, 1, 3)
    live(tmp_path, draws_before_it_asks, 2)
    said = [row["why"] for row in report(tmp_path)["not_restored"]]
    assert any(one.startswith("noise is another one in draws_before_it_asks (") for one in said), said


def train_from_a_buffer(folder: Path, die_at: int | None) -> None:
    """A loop that makes its batches itself, two ahead."""
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    buffer, streams = [torch.randn(2, 3), torch.randn(2, 3)], [random.Random(1)]
    with contextlib.suppress(Killed), Checkpointer(folder, every_n_steps=1, writer="thread") as ckpt:
        run = ckpt.track(net=net, optimizer=optimizer)
        for step in range(run.global_step, 6):
            if step == die_at:
                raise Killed
            x, buffer[step % 2] = buffer[step % 2], torch.randn(2, 3)
            optimizer.zero_grad()
            (net(x).square().mean() * streams[0].random()).backward()
            optimizer.step()
            run.step()
            ckpt.wait(60)


def test_a_buffer_that_is_filled_again_is_named_where_nothing_saves_it(tmp_path: Path) -> None:
    """Without a loader a loop announces its steps itself: its variables are not known before the first one."""
    train_from_a_buffer(tmp_path, 4)
    train_from_a_buffer(tmp_path, None)
    assert any(row["why"].startswith("buffer") for row in report(tmp_path)["not_restored"])


class Prefetcher:
    """Reads ahead on a thread of its own."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.batches = loader, queue.Queue[Any](2)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        for x in self.loader:
            self.batches.put(x)
        self.batches.put(None)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while (x := self.batches.get(timeout=60)) is not None:
            yield x


def reads_ahead_on_a_thread(script: Script) -> None:
    script.track()
    for _ in script.epochs():
        for x in Prefetcher(script.loader):
            script.step(x)


def test_no_snapshot_is_taken_on_a_thread_that_does_not_train(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights change while it asks for the next batch: a copy of them could be torn. It is said once."""
    with caplog.at_level(logging.WARNING):
        live(tmp_path, reads_ahead_on_a_thread)
    said = [one for one in caplog.messages if "another thread than the one that trains" in one]
    assert len(said) == 1
    assert not list((tmp_path / "snapshots").glob("[!.]*.json"))
