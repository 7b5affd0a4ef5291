"""Names that no documentation promises: how they are probed, and those of torch's data loader and of `datasets`.

tests/data/test_private_names.py looks for those of torch, so that an upgrade that moves one of these is seen at once.
Facts relied upon (torch 2.6 to 2.13, `dataloader.py` and `_utils/worker.py`):

- an iterator with workers calls `iter(sampler)` twice while it is built (`__init__`, `_reset`), uses the second;
- building an iterator draws `_base_seed` from the loader's generator or the global torch stream, `_reset` does not;
- batch j of an epoch is made by the worker at position `j % num_workers` of `_index_queues`;
- a persistent iterator keeps the sampler, collate function and workers it was built with.

The package `datasets` is not imported: what is not there has no streams.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial, update_wrapper
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import dataloader as _dataloader
from torch.utils.data._utils import worker as _worker

from ckpt_engine.errors import CkptError

BaseIterator = _dataloader._BaseDataLoaderIter
"""The class of all iterators of torch's loader: they refuse to be pickled, and who copies their holder asks for it."""

_FETCHER = "_dataset_fetcher"
_ITERATOR = "_iterator"
_INDEX_SAMPLER = "_index_sampler"
_SAMPLER_ITER = "_sampler_iter"
_RECEIVED = "_rcvd_idx"
_PER_WORKER_LISTS = ("_index_queues", "_workers")
_PACKAGE = "datasets."
_SHUFFLES = "BufferShuffledExamplesIterable"
_CONCATENATES = (
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
    "HorizontallyConcatenatedMultiSourcesExamplesIterable",
)
DATASETS_NAMES = (_SHUFFLES, *_CONCATENATES)
"""Classes of `datasets.iterable_dataset`; a test looks for them."""


def live_iterator(loader: DataLoader[Any]) -> Any | None:
    """The persistent iterator whose workers wait for the next epoch, or None."""
    if not (loader.persistent_workers and loader.num_workers > 0):
        return None
    return getattr(loader, _ITERATOR, None)


def discard_iterator(loader: DataLoader[Any]) -> None:
    """Stop the persistent workers, if any, so that the next `iter(loader)` starts new ones."""
    iterator: Any = getattr(loader, _ITERATOR, None)
    if iterator is not None:
        setattr(loader, _ITERATOR, None)
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def finish_dealt(iterator: Any) -> list[Any]:
    """The batches that persistent workers still make when an epoch is left early, in order; None for one that raised.

    The next epoch waits for these anyway, and throws them away. Empty for iterators other than torch's own.
    """
    if type(iterator) is not _dataloader._MultiProcessingDataLoaderIter:
        return []
    setattr(iterator, _SAMPLER_ITER, iter(()))
    made: list[Any] = []
    while True:
        number = getattr(iterator, _RECEIVED)
        try:
            made.append(next(iterator))
        except StopIteration:
            return made
        except Exception:
            if getattr(iterator, _RECEIVED) == number:
                raise  # a worker is dead, or does not answer in time
            made.append(None)  # of a sample that raised


def takes_indices_from(iterator: Any, sampler: object) -> bool:
    """True if `iterator` asks `sampler` for its indices."""
    return getattr(iterator, _INDEX_SAMPLER, None) is sampler


def knows_its_end(iterator: Any) -> bool:
    """True if an iterator without workers has seen the end of its iterable dataset while making the last batch."""
    return bool(getattr(getattr(iterator, _FETCHER, None), "ended", False))


