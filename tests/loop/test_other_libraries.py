"""Loaders, optimizers and trainers that only hold torch's: the refusal says what to track, and that resumes exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)
from torchdata import nodes

from ckpt_engine import Checkpointer
from ckpt_engine.errors import ConfigError
from tests.loop.test_hidden import report

ROWS = torch.randn(24, 3, generator=torch.Generator().manual_seed(3))
STEPS = 10


class Pipeline(IterableDataset[Any]):
    """As webdataset's `WebLoader`: a list of stages, the first of which is the loader."""

    def __init__(self) -> None:
        self.pipeline = [DataLoader(ROWS, batch_size=4, shuffle=True)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pipeline[0])


class Wrapper:
    """Moves batches elsewhere."""

    def __init__(self) -> None:
        self.inner = DataLoader(ROWS, batch_size=4, shuffle=True)

    def __iter__(self) -> Iterator[Any]:
        return (batch * 2 for batch in self.inner)


class Databunch:
    """As fastai: the loader of training is within something."""

    def __init__(self) -> None:
        self.loaders = Wrapper(), None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loaders[0])


class Batches:
    """A loader that has nothing of torch."""

    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS.split(4))


class Foreign:
    """As Keras: an optimizer that has nothing of torch, and no state by that name."""

    def apply_gradients(self, rows: Any) -> None:
        """One step."""


class Net:
    """As skorch: an estimator with its module and optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.module_, self.optimizer_ = model, torch.optim.SGD(model.parameters(), 0.01)


class Scheduled:
    """An optimizer that is none of torch's, and has a state."""

    def __init__(self, model: nn.Module) -> None:
        self._optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)


LOADERS: Mapping[str, tuple[Callable[[], Any], str, Callable[[Any], Any]]] = {
    "pipeline": (Pipeline, "loader.pipeline[0]", lambda one: one.pipeline[0]),
    "wrapper": (Wrapper, "loader.inner", lambda one: one.inner),
    "within": (Databunch, "loader.loaders[0].inner", lambda one: one.loaders[0].inner),
}


def train(root: Path, make: Callable[[], Any], advised: Callable[[Any], Any], steps: int, seed: int = 1) -> Any:
    """A loop over the library's object with the advised one tracked."""
    torch.manual_seed(seed)
    torch.manual_seed(seed)
    loader, model = make(), nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Checkpointer(root, every_n_steps=1, writer="thread") as checkpointer:
        run = checkpointer.track(model=model, optimizer=optimizer, loader=advised(loader))
        while run.global_step < steps:
            for batch in loader:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.global_step == steps:
                    break
    return [one.clone() for one in model.state_dict().values()]


@pytest.mark.cells(1)
@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_around_a_torch_loader_names_it_and_the_advice_resumes_exactly(name: str, tmp_path: Path) -> None:
    """What is inside is followed, whatever reads it."""
    make, path, advised = LOADERS[name]
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Checkpointer(tmp_path / "no", writer="thread") as checkpointer:
        with pytest.raises(ConfigError, match="has no state_dict") as caught:
            checkpointer.track(model=model, optimizer=optimizer, loader=make())
        assert str(caught.value).endswith(f"track what it holds: {path}")
    whole = train(tmp_path / "whole", make, advised, STEPS)
    train(tmp_path / "run", make, advised, STEPS - 3)
    again = train(tmp_path / "run", make, advised, STEPS, seed=5)
    assert all(map(torch.equal, again, whole))


@pytest.mark.parametrize(
    ("objects", "advice"),
    [
        ({"loader": Batches()}, "call run.step() as the last statement"),
        ({"net": Net(nn.Linear(3, 1))}, "track what it holds: net.module_, net.optimizer_"),
        ({"thing": object()}, "give the class these two methods"),
        ({"optimizer": Foreign()}, "a loop without an optimizer of torch calls run.step()"),
    ],
)
def test_what_cannot_be_tracked_says_what_can(objects: dict[str, Any], advice: str, tmp_path: Path) -> None:
    """By the path within, or by the other way to announce steps."""
    model = nn.Linear(3, 1)
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.01), **objects}
    checkpointer = Checkpointer(tmp_path, writer="thread")
    with checkpointer, pytest.raises(ConfigError, match="has no state_dict") as caught:
        checkpointer.track(**given)
    assert advice in str(caught.value)


def test_an_optimizer_around_a_torch_optimizer_names_it(tmp_path: Path) -> None:
    """Its hooks see the steps."""
    model = nn.Linear(3, 1)
    with Checkpointer(tmp_path, writer="thread") as checkpointer:
        with pytest.raises(ConfigError, match="needs the optimizer") as caught:
            checkpointer.track(model=model, optimizer=Scheduled(model))
        assert "optimizer=optimizer._optimizer" in str(caught.value)


class Shuffling(Sampler[int]):
    """A sampler of the user's own, with a stream of its own."""

    def __init__(self) -> None:
        self.own = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(12, generator=self.own).tolist())


class Resumable(Shuffling):
    """The same, which keeps its place."""

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.own.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own.set_state(state["own"])


NODES: Mapping[str, tuple[Callable[[], Any], bool]] = {
    "a stream of its own": (lambda: RandomSampler(range(12), generator=torch.Generator().manual_seed(3)), True),
    "torch's stream": (lambda: RandomSampler(range(12)), True),
    "a subset": (lambda: SubsetRandomSampler(range(0, 12, 2)), True),
    "of the user": (Shuffling, True),
    "with a state": (Resumable, False),
    "in order": (lambda: SequentialSampler(range(12)), False),
    "by epochs": (lambda: DistributedSampler(range(12), num_replicas=1, rank=0), False),  # type: ignore[arg-type]
}


@pytest.mark.cells(2)
@pytest.mark.parametrize("name", NODES)
def test_a_sampler_whose_order_no_state_has_is_named(name: str, tmp_path: Path) -> None:
    """Of nodes of torchdata, which count what a sampler has given and begin it again: also after a stop."""
    make, is_named = NODES[name]

    def life(steps: int) -> None:
        loader = nodes.Loader(nodes.Batcher(nodes.SamplerWrapper(make()), 2))
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with Checkpointer(tmp_path, every_n_steps=1, writer="thread") as checkpointer:
            run = checkpointer.track(model=model, optimizer=optimizer, loader=loader)
            for rows in loader:
                model(torch.tensor(rows).float() / 12).square().mean().backward()
                optimizer.step()
                run.step()
                if run.global_step == steps:
                    break

    life(2)
    life(3)
    named = [row["name"] for row in report(tmp_path)["not_restored"]]
    assert named == (["loader.root.source.sampler"] if is_named else [])
