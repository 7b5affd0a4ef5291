"""A followed loader stays what it was to everybody else."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_engine.data.iteration import RoleInit, ShippingCollate
from ckpt_engine.data.position import LoaderPosition, attach
from ckpt_engine.errors import StateError
from tests.data.loader_kinds import Augmented, seed_numpy_by_worker


class Own(DataLoader[Any]):
    """A user's subclass with an `__iter__` of its own."""

    def __iter__(self) -> Any:
        self.asked = getattr(self, "asked", 0) + 1
        return super().__iter__()


def test_identity_type_name_and_interface_survive() -> None:
    """Same object, same name, still an instance, and no `state_dict` that others would save."""
    loader: DataLoader[Any] = DataLoader(Augmented())
    before = {name for name in dir(loader) if not name.startswith("_")}
    position = attach(loader)
    assert position.loader is loader
    assert isinstance(loader, DataLoader)
    assert (type(loader).__name__, type(loader).__qualname__) == ("DataLoader", "DataLoader")
    assert type(loader).__module__ == DataLoader.__module__
    assert {name for name in dir(loader) if not name.startswith("_")} == before
    assert not hasattr(loader, "state_dict")


def test_attaching_again_gives_the_same_position_and_the_larger_lookahead() -> None:
    """Adapters may attach as often as they meet a loader."""
    loader: DataLoader[Any] = DataLoader(Augmented())
    position = attach(loader)
    assert attach(loader, lookahead=1) is position
    assert attach(loader) is position
    assert position.lookahead == 1


def test_detach_restores_the_original_class() -> None:
    """Nothing of ours is left on the loader."""
    loader = Own(Augmented())
    attributes = set(vars(loader))
    position = attach(loader)
    list(loader)
    position.detach()
    position.detach()
    assert type(loader) is Own
    assert set(vars(loader)) == attributes | {"asked"}
    list(loader)
    assert loader.asked == 2


def test_a_subclass_keeps_its_own_iter() -> None:
    """The user's `__iter__` runs, once per epoch."""
    loader = Own(Augmented(), batch_size=4, shuffle=True)
    position = attach(loader)
    assert len(list(loader)) == position.fetched == 6
    assert loader.asked == 1


def test_iterators_answer_like_the_loaders_own() -> None:
    """Length and attributes come from the iterator inside."""
    loader: DataLoader[Any] = DataLoader(Augmented(), batch_size=4)
    attach(loader)
    iterator = iter(loader)
    assert len(iterator) == 6  # type: ignore[arg-type]
    assert iterator._num_workers == 0
    assert iter(iterator) is iterator
    with pytest.raises(AttributeError):
        iterator.nothing  # noqa: B018


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_and_pickles_are_plain_loaders(duplicate: Any) -> None:
    """Spawned processes and launchers get the original class; the copy does not share our position."""
    loader: DataLoader[Any] = DataLoader(Augmented(), batch_size=4)
    position = attach(loader)
    twin = duplicate(loader)
    assert type(twin) is DataLoader
    assert len(list(twin)) == 6
    assert position.fetched == 0
    assert attach(twin) is not position


def test_what_workers_get_can_be_pickled() -> None:
    """With `multiprocessing_context="spawn"` the stand-ins travel by pickle."""
    collate = pickle.loads(pickle.dumps(ShippingCollate(torch.utils.data.default_collate, 4, None)))
    assert collate([1, 2]).tolist() == [1, 2]
    init = pickle.loads(pickle.dumps(RoleInit(seed_numpy_by_worker, 1, [None, {"rng": {}}], 4)))
    assert init.first == 1


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_a_dropped_loader_goes_at_once(workers: dict[str, Any]) -> None:
    """No reference cycle: persistent workers stop with their loader, not when the garbage collector comes by."""
    loader: DataLoader[Any] = DataLoader(Augmented(), batch_size=4, shuffle=True, **workers)
    position = attach(loader)
    iterator = iter(loader)
    next(iterator)
    alive = weakref.ref(loader)
    gc.disable()
    try:
        del loader, iterator
        assert alive() is None
    finally:
        gc.enable()
    with pytest.raises(StateError, match="no longer exists"):
        position.state()


def test_a_stateful_loader_keeps_its_own_state_dict() -> None:
    """torchdata's interface is the user's and goes on working."""
    loader: StatefulDataLoader[Any] = StatefulDataLoader(Augmented(), batch_size=4, shuffle=True)
    attach(loader)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    expected = [indices.tolist() for indices, _ in iterator]
    loader.load_state_dict(state)
    assert [indices.tolist() for indices, _ in loader] == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_a_stateful_loader_started_in_the_middle_resumes_there(workers: int) -> None:
    """Somebody else's checkpoint put the loader at batch 2; our state three batches later continues at batch 5."""

    def make() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=workers)

    reference = make()
    iterator = iter(reference)
    for _ in range(2):
        next(iterator)
    foreign = reference.state_dict()
    expected = [indices.tolist() for indices, _ in iterator]

    second = make()
    second.load_state_dict(foreign)
    position = attach(second)
    iterator = iter(second)
    assert [next(iterator)[0].tolist() for _ in range(3)] == expected[:3]
    state = position.state()

    third = make()
    attach(third).load_state(state)
    assert [indices.tolist() for indices, _ in third] == expected[3:]


def test_repr_names_mode_and_progress() -> None:
    """The text of a position in a log says how it follows the loader, and how far."""
    loader: DataLoader[Any] = DataLoader(Augmented(), batch_size=4)
    position = attach(loader)
    next(iter(loader))
    assert isinstance(position, LoaderPosition)
    assert repr(position) == "LoaderPosition(skip, fetched=1, lookahead=0)"
