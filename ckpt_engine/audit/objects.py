"""Which objects of a loop are looked at, and what attributes they have.

These are objects of the user's own classes and of installed packages, but for what only shows or records.
"""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import multiprocessing.connection
import multiprocessing.process
import socket
import subprocess
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from ckpt_engine.audit.source import names_in, slots_of
from ckpt_engine.audit.values import CONTAINERS, GENERATORS, MISSING, MOST_ITEMS, PLAIN, SEQUENCES, TEXTUAL, text_of
from ckpt_engine.plugins import is_function_of_user, is_library, is_standard, of_framework, of_us

_MOST_PARTS = 16
REFERENCES = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    DataLoader,
)
_STEPPERS = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
SAVED_BY_THEMSELVES = (torch.optim.Optimizer, *_STEPPERS)
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_SHOW = frozenset(
    {
        *("tqdm", "rich", "wandb", "tensorboard", "tensorboardX", "mlflow", "loguru", "matplotlib", "logging"),
        *("aim", "comet_ml", "neptune", "clearml", "swanlab", "trackio"),
        *("numpy", "datasets", "webdataset", "litdata", "torchdata"),
    }
)
"""Packages whose objects only show or record, or whose streams and positions are looked at elsewhere."""
_OUTSIDE = (
    *(io.IOBase, socket.socket, subprocess.Popen, types.GeneratorType),
    *(multiprocessing.process.BaseProcess, multiprocessing.connection._ConnectionBase),
)
"""Of Python: state of other processes, of files, or that nothing shows."""


class LiveView(Mapping[str, Any]):
    """Values that are looked up whenever they are asked for, as far as they are there, and those of a dict.

    Args:
        names: of the values.
        read: gives the value of a name; `MISSING` or a ValueError: it is not there.
        own: the dict.
    """

    def __init__(
        self, names: Collection[str], read: Callable[[str], Any], own: Mapping[str, Any] = types.MappingProxyType({})
    ) -> None:
        self._names, self._read, self._own = names, read, own

    def _found(self, name: str) -> Any:
        try:
            return self._read(name) if name in self._names else MISSING
        except (ValueError, IndexError):
            return MISSING  # a variable that is not assigned yet, or an item of a list that is shorter now

    def __getitem__(self, name: str) -> Any:
        found = self._found(name)
        return self._own[name] if found is MISSING else found

    def __iter__(self) -> Iterator[str]:
        return itertools.chain((name for name in self._names if self._found(name) is not MISSING), self._own)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _attribute(owner: Any, name: str) -> Any:
    return getattr(owner, name, MISSING)


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """The first items of a dict or sequence, by key or index, but for plain values; none of other objects."""
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, SEQUENCES) else ()
    return [row for row in itertools.islice(rows, MOST_ITEMS) if not issubclass(type(row[1]), PLAIN)]


def attributes_of(value: Any) -> Mapping[str, Any] | None:
    """The attributes of an object, those of `__slots__` included; None where it has none."""
    if is_parts(value):
        names = tuple(map(str, range(len(value)))) if isinstance(value, list) else ()
        return LiveView(names, lambda name: value[int(name)]) if names else value
    kind: Any = type(value)
    slots, own = slots_of(kind), getattr(value, "__dict__", None)
    return LiveView(slots, functools.partial(_attribute, value), own or {}) if slots else own


def is_used(value: object) -> bool:
    """Whether it is an object or function of the user's own, or a module, that a loop may use without tracking it."""
    if isinstance(value, types.FunctionType):
        return is_function_of_user(value)
    if isinstance(value, type):
        return not (is_library(value) or is_standard(value) or of_framework(value))
    return isinstance(value, nn.Module) or of_user(value) is not None


def of_user(value: object) -> Mapping[str, Any] | None:
    """The attributes of an object of a class of the user's own that is no part of training known to torch."""
    kind = type(value)
    if isinstance(value, (*NAMESPACES, *_STEPPERS)) or is_parts(value):
        return attributes_of(value)
    if isinstance(value, (*REFERENCES, *GENERATORS, *SAVED_BY_THEMSELVES, nn.Module, Dataset, Sampler, torch.Tensor)):
        return None
    if is_standard(kind) or of_framework(kind) or kind.__module__.partition(".")[0] in _SHOW:
        return None
    return attributes_of(value)


def is_parts(value: object) -> bool:
    """Whether a dict or list holds objects that train, as Fabric's `state` does: its items are looked at one by one."""
    kind: Any = type(value)
    if kind is dict:
        rows: Any = dict.values(value)  # type: ignore[arg-type]
        named = all(type(name) is str and "." not in name for name in itertools.islice(value, _MOST_PARTS))  # type: ignore[call-overload]
    elif kind is list:
        rows, named = value, True
    else:
        return False
    kinds = (nn.Module, DataLoader, *SAVED_BY_THEMSELVES)
    return named and any(isinstance(one, kinds) or of_us(type(one)) for one in itertools.islice(rows, _MOST_PARTS))


def is_no_value(value: object) -> bool:
    """Whether an attribute says nothing: what it refers to is looked at for itself, or is our own."""
    ours = of_us(type(value)) and not isinstance(value, NAMESPACES)
    return ours or isinstance(value, REFERENCES) or is_parts(value)


def is_opaque(value: object) -> bool:
    """Whether nothing shows what it holds: an object of a class in C, of another process, or a generator."""
    kind = type(value)
    known = (*PLAIN, *TEXTUAL, *CONTAINERS, *REFERENCES, *GENERATORS, torch.Tensor, np.ndarray, np.generic)
    if isinstance(value, _OUTSIDE):
        return True
    foreign = not (is_standard(kind) or of_framework(kind) or kind.__module__.partition(".")[0] == "numpy")
    return foreign and not isinstance(value, known) and attributes_of(value) is None


def reached(names: Iterable[str], values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is used of these variables, and of the global ones of functions that are called."""
    waiting, seen = [(name, values.get(name)) for name in sorted(names)], set[int]()
    for name, value in waiting:  # it grows meanwhile
        if isinstance(value, dict | list | tuple) and len(value) <= _MOST_PARTS and not is_parts(value):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(f"{name}[{text_of(key)}]", one) for key, one in items if is_used(one)]
        elif id(value) not in seen and (is_used(value) or isinstance(value, DataLoader)):
            seen.add(id(value))
            yield name, value
            if isinstance(value, types.FunctionType):
                waiting += [(one, value.__globals__.get(one)) for one in names_in(value)]
