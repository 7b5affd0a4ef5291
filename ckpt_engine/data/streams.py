"""The random streams, counters and states of samplers and data sets that a loader depends on: captured at one instant,
put back.

That is: the process's global streams, the generators of the loader and its samplers (torch, python and numpy
ones), the samplers' plain counters such as `DistributedSampler.epoch`, their `state_dict` where they have one, and the
epoch of iterable datasets.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ckpt_engine.data import native, rng
from ckpt_engine.data.native import is_stateful
from ckpt_engine.data.walk import walk
from ckpt_engine.state.flatten import bytes_tensor
from ckpt_engine.whose_code import is_function_of_user

Streams = dict[str, Any]
"""`{"rng": global streams, "generators": {path: state}, "counters": {path: value}, "samplers": {path: state}}`."""
Counters = dict[str, Any]
Holders = list[tuple[str, Any]]

_ALWAYS = ("epoch", "seed", "initial_seed")
_MAX_SAMPLERS = 8
_LIBRARIES = ("torch.", "torchdata.")
_KNOWN = {
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
}
_SCALARS = (bool, int, float, str, type(None))
_NO_OBJECTS = (type, ModuleType, torch.Tensor, np.ndarray, dict, list, tuple)
_MOST_OBJECTS, _MOST_PARTS = 64, 16


class Proxy:
    """Behaves as `inner` in every way that it does not change itself."""

    inner: Any

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["inner"], name)


class StandIn(Proxy):
    """Base of what replaces a sampler while an iterator is built; `inner` is the user's sampler, which is looked at."""


def capture(loader: DataLoader[Any], baseline: Mapping[str, Any]) -> Streams:
    """The streams now; `baseline` is `counters(loader)` at attach time, counters equal to it are left out.

    The epoch of a dataset is no part of them where workers of an earlier epoch see the one that is set now.
    """
    epochs = native.epochs(loader.dataset, shared=True)
    found = changed_counters(loader, baseline)
    return capture_holders(loader) | {
        "rng": rng.capture(),
        "counters": {path: value for path, value in found.items() if path.removesuffix(".epoch") not in epochs},
        "kept": kept_by_dataset(loader, baseline),
    }


def restore(loader: DataLoader[Any], streams: Mapping[str, Any]) -> None:
    """Put `capture`'s streams back, the global ones first: a generator may *be* `torch.default_generator`."""
    rng.restore(streams["rng"])
    restore_holders(loader, streams)


def restore_holders(loader: DataLoader[Any], streams: Mapping[str, Any]) -> None:
    """All of that but the global streams.

    A sampler's own state comes last, and only where it differs then: many a `load_state_dict` sets up where the next
    iteration starts, which must not happen to a sampler that is at its place already.
    """
    restore_generators(loader, streams["generators"])
    restore_counters(loader, streams["counters"])
    if kept := streams.get("kept"):
        put_back(kept, dataset=loader.dataset)
    live = dict(holders(loader))
    for path, saved in streams.get("samplers", {}).items():
        sampler: Any = live.get(path)
        if is_stateful(sampler) and not same(sampler.state_dict(), saved):
            sampler.load_state_dict(copy.deepcopy(saved))


def capture_holders(loader: DataLoader[Any]) -> Streams:
    """The inverse of `restore_holders`, with every counter."""
    return {
        "generators": capture_generators(loader),
        "counters": counters(loader),
        "samplers": capture_samplers(loader),
    }


def capture_samplers(loader: DataLoader[Any], among: Holders | None = None) -> dict[str, Any]:
    """What each sampler with `state_dict` and `load_state_dict` says of itself, by path.

    Args:
        among: its `holders`, where they are known.
    """
    return {
        path: copy.deepcopy(holder.state_dict())
        for path, holder in (among or holders(loader))
        if holder is not loader and is_stateful(holder)
    }


def capture_generators(loader: DataLoader[Any], among: Holders | None = None) -> dict[str, Any]:
    """The state of every generator object of the loader or a sampler, by path."""
    return {path: encode(generator) for path, generator in _generators(loader, among)}


def restore_generators(loader: DataLoader[Any], states: Mapping[str, Any]) -> None:
    """Put generator states back by path; torch generators that a sampler creates on first use are created."""
    present = dict(_generators(loader))
    live = dict(holders(loader))
    for path, state in states.items():
        generator = present.get(path)
        if generator is None and state["kind"] == "torch":
            owner, _, name = path.rpartition(".")
            holder = live.get(owner)
            if holder is None or getattr(holder, name, 0) is not None:
                continue
            generator = torch.Generator()
            setattr(holder, name, generator)
        if generator is not None:
            decode(generator, state)