def is_dead_worker(error: BaseException) -> bool:
    """True if this is how torch says, in the main process, that a worker is gone: what it was to make never comes."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")


def replace_index_sampler(iterator: Any, sampler: object) -> None:
    """Make a persistent iterator that was built before we were attached ask `sampler` from its next epoch on."""
    setattr(iterator, _INDEX_SAMPLER, sampler)


def rotate_workers(iterator: Any, by: int) -> None:
    """Move the worker at position `(j - by) % n` to position `j`; only between epochs (tasks name positions)."""
    for name in _PER_WORKER_LISTS:
        workers = getattr(iterator, name)
        workers[:] = workers[-by:] + workers[:-by]


def assume_worker_role(role: int) -> None:
    """Make this worker process look to the dataset exactly as worker `role` did when it started.

    Seeds python, numpy and torch as torch's `_worker_loop` does for that id and replaces `get_worker_info()`.
    """
    info = get_worker_info()
    assert info is not None
    base_seed = info.seed - info.id
    random.seed(base_seed + role)
    torch.manual_seed(base_seed + role)
    np.random.seed(_worker._generate_state(base_seed, role))  # type: ignore[no-untyped-call]
    # A slotted dataclass from torch 2.13 on, an object with a frozen __dict__ before.
    names = [f.name for f in fields(info)] if is_dataclass(info) else [n for n in vars(info) if not n.startswith("_")]
    values = {name: getattr(info, name) for name in names}
    _worker._worker_info = _worker.WorkerInfo(**{**values, "id": role, "seed": base_seed + role})


def is_of_datasets(part: object) -> bool:
    """Whether its class is one of the package `datasets`."""
    return type(part).__module__.startswith(_PACKAGE)


def forgets_its_buffer(part: object) -> bool:
    """Whether its state leaves out the samples that its shuffle buffer holds."""
    return is_of_datasets(part) and type(part).__name__ == _SHUFFLES


def refuses_states_of_workers(part: object) -> bool:
    """Whether it raises where it loads a state that a worker has saved."""
    return is_of_datasets(part) and type(part).__name__ in _CONCATENATES


# ---- names of any framework that its documentation does not promise: an adapter lists what it uses and probes it


@dataclass(frozen=True, slots=True)
class PrivateName:
    """One such name.

    Args:
        owner: the object it belongs to, a key of the owners that are probed.
        name: the attribute.
        used_for: what stops working without it.
    """

    owner: str
    name: str
    used_for: str


def lacking(names: Sequence[PrivateName], owners: Mapping[str, Any]) -> list[PrivateName]:
    """The names that `owners` do not have; an owner that is None has none."""
    return [entry for entry in names if not _has(owners[entry.owner], entry.name)]


def require(names: Sequence[PrivateName], owners: Mapping[str, Any], framework: str, version: str, user: str) -> None:
    """Whether a framework has all names.

    Args:
        user: the package that uses them.

    Raises:
        CkptError: lists every missing name with the feature that needs it.
    """
    lines = "; ".join(f"{one.owner}.{one.name} (for {one.used_for})" for one in lacking(names, owners))
    if lines:
        raise CkptError(
            f"{framework} {version} lacks names that {user} uses: {lines}",
            hint=f"use a version of {framework} that {user} was tested with, or update ckpt-engine",
        )


def _has(owner: Any, name: str) -> bool:
    """True where the attribute exists; properties that fail to compute still exist."""
    return owner is not None and (
        name in getattr(owner, "__dict__", ()) or hasattr(type(owner), name) or hasattr(owner, name)
    )


class _Replacement(partial[Any]):
    """What stands in the place of a method; copies and pickles of the object have the method that was there.

    Args:
        method: that runs instead.
        owner, name: the object and the attribute.
        before: the attribute of this object itself, if it had one.
    """

    def __new__(cls, method: Any, owner: Any, name: str, before: Any) -> _Replacement:
        made = super().__new__(cls, method)
        vars(made)["_plain"] = (getattr, (owner, name)) if before is None else (partial, (before,))
        update_wrapper(made, method)
        return made

    def __reduce__(self) -> Any:
        return vars(self)["_plain"]


@dataclass(eq=False)
class Replaced:
    """Methods on objects, never on their classes, in the place of those that were there, until `undo`."""

    _before: list[tuple[Any, str, Any]] = field(default_factory=list, init=False)

    def replace(self, owner: Any, name: str, method: Any) -> Any:
        """Put `method` there; what was called before."""
        original, before = getattr(owner, name), vars(owner).get(name)
        self._before.append((owner, name, before))
        setattr(owner, name, method if method is None else _Replacement(method, owner, name, before))
        return original

    def around(self, owner: Any, name: str, do: Callable[..., Any]) -> None:
        """`do(original, ...)` runs in the place of what was called before."""
        self.replace(owner, name, partial(do, getattr(owner, name)))

    @staticmethod
    def is_ours(method: Any) -> bool:
        """Whether this is what `replace` or `around` has put in the place of a method."""
        return isinstance(method, _Replacement)

    def undo(self) -> bool:
        """Leave all of them as they were found; whether there were any. Idempotent."""
        found = bool(self._before)
        while self._before:
            owner, name, before = self._before.pop()
            if before is None:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, before)
        return found
