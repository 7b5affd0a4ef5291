"""A small script, resumed with changes, and the same changes made by hand in one that is not interrupted."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from ckpt_engine.data import rng
from tests.loop.runs import Augmented, digest, every_boundary, only, report, resume_only, saved, seed_everything

EPOCHS, AT, SEED = 2, 4, 11
"""The change is made after so many steps, in the first epoch; the seed of the process that makes it."""
Entry = tuple[Any, ...]


@dataclass(frozen=True)
class Setup:
    """How a script makes its objects."""

    rate: float = 1e-2
    outputs: int = 1
    schedule: str = "exponential"
    batch: int = 4
    epochs: int = EPOCHS
    body: str = "body"
    accumulate: int = 1


class Net(nn.Module):
    """A body under a name of choice, and a head."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.add_module(setup.body, nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2)))
        self.head = nn.Linear(8, setup.outputs)
        self._body = setup.body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(getattr(self, self._body)(x))
        return out


@dataclass
class Objects:
    """What a script trains with.

    Attributes:
        journal: makes the trace of a script.
    """

    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any
    backward: Callable[[Any], object] = torch.Tensor.backward
    trace: list[Entry] = field(default_factory=lambda: Objects.journal())
    journal: ClassVar[Callable[[], list[Entry]]] = list
    accumulate: int = 1
    tool: Any = None
    """An accelerator, which divides losses and skips steps."""

    @classmethod
    def of(cls, setup: Setup) -> Objects:
        model = Net(setup)
        optimizer = torch.optim.Adam(model.parameters(), lr=setup.rate)
        schedules: Mapping[str, Callable[[], Any]] = {
            "exponential": lambda: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            "step": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
            "warmup": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: (n + 1) / 20),
        }
        loader = DataLoader(Augmented(), batch_size=setup.batch, shuffle=True)
        return cls(model, optimizer, schedules[setup.schedule](), loader, accumulate=setup.accumulate)

    def step(self, epoch: int, x: Any, y: Any, ids: Any, batch: int = 0) -> None:
        """Train on a batch, the one of this number in its epoch."""
        is_last = (batch + 1) % self.accumulate == 0 or batch + 1 == len(self.loader)
        with nullcontext() if self.tool is None else self.tool.accumulate(self.model):
            loss = ((self.model(x) - y) ** 2).mean()
            if self.accumulate == 1:
                self.optimizer.zero_grad()
            self.backward(loss if self.tool is not None else loss / self.accumulate)
            if is_last or self.tool is not None:
                self.optimizer.step()
                self.scheduler.step()
                if self.accumulate > 1:
                    self.optimizer.zero_grad()
        rates = tuple(group["lr"] for group in self.optimizer.param_groups)
        self.trace.append((epoch, tuple(ids.tolist()), loss.detach().item().hex(), rates))

    def accumulating(self, batches: int) -> Objects:
        """By hand: steps of so many batches from here on."""
        self.optimizer.zero_grad()
        self.accumulate = batches
        if self.tool is not None:
            self.tool.gradient_accumulation_steps = batches
        return self

    def ends(self) -> End:
        return self.trace, digest(weights=self.model.state_dict(), optimizer=self.optimizer.state_dict())


Hand = Callable[[Objects], Objects]
End = tuple[list[Entry], dict[str, str]]


class Trainer(Protocol):
    """A kind of loop."""

    def make(self, setup: Setup) -> Objects:
        """The objects of a script, ready to train."""

    def train(self, setup: Setup, options: Mapping[str, Any], seed: int) -> End:
        """One process of a script whose snapshots are ours."""

    def fetched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, fetched when this kind of loop fetches them."""


def by_hand(trainer: Trainer, setup: Setup, change: Hand | None = None) -> End:
    """The script without interruption; the change is made between two steps."""
    seed_everything(0)
    mine, steps = trainer.make(setup), 0
    for epoch in range(setup.epochs):
        batches = iter(mine.loader)
        for number in range(len(mine.loader)):
            if steps == AT and change is not None:
                mine = change(mine)
            mine.step(epoch, *next(batches), number)
            steps += 1
    return mine.ends()


def rebatched(trainer: Trainer, old: Setup, new: Setup) -> End:
    """By hand: after `AT` steps the rest of the epoch comes in batches of another size, as do the epochs after it."""
    trace = by_hand(trainer, old)[0]
    order = [sample for entry in trace[AT : len(trace) // EPOCHS] for sample in entry[1]]
    seed_everything(0)
    mine = trainer.make(old)
    batches = iter(mine.loader)
    for number in range(AT):
        mine.step(0, *next(batches), number)
    mine.loader = made_by(trainer, new, 0)[0].loader
    data = Augmented()
    chunks = [order[at : at + new.batch] for at in range(0, len(order), new.batch)]
    rest = (default_collate([data[sample] for sample in chunk]) for chunk in chunks)
    for number, batch in enumerate(trainer.fetched(rest), AT):
        mine.step(0, *batch, number)
    for epoch in range(1, new.epochs):
        for number, batch in enumerate(mine.loader):
            mine.step(epoch, *batch, number)
    return mine.ends()


def made_by(trainer: Trainer, setup: Setup, seed: int) -> tuple[Objects, Any]:
    """The objects as the resumed process makes them, and its random streams then; those of the caller stay."""
    streams = rng.capture()
    seed_everything(seed)
    made, after = trainer.make(setup), rng.capture()
    rng.restore(streams)
    return made, after


def states(one: Objects) -> dict[str, Any]:
    """Copies of what a snapshot has of the objects."""
    found = {name: getattr(one, name).state_dict() for name in ("model", "optimizer", "scheduler")}
    return torch.load(_saved(found), weights_only=False)


def _saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def begun_again(trainer: Trainer, setup: Setup, old: Setup, seed: int, *parts: str) -> End:
    """By hand: a script of its own from step 0 on, with parts of the other one's state after `AT` steps."""
    found: dict[str, Any] = {}

    def look(mine: Objects) -> Objects:
        found.update(states(mine))
        return mine

    by_hand(trainer, old, look)
    made, streams = made_by(trainer, setup, seed)
    rng.restore(streams)
    rates = [(group["lr"], group["initial_lr"]) for group in made.optimizer.param_groups]
    for part in parts:
        getattr(made, part).load_state_dict(found[part])
    for group, (rate, initial) in zip(made.optimizer.param_groups, rates, strict=True):
        group["lr"], group["initial_lr"] = rate, initial
    for epoch in range(setup.epochs):
        for x, y, ids in made.loader:
            made.step(epoch, x, y, ids)
    return made.ends()


