"""A tracked loop resumes exactly although its objects carry state that no `state_dict` names."""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ckpt_engine import Carry, Checkpointer
from tests.support.digests import seed_everything

EPOCHS = 3
BATCHES = 4


class Noisy(Dataset[Any]):
    """Samples with noise from a stream of its own, and a count of how often it was asked."""

    def __init__(self) -> None:
        self.dice = random.Random(5)
        self.asked = 0

    def __len__(self) -> int:
        return BATCHES * 2

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return torch.full((3,), float(index)), self.dice.random() + 0.01 * self.asked


class Net(nn.Module):
    """Its output depends on a running mean that is a plain attribute, and on a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.mean = torch.zeros(3)
        self.calls = 0
        self.started: int | None = os.getpid()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.drop.p = 0.1 + 0.01 * self.calls
        return self.layer(self.drop(x - self.mean)) / (1 + self.calls)


def collate() -> Callable[[Any], Any]:
    """A function with a variable of its own."""
    calls = 0

    def stack(rows: list[Any]) -> Any:
        nonlocal calls
        calls += 1
        return torch.stack([row[0] for row in rows]) + 0.1 * calls, torch.tensor([row[1] for row in rows])

    return stack


class Killed(Exception):
    """The process dies here."""


def for_a_death_at(step: int | None) -> dict[str, Any]:
    """Options: a snapshot right before the death, which is all that the next process needs.

    None is taken between two epochs.
    """
    every = 10**9 if step is None else step if step % BATCHES else step - 1
    return {"every_n_steps": every, "writer": "thread"}


def train(folder: Path, seed: int, die_at: int | None, **options: Any) -> list[str]:
    """One process: the losses of its steps as text, with their step."""
    seed_everything(seed)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loader = DataLoader(Noisy(), batch_size=2, shuffle=True, collate_fn=collate())
    losses = []
    try:
        with Checkpointer(folder, **for_a_death_at(die_at), **options) as ckpt:
            tracker = ckpt.track(net=net, optimizer=optimizer, loader=loader)
            for _ in range(tracker.epoch, EPOCHS):
                for x, y in loader:
                    ckpt.wait(60)
                    if tracker.global_step == die_at:
                        raise Killed
                    loss = ((net(x).squeeze(1) - y) ** 2).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses.append(f"{tracker.global_step} {loss.item().hex()}")
    except Killed:
        pass
    return losses


SELDOM = [pytest.param(two, marks=pytest.mark.slow) for two in itertools.combinations(range(1, 12), 2) if two != (1, 2)]


def report(folder: Path) -> Any:
    """What the last resume said."""
    return json.loads((folder / "resume-report.json").read_text())


@pytest.mark.cells(1)
@pytest.mark.parametrize("kills", [(5,), (2, 3, 9), (1, 2), *SELDOM])
def test_attributes_of_all_objects_go_on(tmp_path: Path, kills: tuple[int, ...]) -> None:
    """Model, dataset and collate function; killed up to three times, with another seed each time."""
    wanted = train(tmp_path / "whole", 1, None)
    got: dict[str, str] = {}
    for seed, die_at in enumerate((*kills, None), 1):
        got |= dict(line.split() for line in train(tmp_path / "killed", seed, die_at))
    assert [f"{step} {loss}" for step, loss in got.items()] == wanted
    assert report(tmp_path / "killed")["not_restored"] == []
    restored = {row["name"]: row["detail"] for row in report(tmp_path / "killed")["restored"]}
    for name in ("net.mean", "net.calls", "net.drop.p", "loader.dataset.dice", "loader.collate_fn.calls"):
        assert name in restored["hidden state"]


def test_with_hidden_off_the_run_differs(tmp_path: Path) -> None:
    """Without hidden state the run differs, so the test above can fail."""
    wanted = train(tmp_path / "whole", 1, None, hidden="off")
    first = train(tmp_path / "killed", 1, 5, hidden="off")
    assert first + train(tmp_path / "killed", 2, None, hidden="off") != wanted


def test_report_names_what_it_leaves(tmp_path: Path) -> None:
    """With `hidden: report` nothing is put back, and all of it is named with what to do."""
    train(tmp_path, 1, 5, hidden="report")
    train(tmp_path, 2, 7, hidden="report")
    names = {row["name"]: row["why"] for row in report(tmp_path)["not_restored"]}
    assert "hidden state net.calls" in names
    assert "register_buffer" in names["hidden state net.mean"]


def test_locals_that_are_carried_are_named_and_a_carry_has_them(tmp_path: Path) -> None:
    """The batch that nanoGPT draws ahead, and a running best."""
    wanted = prefetching(tmp_path / "whole", 1, None, carried=True)
    first = prefetching(tmp_path / "killed", 1, 5, carried=True)
    assert first + prefetching(tmp_path / "killed", 2, None, carried=True) == wanted
    assert report(tmp_path / "killed")["not_restored"] == []
    prefetching(tmp_path / "bare", 1, 5, carried=False)
    prefetching(tmp_path / "bare", 2, 7, carried=False)
    rows = {row["name"]: row["why"] for row in report(tmp_path / "bare")["not_restored"]}
    assert rows["local variables"].startswith("x, best are carried")


class Patience:
    """Ends a run after so many losses that are no better, and makes the steps smaller meanwhile."""

    def __init__(self) -> None:
        self.best = float("inf")
        self.count = 0

    def scale(self, loss: float) -> float:
        self.count = 0 if loss < self.best else self.count + 1
        self.best = min(self.best, loss)
        return 1.0 / (1 + self.count)


def patient(folder: Path, seed: int, die_at: int | None) -> list[str]:
    """One process of a loop with an object of its own; the losses of its steps as text."""
    seed_everything(seed)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loader = DataLoader(torch.arange(24.0).view(8, 3) / 24, batch_size=2, shuffle=True)  # type: ignore[arg-type]
    losses = []
    with Checkpointer(folder, **for_a_death_at(die_at)) as ckpt, contextlib.suppress(Killed):
        tracker = ckpt.track(net=net, optimizer=optimizer, loader=loader)
        patience = Patience()
        for _ in range(tracker.epoch, EPOCHS):
            for x in loader:
                ckpt.wait(60)
                if tracker.global_step == die_at:
                    raise Killed
                loss = net(x).square().mean()
                optimizer.zero_grad()
                (loss * patience.scale(loss.item())).backward()
                optimizer.step()
                losses.append(loss.item().hex())
    return losses


def test_an_object_of_the_script_goes_on(tmp_path: Path) -> None:
    """The counter of an early stopping by hand, which nothing tracks."""
    wanted = patient(tmp_path / "whole", 1, None)
    first = patient(tmp_path / "killed", 1, 5)
    assert first + patient(tmp_path / "killed", 2, None) == wanted
    assert report(tmp_path / "killed")["not_restored"] == []


_total = 0.0


class InGlobal:
    """Sums up in a global variable of its module."""

    def scale(self, net: nn.Module, loss: float) -> float:
        global _total
        _total = 0.9 * _total + loss
        return 1 / (1 + _total)


_dice = torch.Generator()


class FromStream:
    """Draws from a stream that is a global variable."""

    def scale(self, net: nn.Module, loss: float) -> float:
        return 1 + torch.rand(1, generator=_dice).item()


class OfTheClass:
    """Sums up in an attribute of its class."""

    total = 0.0

    def scale(self, net: nn.Module, loss: float) -> float:
        type(self).total = 0.9 * self.total + loss
        return 1 / (1 + self.total)


class WithSlots:
    """Has its attributes in no dict."""

    __slots__ = ("_total",)

    def __init__(self) -> None:
        self._total = 0.0

    def scale(self, net: nn.Module, loss: float) -> float:
        self._total = 0.9 * self._total + loss
        return 1 / (1 + self._total)


class Teacher:
    """Follows the weights of another model with one of its own."""

    def __init__(self) -> None:
        self.target = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))

    def scale(self, net: nn.Module, loss: float) -> float:
        with torch.no_grad():
            for mine, other in zip(self.target[0].parameters(), net.parameters(), strict=True):
                mine.lerp_(other, 0.2)
            return (
                1 + self.target(torch.full((2, 3), loss).cumsum(0)).mean().item() + self.target[1].running_mean.item()
            )


class Shadow:
    """The same as tensors by name."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}

    def scale(self, net: nn.Module, loss: float) -> float:
        for name, one in net.named_parameters():
            self.shadow[name] = self.shadow.get(name, torch.zeros_like(one)).lerp(one.detach(), 0.2)
        return 1 + self.shadow["bias"].item()


