"""Random streams go on where the loop begins, whatever the script draws behind `track`, or that is said."""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ckpt_engine import Checkpointer
from tests.loop.test_hidden import Killed, report
from tests.support.digests import seed_everything

STEPS = 9


class Script:
    """One process of a script that makes its batches itself."""

    def __init__(self, folder: Path | None, seed: int, die_at: int | None) -> None:
        seed_everything(seed)
        self.die_at, self.seed = die_at, seed
        self.net = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.ckpt = Checkpointer(folder, every_n_steps=10**9 if die_at is None else 1, writer="thread")
        self.done: list[str] = []

    def track(self, **more: Any) -> Any:
        self.run = self.ckpt.track(net=self.net, optimizer=self.optimizer, **more)
        return self.run

    def learn(self, x: torch.Tensor) -> None:
        """The body of a loop from where it has its batch."""
        self.ckpt.wait(60)
        self.die_when_it_is_time()
        loss = self.net(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.done.append(loss.item().hex())

    def die_when_it_is_time(self) -> None:
        """Asked by a function of its own: a list whose length decides in the function that fills it is state."""
        if len(self.done) == self.die_at:
            raise Killed

    def step(self) -> None:
        """A whole body."""
        self.learn(torch.randn(2, 3) + random.random() + float(np.random.rand()))
        self.run.step()


def draw() -> torch.Tensor:
    """From all three streams."""
    return torch.randn(3) + random.random() + float(np.random.rand())


def life(folder: Path, loop: Callable[[Script], None], seed: int = 1, die_at: int | None = None) -> list[str]:
    """One process: the losses of its steps."""
    script = Script(folder, seed, die_at)
    with contextlib.suppress(Killed), script.ckpt:
        loop(script)
    return script.done


# ---- loops whose own line says where they begin


def counts_in_a_for(script: Script) -> None:
    run = script.track()
    draw()
    for _ in range(run.global_step, STEPS):
        script.step()


def counts_in_a_while(script: Script) -> None:
    run = script.track()
    draw()
    while run.global_step < STEPS:
        script.step()


def prints_before_it_draws(script: Script) -> None:
    run = script.track()
    print("goes on at", run.global_step)
    draw()
    for _ in range(run.global_step, STEPS):
        script.step()


def reads_in_the_body(script: Script) -> None:
    run = script.track()
    draw()
    for _ in range(run.global_step, STEPS):
        x = draw().repeat(2, 1) / (1 + run.global_step)
        script.learn(x)
        run.step()


def keeps_where_it_begins(script: Script) -> None:
    run = script.track()
    draw()
    begin = run.global_step
    print("goes on at", begin)
    script.net.train()
    for _ in range(begin, STEPS):
        script.step()


def loops_in_a_function(script: Script) -> None:
    run = script.track()
    draw()
    batches_of(script, run.global_step)


def batches_of(script: Script, begin: int) -> None:
    for _ in range(begin, STEPS):
        script.step()


def counts_in_a_generator(script: Script) -> None:
    def batches() -> Iterator[torch.Tensor]:
        while run.global_step < STEPS:
            yield draw().repeat(2, 1)

    run = script.track()
    draw()
    for x in batches():
        script.learn(x)
        run.step()


def accumulates(script: Script) -> None:
    run = script.track()
    draw()
    while run.global_step < STEPS:
        script.net(draw()).sum().backward()
        if run.global_step % 2:
            script.net(draw()).sum().backward()
        script.step()


def learns_in_few_turns(script: Script) -> None:
    run = script.track()
    draw()
    for turn in range(run.global_step, 3 * STEPS):
        x = draw().repeat(2, 1)
        if turn % 3 == 1:
            script.learn(x)
        run.step()


def goes_on_between(script: Script) -> None:
    """Draws in a loop of its own first, and tracks in a loop."""
    for _ in range(1):
        run = script.track()
        for _ in range(3):
            draw()
        for _ in range(run.global_step, STEPS):
            script.step()


EXACT = [
    counts_in_a_for,
    counts_in_a_while,
    prints_before_it_draws,
    reads_in_the_body,
    keeps_where_it_begins,
    loops_in_a_function,
    counts_in_a_generator,
    accumulates,
    learns_in_few_turns,
    goes_on_between,
]


def lives(folder: Path, loop: Callable[[Script], None], seeds: tuple[int, int, int]) -> list[str]:
    """Three processes, of which two are killed."""
    first = life(folder, loop, seeds[0], 2)
    return first + life(folder, loop, seeds[1], 2) + life(folder, loop, seeds[2])


@pytest.mark.cells(3)
@pytest.mark.parametrize("loop", EXACT, ids=lambda loop: loop.__name__)
def test_the_first_step_draws_what_it_would_have(loop: Callable[[Script], None], tmp_path: Path) -> None:
    """Over three processes with other seeds, and nothing is said of it."""
    assert lives(tmp_path / "killed", loop, (1, 2, 3)) == life(tmp_path / "whole", loop)
    assert report(tmp_path / "killed")["not_restored"] == []


# ---- what the loop uses


class Agent:
    """Acts by what it has seen, and remembers it."""

    def __init__(self) -> None:
        self.memory = collections.deque[torch.Tensor](maxlen=5)
        self.chance, self.place = 1.0, torch.zeros(3)

    def act(self) -> torch.Tensor:
        self.chance *= 0.9
        self.place = 0.9 * self.place + self.chance * torch.randn(3)
        self.memory.append(self.place)
        return random.choice(self.memory).repeat(2, 1)


def acts_and_remembers(script: Script) -> None:
    run, agent = script.track(), Agent()
    buffer, streams = [torch.ones(2, 3), torch.zeros(2, 3)], [random.Random(1)]
    print("goes on at", run.global_step)
    for step in range(run.global_step, STEPS):
        x, buffer[step % 2] = buffer[step % 2], agent.act()
        script.learn(x * streams[0].random())
        run.step()


def test_objects_and_buffers_that_the_loop_uses_go_on(tmp_path: Path) -> None:
    """They are known where it begins, and put back there."""
    assert lives(tmp_path / "killed", acts_and_remembers, (1, 2, 3)) == life(tmp_path / "whole", acts_and_remembers)
    found = report(tmp_path / "killed")
    assert found["not_restored"] == []
    hidden = next(row["detail"] for row in found["restored"] if row["name"] == "hidden state")
    assert {"agent.memory", "agent.place", "acts_and_remembers().buffer"} <= set(hidden.split(", "))


# ---- what is drawn for the whole run


def draws_a_target(script: Script) -> None:
    run = script.track()
    target = draw()
    for _ in range(run.global_step, STEPS):
        script.learn(target + torch.randn(2, 3))
        run.step()


def draws_a_target_beside_a_loader(script: Script) -> None:
    loader = DataLoader(TensorDataset(torch.arange(18.0).view(6, 3)), batch_size=2, shuffle=True)
    run = script.track(loader=loader)
    target = draw()
    for _ in range(run.epoch, STEPS // 3):
        for (x,) in loader:
            script.learn(target + x)


@pytest.mark.parametrize("loop", [draws_a_target, draws_a_target_beside_a_loader], ids=lambda loop: loop.__name__)
def test_what_a_script_draws_before_its_loop_is_what_it_drew_then(
    loop: Callable[[Script], None], tmp_path: Path
) -> None:
    """A script that seeds itself draws the same constants after `track` as its first process."""
    assert lives(tmp_path / "killed", loop, (1, 1, 1)) == life(tmp_path / "whole", loop)


# ---- loops that do not say it


def counts_epochs_by_itself(script: Script) -> None:
    run = script.track()
    for _ in range(run.epoch, STEPS):
        script.learn(torch.ones(2, 3))
        run.step()


def counts_epochs_and_steps(script: Script) -> None:
    run = script.track()
    for epoch in range(run.global_step // 3, STEPS // 3):
        for turn in range(run.global_step % 3, 3):
            script.learn(torch.full((2, 3), 1.0 + epoch + turn))
            run.step()


@pytest.mark.parametrize(("loop", "said"), [(counts_epochs_by_itself, 1), (counts_epochs_and_steps, 0)])
def test_a_loop_that_counts_from_its_beginning_again_is_named(
    loop: Callable[[Script], None], said: int, tmp_path: Path
) -> None:
    """No loader counts its epochs: it would train as many again. An inner loop that begins again is no fault."""
    life(tmp_path, loop, die_at=6)
    losses = life(tmp_path, loop)
    found = [one["why"] for one in report(tmp_path)["not_restored"]]
    assert len(losses) == (STEPS if said else STEPS - 6)
    assert [why.partition(" in ")[0] for why in found] == ["_ was 5"] * said, found
    assert all("start it from run.global_step (run.epoch counts" in why for why in found)
