"""Datasets with `state_dict` that live in this process, and `StatefulDataLoader`s that save their own position.

Used for iterable datasets only, and torchdata's loader only where its dataset cannot save itself (its iterator can):
recording the sampler or the workers' datasets ourselves is at least as exact and cheaper.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ckpt_engine.data.shipping import is_stateful

__all__ = [
    "capture",
    "capture_dataset",
    "has_native_position",
    "holds_state",
    "is_finished",
    "reset",
    "restore",
    "starts_by_itself",
]

_POSITION_KEYS = ("dataset_state", "dataset_iter_state")


def has_native_position(loader: DataLoader[Any]) -> bool:
    """True if the position of this iterable loader is best taken from the loader or its dataset."""
    if not isinstance(loader.dataset, IterableDataset):
        return False
    return loader.num_workers == 0 if is_stateful(loader.dataset) else is_stateful(loader)


def capture(loader: DataLoader[Any]) -> dict[str, Any]:
    """An independent copy of the position (a stateful loader goes on changing what it returned)."""
    if loader.num_workers == 0 and is_stateful(loader.dataset) and isinstance(loader.dataset, IterableDataset):
        return capture_dataset(loader)
    source: Any = loader
    return {"of": "loader", "state": copy.deepcopy(source.state_dict())}


def capture_dataset(loader: DataLoader[Any]) -> dict[str, Any]:
    """An independent copy of the state of a dataset that lives in this process."""
    dataset: Any = loader.dataset
    return {"of": "dataset", "state": copy.deepcopy(dataset.state_dict())}


def restore(loader: DataLoader[Any], native: Mapping[str, Any]) -> None:
    """Hand the state back; it takes effect at the next `iter(loader)`."""
    target: Any = loader if native["of"] == "loader" else loader.dataset
    target.load_state_dict(copy.deepcopy(native["state"]))


def is_finished(native: Mapping[str, Any]) -> bool:
    """True if a stateful loader will start its next epoch, not end at once, when it is given this state."""
    return native["of"] == "loader" and bool(native["state"].get("_iterator_finished"))


def starts_by_itself(loader: DataLoader[Any]) -> bool:
    """True if a stateful loader was given a state by somebody else: its next epoch starts in the middle."""
    return is_stateful(loader) and getattr(loader, "next_iter_state", None) is not None


def reset(loader: DataLoader[Any]) -> None:
    """Make a stateful loader forget an iterator made ahead of time (Accelerate's adapter makes one in `prepare`)."""
    if is_stateful(loader):
        loader.load_state_dict({})  # type: ignore[attr-defined]


def holds_state(native: Mapping[str, Any]) -> bool:
    """False if the loader found no state in its dataset and will fetch and drop every batch again instead.

    Reads torchdata's state layout (`_DATASET_STATE`, `_DATASET_ITER_STATE` of `stateful_dataloader.worker`).
    """
    return native["of"] == "dataset" or any(value is not None for value in _positions(native["state"]))


def _positions(node: Any) -> Iterator[Any]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key in _POSITION_KEYS:
                yield value
            else:
                yield from _positions(value)