class Window:
    """Remembers some losses, and one of each kind, and draws from them; it writes down all."""

    def __init__(self) -> None:
        self.last: collections.deque[float] = collections.deque([1.0], maxlen=3)
        self.kinds = [1.0, 1.0]
        self.log: list[float] = []

    def scale(self, net: nn.Module, loss: float) -> float:
        self.log.append(loss)
        self.last.append(loss)
        self.kinds[loss > sum(self.last) / 3] += loss
        return 1 / (1 + random.choice(self.last) + self.kinds[0])


class Warmed:
    """Something that is done once, after the third step."""

    def __init__(self) -> None:
        self.steps, self.warm = 0, False

    def scale(self, net: nn.Module, loss: float) -> float:
        self.steps = min(self.steps + 1, 4)
        self.warm = self.warm or self.steps == 3
        return 2.0 if self.warm else 1.0


KEEPERS: Any = (InGlobal, FromStream, OfTheClass, WithSlots, Teacher, Shadow, Window, Warmed)
WAYS: dict[str, Callable[[], Any]] = {one.__name__: one for one in KEEPERS}


def carrying(folder: Path, seed: int, die_at: int | None, way: str) -> list[str]:
    """One process of a loop whose steps are scaled by what an object of the script, or its module, has seen."""
    global _total
    _total = OfTheClass.total = 0.0
    _dice.manual_seed(3)
    seed_everything(seed)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loader = DataLoader(torch.arange(24.0).view(8, 3) / 24, batch_size=2, shuffle=True)  # type: ignore[arg-type]
    losses = []
    with Checkpointer(folder, **for_a_death_at(die_at)) as ckpt, contextlib.suppress(Killed):
        tracker = ckpt.track(net=net, optimizer=optimizer, loader=loader)
        carried = WAYS[way]()
        for _ in range(tracker.epoch, EPOCHS):
            for x in loader:
                ckpt.wait(60)
                if tracker.global_step == die_at:
                    raise Killed
                loss = net(x).square().mean()
                optimizer.zero_grad()
                (loss * carried.scale(net, loss.item())).backward()
                optimizer.step()
                losses.append(loss.item().hex())
    return losses


