"""Data sets and loaders that know their own position (iterable ones, `StatefulDataLoader`): asked for it, put back.

Used for iterable datasets only, and torchdata's loader only where its dataset cannot save itself (its iterator can):
recording the sampler or the workers' datasets ourselves is at least as exact and cheaper.

A loaded state counts for one pass. Many a dataset keeps it and applies it at each `iter()`: attributes that loading has
changed, and that an uninterrupted run never changes, are put back before the pass after.
"""

from __future__ import annotations

import copy
import weakref
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from ckpt_engine.data.private_names import forgets_its_buffer, is_of_datasets, refuses_states_of_workers
from ckpt_engine.data.walk import walk

_POSITION_KEYS = ("dataset_state", "dataset_iter_state")
_TORCHDATA = "torchdata."
_MOST_PARTS = 64
_MOST_ITEMS = 16
_PLAIN = (bool, int, float, str, bytes, type(None))
_MISSING: Any = object()
_UNKNOWN = -1
_NEITHER = (torch.nn.Module, torch.optim.Optimizer, DataLoader)

_loaded: dict[int, list[tuple[str, Any, Any]]] = {}
"""By id of a dataset: attributes that only loading has set, by path, what they are since and what they were before."""


def is_stateful(value: object) -> bool:
    """True if `value` can save and load its own state."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_torchdatas(loader: DataLoader[Any]) -> bool:
    """True for a `StatefulDataLoader`: what its state means is known, and of no other loader class."""
    return any(kind.__module__.startswith(_TORCHDATA) for kind in type(loader).__mro__)


def has_native_position(loader: DataLoader[Any]) -> bool:
    """True if the position of this iterable loader is best taken from the loader or its dataset."""
    if not isinstance(loader.dataset, IterableDataset):
        return False
    return loader.num_workers == 0 if is_stateful(loader.dataset) else is_torchdatas(loader)


def why_replayed(loader: DataLoader[Any]) -> str | None:
    """Why the state of its iterable dataset does not say where it is; None if it does, or if there is none."""
    dataset = loader.dataset
    if not isinstance(dataset, IterableDataset):
        return None
    if any(forgets_its_buffer(part) for _, part in _parts(dataset)):
        return "the shuffle buffer of a streamed data set does not save what it holds"
    if loader.num_workers and any(refuses_states_of_workers(part) for _, part in _parts(dataset)):
        return "streamed data sets that are concatenated cannot load what a worker has saved"
    if is_stateful(dataset):
        try:
            dataset.state_dict()  # type: ignore[attr-defined]
        except Exception as err:  # noqa: BLE001 - it is the user's code, and batches can be loaded again without it
            return f"the state_dict() of {type(dataset).__name__} raises {type(err).__name__}: {err}"
    return None


def keeps_nothing(dataset: Any) -> bool:
    """True if it is known that workers carry nothing of this dataset from one pass into the next."""
    return isinstance(dataset, IterableDataset) and is_of_datasets(dataset)


def repeats_work(dataset: Any) -> bool:
    """True if a part does work again that was done, to get to where its state says: its random draws come twice."""
    return any(is_of_datasets(part) for _, part in _parts(dataset))


def capture(loader: DataLoader[Any]) -> dict[str, Any]:
    """An independent copy of the position (a stateful loader goes on changing what it returned)."""
    if loader.num_workers == 0 and is_stateful(loader.dataset) and isinstance(loader.dataset, IterableDataset):
        return capture_dataset(loader)
    return {"of": "loader", "state": copy.deepcopy(loader.state_dict())}  # type: ignore[attr-defined]


def before(loader: DataLoader[Any]) -> dict[str, Any] | None:
    """The same before the loader builds an iterator: None of one that would build it for that."""
    return capture_dataset(loader) if has_native_position(loader) and is_stateful(loader.dataset) else None


def capture_dataset(loader: DataLoader[Any]) -> dict[str, Any]:
    """An independent copy of the state of a dataset that lives in this process."""
    return {"of": "dataset"} | dataset_state(loader.dataset)


def dataset_state(dataset: Any) -> dict[str, Any]:
    """Its state, and of an iterable one what its attributes are in a run that has loaded nothing."""
    found = {"state": copy.deepcopy(dataset.state_dict())}
    return found | {"live": _live(dataset)} if isinstance(dataset, IterableDataset) else found


def restore(loader: DataLoader[Any], native: Mapping[str, Any]) -> None:
    """Hand the state back; it takes effect at the next `iter(loader)`, and there only."""
    if native["of"] == "loader":
        loader.load_state_dict(copy.deepcopy(native["state"]))  # type: ignore[attr-defined]
    else:
        load(loader.dataset, native)


def load(dataset: Any, saved: Mapping[str, Any]) -> None:
    """Give the dataset what `dataset_state` returned."""
    begin_anew(dataset)
    live: Mapping[str, int] | None = saved.get("live")
    before = {} if live is None else {path: value for path, _, _, value in _attributes(dataset)}
    dataset.load_state_dict(copy.deepcopy(saved["state"]))
    if live is None:
        return
    only_loaded = []
    for path, _, _, value in _attributes(dataset):
        was, ran = before.get(path, _MISSING), live.get(path)
        if value is was or _digest(value) == ran:
            continue
        never_set = was is _MISSING and ran is None
        as_it_ran = was is not _MISSING and ran != _UNKNOWN and _digest(was) == ran
        if never_set or as_it_ran:
            only_loaded.append((path, value, was))
    if only_loaded:
        _loaded[id(dataset)] = only_loaded
        weakref.finalize(dataset, _loaded.pop, id(dataset), None)


def begin_anew(dataset: Any) -> None:
    """No state was loaded for the next pass."""
    rows = {path: (value, was) for path, value, was in _loaded.pop(id(dataset), ())}
    for path, owner, name, now in list(_attributes(dataset)) if rows else ():
        value, was = rows.get(path, (_MISSING, _MISSING))
        if not _still(now, value):
            continue
        if was is _MISSING:
            del owner[name]
        else:
            owner[name] = was


def continue_once(dataset: Any, *, ended: bool) -> None:
    """The next `iter(dataset)` goes on where the loaded state says, and the one after begins at the beginning.

    Args:
        ended: the next one is empty: a state taken after the last, short batch cannot say that it is over.
    """
    if not ended and id(dataset) not in _loaded:
        return
    original = type(dataset)
    passes = 0

    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807
        nonlocal passes
        passes += 1
        if ended or passes > 1:
            self.__class__ = original
            begin_anew(self)
        return iter(()) if ended else original.__iter__(self)

    metaclass: Any = type(original)
    dataset.__class__ = metaclass(original.__name__, (original,), {"__iter__": __iter__})


def is_finished(native: Mapping[str, Any]) -> bool:
    """True if torchdata's loader will start its next epoch, not end at once, when it is given this state."""
    return native["of"] == "loader" and bool(native["state"].get("_iterator_finished"))