def counters(loader: DataLoader[Any], among: Holders | None = None) -> Counters:
    """Every plain scalar attribute of the loader's class and samplers, and what `set_epoch` of iterable datasets got,
    by path."""
    epochs = {f"{path}.epoch": epoch for path, epoch in native.epochs(loader.dataset).items()}
    return epochs | {
        f"{path}.{name}": value
        for path, holder in among or holders(loader)
        for name, value in attributes(holder)
        if isinstance(value, _SCALARS)
    }


def changed_counters(loader: DataLoader[Any], baseline: Mapping[str, Any], among: Holders | None = None) -> Counters:
    """The scalars that moved since `baseline`, and `epoch` and the seeds always."""
    return {
        path: value
        for path, value in counters(loader, among).items()
        if path.rpartition(".")[2] in _ALWAYS or path not in baseline or baseline[path] != value
    }


def restore_counters(loader: DataLoader[Any], values: Mapping[str, Any]) -> None:
    """Set the recorded scalars on the samplers that still have them."""
    live = dict(holders(loader))
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        holder = live.get(owner)
        if holder is not None and hasattr(holder, name):
            setattr(holder, name, value)
    restore_epochs(loader, values)


def restore_epochs(loader: DataLoader[Any], values: Mapping[str, Any], *, shared: bool = False) -> None:
    """Of the same, what iterable datasets got by `set_epoch`.

    Args:
        shared: only where running workers see it.
    """
    known = native.epochs(loader.dataset, shared=shared)
    found = {path.removesuffix(".epoch"): value for path, value in values.items()}
    native.set_epochs(loader.dataset, {path: value for path, value in found.items() if path in known})


def draws_at_start_only(loader: DataLoader[Any]) -> bool:
    """True if the samplers are known to draw from the global streams at their first index at the latest."""
    return all(type(holder) in _KNOWN for _, holder in holders(loader) if holder is not loader)


def holders(loader: DataLoader[Any]) -> Holders:
    """The loader and the samplers reachable from it, each once, with the path that leads there."""
    return list(walk(("loader", loader), _samplers_in, 1 + _MAX_SAMPLERS))


def _samplers_in(path: str, holder: Any) -> Iterator[tuple[str, Any]]:
    top, names = path == "loader", ("sampler", "batch_sampler")
    for name in reversed(names) if top else names:
        sampler = getattr(holder, name, None)
        inner = sampler.inner if isinstance(sampler, StandIn) else sampler
        if inner is not None and not isinstance(inner, _SCALARS):
            yield name if top else f"{path}.{name}", inner


def path_of(loader: DataLoader[Any], generator: object) -> str | None:
    """Where `capture_generators` has the state of this generator, or None."""
    return next((path for path, found in _generators(loader) if found is generator), None)


def _generators(loader: DataLoader[Any], among: Holders | None = None) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for path, holder in among or holders(loader):
        for name, value in attributes(holder):
            if _kind(value) is not None and id(value) not in seen:
                seen.add(id(value))
                yield f"{path}.{name}", value


# ---- what loader workers change in their own copies of a dataset and a collate function


def kept_by(**roots: Any) -> dict[str, Any]:
    """Numbers, texts and generators that these objects and functions, and those that they refer to, keep, by path."""
    return {
        path: value if isinstance(value, _SCALARS) else encode(value)
        for path, _, _, value in fields_of(**roots)
        if isinstance(value, _SCALARS) or _kind(value) is not None
    }


