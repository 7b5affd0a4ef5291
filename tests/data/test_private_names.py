"""The private parts of torch's data loader that positions rely on are there and behave as described."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from torch.utils.data import dataloader as _dataloader
from torch.utils.data._utils import worker as _worker

from ckpt_engine.data import private_names
from tests.data.loader_kinds import WhoMadeIt
from tests.data.loop import seed_everything


class Empty(IterableDataset[Any]):
    """Has no samples."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_no_private_name_is_missing() -> None:
    """If this fails, torch moved something: look at `ckpt_engine/data/private_names.py` before anything else."""
    loader: DataLoader[Any] = DataLoader([0])  # type: ignore[arg-type]
    iterator: Any = iter(loader)
    assert hasattr(loader, private_names._ITERATOR)
    assert getattr(iterator, private_names._INDEX_SAMPLER) is loader.batch_sampler
    assert hasattr(iterator, private_names._SAMPLER_ITER)
    assert hasattr(getattr(iter(DataLoader(Empty())), private_names._FETCHER), "ended")
    assert private_names._RECEIVED in inspect.getsource(_dataloader._MultiProcessingDataLoaderIter)
    assert all(hasattr(_worker, name) for name in ("_generate_state", "_worker_info", "WorkerInfo"))


class Counted(Sampler[int]):
    """Counts how often it is iterated."""

    def __init__(self) -> None:
        self.asked = 0

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter(range(8))

    def __len__(self) -> int:
        return 8


def test_an_iterator_with_workers_asks_its_sampler_twice_and_a_reset_once() -> None:
    """The first result is dropped; positions let its draws happen as torch does."""
    sampler = Counted()
    loader: DataLoader[Any] = DataLoader(
        WhoMadeIt(), batch_size=None, sampler=sampler, num_workers=2, persistent_workers=True
    )
    for epoch in range(2):
        list(loader)
        assert sampler.asked == 2 + epoch


def test_an_iterator_without_workers_asks_its_sampler_once() -> None:
    """With a second question the recording would belong to a dropped iterator."""
    sampler = Counted()
    loader: DataLoader[Any] = DataLoader(list(range(8)), batch_size=None, sampler=sampler)  # type: ignore[arg-type]
    list(loader)
    assert sampler.asked == 1


def test_batches_go_round_the_workers_and_a_rotation_moves_them() -> None:
    """Batch j comes from the worker at position `j % n`; after a rotation by k from worker `(j - k) % n`."""
    loader: DataLoader[Any] = DataLoader(WhoMadeIt(), num_workers=3, persistent_workers=True)
    makers = [int(who[0, 0]) for _, who in loader]
    assert makers == [j % 3 for j in range(len(makers))]
    private_names.rotate_workers(private_names.live_iterator(loader), 1)
    makers = [int(who[0, 0]) for _, who in loader]
    assert makers == [(j - 1) % 3 for j in range(len(makers))]
    private_names.discard_iterator(loader)
    assert private_names.live_iterator(loader) is None


class Seeds(Dataset[Any]):
    """What a worker looks like to a dataset, and its next draws."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        numbers = (float(torch.rand(1, dtype=torch.float64)), random.random(), float(np.random.rand()))
        return info.id, info.num_workers, info.seed, torch.initial_seed(), type(info.dataset).__name__, *numbers


def swap_roles(worker: int) -> None:
    private_names.assume_worker_role(1 - worker)


def test_a_worker_that_assumes_a_role_is_indistinguishable_from_it() -> None:
    """Id, seeds, dataset and the first draws are those torch would have given the other worker."""
    seed_everything(1)
    straight = list(DataLoader(Seeds(), batch_size=None, num_workers=2))
    seed_everything(1)
    swapped = list(DataLoader(Seeds(), batch_size=None, num_workers=2, worker_init_fn=swap_roles))
    assert [swapped[1], swapped[0], swapped[3], swapped[2]] == straight