@pytest.mark.cells(2)
@pytest.mark.parametrize("way", WAYS)
def test_what_the_script_keeps_beside_goes_on(way: str, tmp_path: Path) -> None:
    """Globals, attributes of classes, slots, modules that nothing tracks, and containers, over three processes."""
    wanted = carrying(tmp_path / "whole", 1, None, way)
    got = carrying(tmp_path / "killed", 1, 5, way)
    got += carrying(tmp_path / "killed", 2, 7, way)
    assert report(tmp_path / "killed")["not_restored"] == []
    assert got + carrying(tmp_path / "killed", 3, None, way) == wanted
    assert report(tmp_path / "killed")["not_restored"] == []


def test_a_module_of_the_loop_goes_on(tmp_path: Path) -> None:
    """A target network that is a variable of the loop, and that the script copies from the model whenever it starts."""
    wanted = targeting(tmp_path / "whole", 1, None)
    got = targeting(tmp_path / "killed", 1, 5) + targeting(tmp_path / "killed", 2, 7)
    assert got + targeting(tmp_path / "killed", 3, None) == wanted
    assert report(tmp_path / "killed")["not_restored"] == []


def targeting(folder: Path, seed: int, die_at: int | None) -> list[str]:
    """One process of a loop with a model that lags behind."""
    seed_everything(seed)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loader = DataLoader(torch.arange(24.0).view(8, 3) / 24, batch_size=2, shuffle=True)  # type: ignore[arg-type]
    losses = []
    with Checkpointer(folder, **for_a_death_at(die_at)) as ckpt, contextlib.suppress(Killed):
        tracker = ckpt.track(net=net, optimizer=optimizer, loader=loader)
        target = copy.deepcopy(net)
        for _ in range(tracker.epoch, EPOCHS):
            for x in loader:
                ckpt.wait(60)
                if tracker.global_step == die_at:
                    raise Killed
                loss = (net(x) - 0.5 * target(x).detach() - 1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if tracker.global_step % 4 == 1:
                    target.load_state_dict(net.state_dict())
                losses.append(loss.item().hex())
    return losses


def test_an_evaluation_before_the_first_step_is_not_the_beginning(tmp_path: Path) -> None:
    """What the loop's objects were when it began is noted once, though more passes begin before weights change."""
    wanted = evaluating(tmp_path / "whole", 1, None)
    first = evaluating(tmp_path / "killed", 1, 6)
    assert first + evaluating(tmp_path / "killed", 2, None) == wanted
    assert report(tmp_path / "killed")["not_restored"] == []


def evaluating(folder: Path, seed: int, die_at: int | None) -> list[str]:
    """A loop of two batches per step that evaluates after each batch."""
    seed_everything(seed)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loader, evaluation = (DataLoader(Noisy(), batch_size=2, collate_fn=collate()) for _ in range(2))
    losses = []
    try:
        with Checkpointer(folder, every_n_steps=1, writer="thread") as ckpt:
            tracker = ckpt.track(net=net, optimizer=optimizer, loader=loader, evaluation=evaluation)
            for _ in range(tracker.epoch, EPOCHS):
                for batch, (x, y) in enumerate(loader, tracker.resumed_batches):
                    ckpt.wait(60)
                    if 4 * tracker.epoch + batch == die_at:
                        raise Killed
                    loss = ((net(x).squeeze(1) - y) ** 2).mean()
                    loss.backward()
                    if batch % 2:
                        optimizer.step()
                        optimizer.zero_grad()
                    score = sum(net(x).mean().item() for x, _ in evaluation)
                    losses.append(f"{loss.item().hex()} {score.hex()}")
    except Killed:
        pass
    return losses


def test_a_local_is_named_by_the_snapshot_of_the_first_step(tmp_path: Path) -> None:
    """One step shows that it is carried: the run may be killed right after it."""
    drifting(tmp_path, die_at=1)
    drifting(tmp_path, die_at=2)
    rows = {row["name"]: row["why"] for row in report(tmp_path)["not_restored"]}
    assert rows["local variables"].startswith("drift is carried")


def drifting(folder: Path, die_at: int) -> None:
    """A loop over a loader, with a number that each step changes and the next one uses."""
    seed_everything(0)
    net, loader = nn.Linear(3, 1), DataLoader(TensorDataset(torch.rand(8, 3)), batch_size=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    drift = 0.0
    with contextlib.suppress(Killed), Checkpointer(folder, every_n_steps=1, writer="thread", at_end=False) as ckpt:
        tracker = ckpt.track(net=net, optimizer=optimizer, loader=loader)
        for (x,) in loader:
            if tracker.global_step == die_at:
                assert ckpt.wait(60)
                raise Killed
            loss = net(x + drift).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            drift += loss.item()


def prefetching(folder: Path, seed: int, die_at: int | None, *, carried: bool) -> list[str]:
    """A loop without a loader, that draws each batch one step ahead."""
    seed_everything(seed)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    carry = Carry(x=torch.rand(2, 3), best=float("inf"))
    x: Any = None if carried else torch.rand(2, 3)
    best = float("inf")
    losses = []
    try:
        with Checkpointer(folder, every_n_steps=1, writer="thread") as ckpt:
            tracker = ckpt.track(net=net, optimizer=optimizer, **({"carry": carry} if carried else {}))
            while tracker.global_step < 10:
                loss = net(carry.x if carried else x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if carried:
                    carry.x, carry.best = torch.rand(2, 3), min(carry.best, loss.item())
                    losses.append(f"{loss.item().hex()} {carry.best}")
                else:
                    x, best = torch.rand(2, 3), min(best, loss.item())
                tracker.step()
                ckpt.wait(60)
                if tracker.global_step == die_at:
                    raise Killed
    except Killed:
        pass
    assert carried or best < float("inf")
    return losses


def train_against_a_critic(
    folder: Path, seed: int, die_at: int | None = None, *, tracks: bool = False, of_one_turn: bool = False
) -> list[str]:
    """One process with two optimizers: the losses of its steps as text."""
    seed_everything(seed)
    net, critic = nn.Linear(3, 1), nn.Linear(1, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    second = torch.optim.Adam(critic.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(torch.arange(24.0).view(8, 3)), batch_size=2, shuffle=True)
    losses = []
    with contextlib.suppress(Killed), Checkpointer(folder, **for_a_death_at(die_at)) as ckpt:
        tracker = ckpt.track(net=net, optimizer=optimizer, loader=loader, **{"second": second} if tracks else {})
        for _ in range(tracker.epoch, EPOCHS):
            for (x,) in loader:
                ckpt.wait(60)
                if tracker.global_step == die_at:
                    raise Killed
                if of_one_turn:
                    inner = torch.optim.Adam(critic.parameters(), lr=0.05)
                    critic(net(x).detach()).mean().backward()
                    inner.step()
                    inner.zero_grad()
                loss = critic(net(x)).mean() + net(x).square().mean()
                loss.backward()
                for one in (optimizer, *([] if of_one_turn else [second])):
                    one.step()
                    one.zero_grad()
                losses.append(f"{tracker.global_step} {loss.item().hex()}")
    return losses


@pytest.mark.parametrize("die_at", [1, 6])
def test_an_optimizer_that_is_not_tracked_is_named_and_a_tracked_one_goes_on(die_at: int, tmp_path: Path) -> None:
    """Its moments are in no snapshot: the report of the resume says so, with the line of code that mends it."""
    for tracks in (False, True):
        folder = tmp_path / str(tracks)
        train_against_a_critic(folder, 1, die_at, tracks=tracks)
        train_against_a_critic(folder, 2, tracks=tracks)
        named = [row["why"] for row in report(folder)["not_restored"]]
        assert len(named) == (not tracks)
        assert all("second (Adam) makes steps" in why and "track(…, second=second)" in why for why in named)


def test_an_optimizer_of_one_step_is_not_named(tmp_path: Path) -> None:
    """Its state does not go from step to step."""
    train_against_a_critic(tmp_path, 1, 6, of_one_turn=True)
    train_against_a_critic(tmp_path, 2, of_one_turn=True)
    assert [row["why"] for row in report(tmp_path)["not_restored"] if "makes steps" in row["why"]] == []


def train_with_a_buffer(folder: Path, seed: int, die_at: int | None = None, *, carries: bool = False) -> list[str]:
    """One process that also trains on a batch of before: the losses of its steps as text."""
    seed_everything(seed)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(torch.arange(24.0).view(8, 3)), batch_size=2, shuffle=True)
    carry = Carry(buffer=[])
    buffer: list[Any] = []
    losses = []
    with contextlib.suppress(Killed), Checkpointer(folder, **for_a_death_at(die_at)) as ckpt:
        tracker = ckpt.track(net=net, optimizer=optimizer, loader=loader, **{"carry": carry} if carries else {})
        buffer = carry.buffer if carries else buffer
        for _ in range(tracker.epoch, EPOCHS):
            for (x,) in loader:
                ckpt.wait(60)
                if tracker.global_step == die_at:
                    raise Killed
                buffer.append(x)
                loss = (net(x) + net(random.choice(buffer))).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(f"{tracker.global_step} {loss.item().hex()}")
    return losses


def test_a_carry_has_a_list_that_grows(tmp_path: Path) -> None:
    """A buffer that is drawn from, with the losses beside it. Without a carry the repeated steps show it."""
    whole = train_with_a_buffer(tmp_path / "whole", 1)
    for carries in (False, True):
        folder = tmp_path / str(carries)
        train_with_a_buffer(folder, 1, 6, carries=carries)
        again = train_with_a_buffer(folder, 2, carries=carries)
        assert report(folder)["not_restored"] == []
        assert (again == whole[6:]) == carries


class Diary:
    """Has a writer from the first step of a process on, as one that opens a file."""

    def __init__(self, lines: list[int]) -> None:
        self.lines = lines
        self.is_open = False

    def write(self, line: int) -> None:
        if not self.is_open:
            self._write = self.lines.append
            self.is_open = True
        self._write(line)


def write_and_train(folder: Path, life: int, die_at: int | None) -> list[int]:
    """One process: what it has written."""
    seed_everything(life)
    net, diary = nn.Linear(3, 1), Diary([])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(24.0).view(8, 3)), batch_size=2)
    with contextlib.suppress(Killed), Checkpointer(folder, **for_a_death_at(die_at)) as ckpt:
        tracker = ckpt.track(net=net, optimizer=optimizer, loader=loader)
        for _ in range(tracker.epoch, EPOCHS):
            for (x,) in loader:
                ckpt.wait(60)
                if tracker.global_step == die_at:
                    raise Killed
                diary.write(life)
                net(x).sum().backward()
                optimizer.step()
    return diary.lines


def test_a_flag_that_each_process_sets_in_its_first_step_is_no_state(tmp_path: Path) -> None:
    """It says that something is ready in this process: no later process gets it back, and each names it."""
    for life, die_at in enumerate((2, 4, 6, None)):
        assert set(write_and_train(tmp_path, life, die_at)) == {life}
        if life:
            named = [row["name"] for row in report(tmp_path)["not_restored"]]
            assert named == ["hidden state diary.is_open"]