def kept_by_dataset(loader: DataLoader[Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """What an iterable dataset without a state keeps from pass to pass in this process: what it was, and is now."""
    dataset = loader.dataset
    has_state = loader.num_workers or is_stateful(dataset)
    if not isinstance(dataset, IterableDataset) or has_state or native.keeps_nothing(dataset):
        return {}
    now = kept_by(dataset=dataset)
    return {path: (baseline.get(path), value) for path, value in now.items() if baseline.get(path) != value}


def put_back(saved: Mapping[str, Any], **roots: Any) -> None:
    """Of what `kept_by` gave, what it was and became later, by path: set it, where it is now what it was."""
    for path, owner, name, value in list(fields_of(**roots)):
        was, then = saved.get(path, (None, None))
        if isinstance(then, Mapping):
            if _kind(value) is not None:
                decode(value, then)
        elif path in saved and isinstance(value, _SCALARS) and value == was:
            setattr(owner, name, then)


def fields_of(**roots: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """Path, owner, name and value of the attributes, and of the variables of closures; of so many objects at most."""
    queue, seen = list(roots.items()), set[int]()
    for path, one in queue:  # it grows meanwhile
        if id(one) in seen or isinstance(one, (*_SCALARS, *_NO_OBJECTS)) or len(seen) == _MOST_OBJECTS:
            continue
        seen.add(id(one))
        for name, owner, attribute in _own_fields(one):
            value = getattr(owner, attribute, None)
            yield f"{path}.{name}", owner, attribute, value
            parts = value if isinstance(value, list | tuple) and len(value) <= _MOST_PARTS else [value]
            queue += [(f"{path}.{name}", part) for part in parts if _kind(part) is None]


def unsaved_orders(**roots: Any) -> list[str]:
    """Paths of samplers in these objects that draw their order, and have neither a state nor `set_epoch`."""
    return [
        path
        for path, *_, one in fields_of(**roots)
        if isinstance(one, Sampler) and not is_stateful(one) and not hasattr(one, "set_epoch")
        if any(name == "generator" or _kind(value) is not None for name, value in attributes(one))
    ]


def _own_fields(one: Any) -> list[tuple[str, Any, str]]:
    if isinstance(one, MethodType):
        return [("__self__", one, "__self__")]
    if isinstance(one, partial):
        return [(name, one, name) for name in ("func", "args")]
    if isinstance(one, FunctionType):
        cells = zip(one.__code__.co_freevars, one.__closure__ or (), strict=True)
        module = sys.modules.get(one.__module__)
        found = [(name, module, name) for name in one.__code__.co_names if _counts(getattr(module, name, one))]
        return [*found, *((name, cell, "cell_contents") for name, cell in cells)]
    methods = [name for kind in type(one).__mro__ for name, part in vars(kind).items() if _is_of_user(part)]
    return [
        *((name, one, name) for name in getattr(one, "__dict__", {})),
        *((name, type(one), name) for name in methods),
    ]


def _counts(value: Any) -> bool:
    """Whether a global variable is looked at."""
    return isinstance(value, (*_SCALARS, itertools.count)) or _kind(value) is not None or _is_of_user(value)


def _is_of_user(value: Any) -> bool:
    return isinstance(value, FunctionType) and is_function_of_user(value)


def same(one: Any, other: Any) -> bool:
    """Whether two trees of plain values, tensors and arrays are equal."""
    if isinstance(one, torch.Tensor | np.ndarray) or isinstance(other, torch.Tensor | np.ndarray):
        if type(one) is not type(other) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        return bool(torch.equal(one, other) if isinstance(one, torch.Tensor) else np.array_equal(one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(np.all(one == other))


def attributes(holder: Any) -> list[tuple[str, Any]]:
    """Name and value of a sampler's attributes; of a loader, those of its own class and `generator`."""
    found = list(getattr(holder, "__dict__", {}).items())
    if not isinstance(holder, DataLoader):
        return found
    given = _given_by_library(next(kind for kind in type(holder).__mro__ if kind.__module__.startswith(_LIBRARIES)))
    return [(name, value) for name, value in found if name == "generator" or name not in given]


@cache
def _given_by_library(kind: Any) -> frozenset[str]:
    with warnings.catch_warnings(action="ignore"):  # what a library says of its own loader is not for the user
        return frozenset(vars(kind([0])))


class _GeneratorKind(NamedTuple):
    """One kind of random generators: its class, its state as a storable tree, and what puts such a state back."""

    of: type
    read: Callable[[Any], Any]
    put: Callable[[Any, Any], None]


def _kind(value: object) -> str | None:
    if not isinstance(value, _GENERATORS) or isinstance(value, random.SystemRandom):
        return None  # it is asked for every attribute at every boundary
    return next(name for name, kind in _KINDS.items() if isinstance(value, kind.of))


def encode(generator: Any) -> dict[str, Any]:
    """Where a random stream is, as a storable tree."""
    kind = _kind(generator)
    assert kind is not None
    return {"kind": kind, "state": _KINDS[kind].read(generator)}


def decode(generator: Any, encoded: Mapping[str, Any]) -> None:
    """Put a random stream of the same kind there; in place, so that others that use it see it too."""
    kind = encoded["kind"]
    if kind == _kind(generator):
        _KINDS[kind].put(generator, encoded["state"])


_KINDS: Mapping[str, _GeneratorKind] = {
    "torch": _GeneratorKind(
        torch.Generator,
        lambda generator: generator.get_state().numpy().tobytes(),
        lambda generator, state: generator.set_state(bytes_tensor(state)),
    ),
    "python": _GeneratorKind(random.Random, rng.encode_python, rng.decode_python),
    "numpy": _GeneratorKind(
        np.random.Generator,
        lambda generator: rng.encode_numpy(generator.bit_generator.state),
        lambda generator, state: setattr(generator.bit_generator, "state", rng.decode_numpy(state)),
    ),
    "numpy_legacy": _GeneratorKind(
        np.random.RandomState,
        lambda generator: rng.encode_numpy(generator.get_state(legacy=False)),
        lambda generator, state: generator.set_state(rng.decode_numpy(state)),
    ),
}
_GENERATORS = tuple(kind.of for kind in _KINDS.values())