def with_new_head(trainer: Trainer, new: Setup) -> Hand:
    """By hand: a head as the resumed process makes it, without moments."""

    def change(old: Objects) -> Objects:
        made, _ = made_by(trainer, new, SEED)
        found = states(old)
        heads = [name for name in found["model"] if name.startswith("head")]
        weights = made.model.state_dict()
        made.model.load_state_dict({**found["model"], **{name: weights[name] for name in heads}})
        state = found["optimizer"]["state"]
        found["optimizer"]["state"] = {number: one for number, one in state.items() if number < len(state) - len(heads)}
        made.optimizer.load_state_dict(found["optimizer"])
        made.scheduler.load_state_dict(found["scheduler"])
        made.trace, made.loader = old.trace, old.loader
        return made

    return change


def with_streams_of(trainer: Trainer, new: Setup) -> Hand:
    """By hand: random streams are those of the resumed process."""

    def change(old: Objects) -> Objects:
        rng.restore(made_by(trainer, new, SEED)[1])
        return old

    return change


class FirstParts:
    """Runs that were killed after `AT` batches: each is trained once, and each test continues a copy of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trained: dict[tuple[Trainer, Setup, str], Path] = {}

    def copy(self, trainer: Trainer, setup: Setup, target: Path, kind: str = "") -> Path:
        """The folder of one.

        Args:
            kind: how the test makes its objects, where not all tests make them in the same way.
        """
        if (root := self._trained.get((trainer, setup, kind))) is None:
            root = self._folder / str(len(self._trained))
            trainer.train(setup, every_boundary(root), 0)
            self._trained[trainer, setup, kind] = root
        killed = next(one for one in saved(root) if (one.epoch, one.batch) == (0, AT) and one.reason != "end")
        return only(root, killed, target)


def assert_branch(
    trainer: Trainer,
    setup: Setup,
    folder: Path,
    section: Mapping[str, Any],
    expected: End,
) -> Any:
    """Resume with the section, and again with the same one after two kills: each is the rest of what is expected."""
    options = {"resume": dict(section)}
    first = trainer.train(setup, every_boundary(folder, **options), SEED)
    trace, final = expected
    assert first[0] == trace[len(trace) - len(first[0]) :]
    assert first[1] == final
    told = report(folder)
    assert told.replay is not None
    assert (told.replay.result, told.replay.why) == ("not compared", "resumed with changes")
    line = [one for one in saved(folder) if one.reason != "end"]
    branch = [one for one in line[1:] if one.id > line[0].id]
    for number, kill in enumerate((branch[0], branch[len(branch) // 2])):
        again = only(folder, kill, folder.with_name(f"{folder.name}-{number}"))
        resumed = trainer.train(setup, resume_only(again, **options), SEED + 100 + number)
        assert resumed[0] == trace[len(trace) - len(resumed[0]) :], f"kill {number}"
        assert len(resumed[0]) == len(trace) - kill.step
        assert resumed[1] == final, f"kill {number}"
        after = report(again)
        assert after.changes == (), "it is applied once"
        assert after.not_restored == ()
    return told


def assert_continues(
    trainer: Trainer, setup: Setup, folder: Path, options: Mapping[str, Any], expected: End, trained: int = AT
) -> Any:
    """Resume another script, after so many batches, and again after two kills: each is the rest of what is expected."""
    trace, final = expected
    before = len(saved(folder))
    first = trainer.train(setup, every_boundary(folder, **options), SEED)
    assert first == (trace[trained:], final)
    branch = [one for one in saved(folder)[before:] if one.reason != "end"]
    for number, kill in enumerate((branch[0], branch[len(branch) // 2])):
        again = only(folder, kill, folder.with_name(f"{folder.name}-{number}"))
        resumed = trainer.train(setup, resume_only(again, **options), SEED + 100 + number)
        assert len(resumed[0]) < len(first[0])
        assert resumed == (trace[len(trace) - len(resumed[0]) :], final), f"kill {number}"
        assert resumed[0], f"kill {number}"
        assert report(again).not_restored == ()
    return report(folder)