def starts_by_itself(loader: DataLoader[Any]) -> bool:
    """True if torchdata's loader was given a state by somebody else: its next epoch starts in the middle."""
    return is_torchdatas(loader) and getattr(loader, "next_iter_state", None) is not None


def reset(loader: DataLoader[Any]) -> None:
    """Make torchdata's loader forget an iterator made ahead of time (Accelerate's adapter makes one in `prepare`)."""
    if is_torchdatas(loader):
        loader.load_state_dict({})  # type: ignore[attr-defined]


def holds_state(native: Mapping[str, Any]) -> bool:
    """False if the loader found no state in its dataset and will fetch and drop every batch again instead.

    Reads torchdata's state layout (`_DATASET_STATE`, `_DATASET_ITER_STATE` of `stateful_dataloader.worker`).
    """
    return native["of"] == "dataset" or any(value is not None for value in _positions(native["state"]))


def epochs(dataset: Any, *, shared: bool = False) -> dict[str, int]:
    """The epochs that iterable datasets with `set_epoch` were given, by path.

    Args:
        shared: only those that running workers see.
    """
    return {
        path: epoch
        for path, part in _parts(dataset)
        if (epoch := _epoch(part)) is not None and (is_of_datasets(part) or not shared)
    }


def set_epochs(dataset: Any, values: Mapping[str, Any]) -> None:
    """The inverse of `epochs`."""
    for path, part in _parts(dataset) if values else ():
        if path in values and _epoch(part) not in (None, values[path]):
            part.set_epoch(values[path])


def orders(dataset: Any) -> dict[str, dict[str, int]]:
    """The streams from which parts of the package `datasets` take their order, as `exactness.Samples`.

    They do not move: each pass works on copies.
    """
    return {
        f"{path}.{name}": {"length": 1, "checksum": zlib.crc32(repr(value.bit_generator.state).encode())}
        for path, part in _parts(dataset)
        if is_of_datasets(part)
        for name, value in vars(part).items()
        if isinstance(value, np.random.Generator)
    }


def _positions(node: Any) -> Iterator[Any]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key in _POSITION_KEYS:
                yield value
            else:
                yield from _positions(value)


def _parts(dataset: Any) -> Iterator[tuple[str, Any]]:
    """An iterable dataset and what it is made of that has a state or is one itself, by path."""
    return walk(("dataset", dataset), _inner, _MOST_PARTS) if isinstance(dataset, IterableDataset) else iter(())


def _inner(path: str, part: Any) -> Iterator[tuple[str, Any]]:
    for name, value in list(getattr(part, "__dict__", {}).items()):
        inner = value if isinstance(value, list | tuple) else [value]
        for index, one in enumerate(inner[:_MOST_ITEMS]):
            if not isinstance(one, _NEITHER) and (isinstance(one, IterableDataset) or is_stateful(one)):
                yield f"{path}.{name}" + (f"[{index}]" if inner is value else ""), one


def _epoch(part: Any) -> int | None:
    if not callable(getattr(part, "set_epoch", None)):
        return None
    epoch = getattr(part, "epoch", None)
    return epoch if isinstance(epoch, int) and not isinstance(epoch, bool) else None


def _attributes(dataset: Any) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """Path, owner, name and value of each attribute of the datasets inside."""
    for path, part in _parts(dataset):
        if not is_of_datasets(part) or isinstance(part, IterableDataset):
            owner = getattr(part, "__dict__", {})
            yield from ((f"{path}.{name}", owner, name, value) for name, value in list(owner.items()))


def _live(dataset: Any) -> dict[str, int]:
    rows = {path: (value, was) for path, value, was in _loaded.get(id(dataset), ())}
    found = {}
    for path, _, _, now in _attributes(dataset):
        value, was = rows.get(path, (_MISSING, _MISSING))
        now = was if path in rows and _still(now, value) else now
        if now is not _MISSING:
            found[path] = _digest(now)
    return found


def _still(now: Any, loaded: Any) -> bool:
    return now is loaded or (isinstance(now, _PLAIN) and type(now) is type(loaded) and now == loaded)


def _digest(value: Any) -> int:
    """Of plain values and small containers of them; no text is kept, as it may be a secret."""
    small = isinstance(value, list | tuple | dict) and len(value) <= _MOST_ITEMS
    items = [*value.keys(), *value.values()] if isinstance(value, dict) and small else value if small else [value]
    if not all(isinstance(one, _PLAIN) for one in items):
        return _UNKNOWN
    return zlib.crc32(f"{type(value).__name__}{value!r}".encode(errors="surrogatepass"))
