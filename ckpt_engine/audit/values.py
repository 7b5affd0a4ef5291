"""Values that training may change, as tuples of plain values that compare in any process; of large ones a sample.

Which objects have such values as attributes: those of the user's own classes and of installed packages, but for what
only shows or records.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import functools
import io
import itertools
import marshal
import multiprocessing.connection
import multiprocessing.process
import pathlib
import random
import socket
import subprocess
import time
import types
import uuid
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from ckpt_engine.audit.source import names_in, slots_of
from ckpt_engine.data import streams
from ckpt_engine.data.walk import leaves
from ckpt_engine.observe.clock import age_of_process
from ckpt_engine.state.sharding import here, is_wrapper, parts_of
from ckpt_engine.whose_code import is_function_of_user, is_library, is_standard, of_framework, of_us

DEPTH = 8
MOST_ITEMS = 256
_MOST_NODES = 8192
"""Of one value: containers and what is in them. A look must not take longer than a step."""
_LONG_ROW = 32
_MOST_COPIED = 10_000
_WHOLE_BYTES = 1 << 20
_SAMPLES = 4096

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_PLAIN = frozenset(PLAIN)
TEXTUAL = (
    *(enum.Enum, pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal),
    *(fractions.Fraction, uuid.UUID, range, slice, torch.dtype, torch.device, np.dtype),
)
SEQUENCES = (list, tuple, collections.deque)
_SETS = (set, frozenset)
CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_CHANGING = (dict, list, set, collections.deque)
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)

Frozen = tuple[Any, ...]
MISSING: Any = object()
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


def freeze(
    value: Any,
    saved: Container[int] = (),
    depth: int = DEPTH,
    arrays: Callable[[Any], Frozen] | None = None,
    most: int = _MOST_NODES,
) -> Frozen:
    """The value as a tuple that compares; objects by their class, as their attributes have a holder of their own.

    Args:
        saved: addresses of the memory that a `state_dict` has; what it holds does not count.
        arrays: freezes tensors and arrays.
        most: nodes of it that are looked at; a long row of plain values in a container is one of them.
    """
    kind = type(value)
    if kind in PLAIN:
        return _freeze_plain(value)
    if arrays is not None and isinstance(value, torch.Tensor | np.ndarray):
        return arrays(value)
    if isinstance(value, torch.Tensor):
        return _freeze_tensor(value, saved)
    if isinstance(value, np.ndarray | np.generic):
        return _freeze_array(np.asarray(value))
    if isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom):
        return ("stream", type_of(value), xxhash.xxh3_128_hexdigest(repr(streams.encode(value)).encode()))
    if isinstance(value, (*TEXTUAL, itertools.count)):
        return ("text", type_of(value), text_of(value))
    if depth > 0 and isinstance(value, _SETS):
        rows = sorted(map(text_of, value)) if len(value) <= min(MOST_ITEMS, 4 * most) else []
        return ("set", len(value), *rows)
    if depth > 0 and isinstance(value, (dict, *SEQUENCES)):
        return _freeze_container(value, saved, depth - 1, arrays, most)
    return ("object", type_of(value))


def text_of(value: Any) -> str:
    """Its `repr`; of a value that has none its class, or its hexadecimal digits.

    The `repr` of a user's class may raise, and Python writes no integer of more than 4,300 digits in decimal.
    """
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - it may be any
        return hex(value) if type(value) is int else type_of(value)


def _freeze_container(
    value: Any, saved: Container[int], depth: int, arrays: Callable[[Any], Frozen] | None, most: int
) -> Frozen:
    is_dict = isinstance(value, dict)
    head = ("dict" if is_dict else type(value).__name__, len(value))
    is_row = len(value) > _LONG_ROW and most < _MOST_NODES
    items = _sampled(_items_of(value), _LONG_ROW * most if is_row else most)
    if is_row and _PLAIN.issuperset(map(type, itertools.chain.from_iterable(items) if is_dict else items)):
        # By one call. From version 3 on it tells one object from an equal one.
        return (*head, xxhash.xxh3_128_hexdigest(marshal.dumps(list(items), 2)))
    items = _sampled(items, most)
    deeper = (saved, depth, arrays, most // max(1, len(items)))
    if is_dict:
        return (*head, *((freeze(key, *deeper), freeze(one, *deeper)) for key, one in items))
    return (*head, *(freeze(one, *deeper) for one in items))


def _items_of(value: Any) -> Sequence[Any]:
    """Of a container, pairs of a dict; of a very large one that has no places the beginning and the end."""
    if isinstance(value, list | tuple):
        return value
    rows = dict.items(value) if isinstance(value, dict) else value
    if len(value) <= _MOST_COPIED:
        return list(rows)
    return [*itertools.islice(rows, MOST_ITEMS), *itertools.islice(reversed(rows), MOST_ITEMS)]


def _freeze_plain(value: Any) -> Frozen:
    if type(value) in (str, bytes) and len(value) > _WHOLE_BYTES >> 6:
        data = value.encode(errors="surrogatepass") if isinstance(value, str) else value
        return (type(value).__name__, len(value), xxhash.xxh3_128_hexdigest(data))
    return (type(value).__name__, text_of(value))


def _freeze_tensor(tensor: torch.Tensor, saved: Container[int]) -> Frozen:
    if is_wrapper(tensor):
        return (type_of(tensor), *[_freeze_tensor(part, saved) for part in parts_of(tensor)])
    tensor = here(tensor)
    head: Frozen = ("tensor", str(tensor.dtype), tuple(tensor.shape))
    if saved and address(tensor) in saved:
        return (*head, "saved")
    head += ("trained",) * (tensor.requires_grad and tensor.is_leaf)
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        return (*head, str(tensor.layout))
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    if flat.numel() * flat.element_size() > _WHOLE_BYTES:
        flat = flat[:: max(1, flat.numel() // _SAMPLES)]
    data = flat.cpu().contiguous().view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return (*head, xxhash.xxh3_128_hexdigest(data.data))


def _freeze_array(array: np.ndarray[Any, Any]) -> Frozen:
    head = ("array", array.dtype.str, array.shape)
    if array.dtype.hasobject:
        return (*head, "objects")
    if array.nbytes > _WHOLE_BYTES:
        array = array.reshape(-1)[:: max(1, array.size // _SAMPLES)]
    return (*head, xxhash.xxh3_128_hexdigest(array.tobytes()))


def _sampled(rows: Sequence[Any], most: int = MOST_ITEMS) -> Sequence[Any]:
    """All of a short sequence; the beginning, the end and some between of a long one."""
    part = min(most, MOST_ITEMS) // 4
    if len(rows) <= 4 * part or not part:
        return rows[: 4 * part]
    return [*rows[:part], *rows[part : -part : max(1, len(rows) // (2 * part))], *rows[-part:]]


def digest(frozen: Frozen) -> str:
    """A short text that is the same in every process for the same frozen value."""
    return str(xxhash.xxh3_128_hexdigest(repr(frozen).encode()))


def is_drawn(value: Any) -> bool:
    """Whether it may be drawn at random: a fraction, or a tensor, array or container of nothing but numbers."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.size > 0 if isinstance(value, np.ndarray) else value.numel() > 0
    if isinstance(value, CONTAINERS):
        rows = list(itertools.islice(value.values() if isinstance(value, dict) else value, MOST_ITEMS))
        return bool(rows) and all(type(one) is int or is_drawn(one) for one in rows)
    return isinstance(value, float)


class Clocks:
    """Tells a reading of a clock, which is no state, by when it was made.

    Args:
        of_process: from the start of this process on, else from now on.

    Attributes:
        since: what the clocks showed at the last look.
    """

    def __init__(self, *, of_process: bool = False) -> None:
        self.since = self._now()
        if of_process:
            age = age_of_process()
            self.since = tuple(one - age for one in self.since)

    @staticmethod
    def _now() -> tuple[float, ...]:
        return time.time(), time.monotonic(), time.perf_counter()

    def are_read(self, value: Any) -> bool:
        """Whether a number that is new since the last look is what a clock has shown since then."""
        if type(value) is datetime.datetime:
            value = value.timestamp()
        seconds = value / 1e9 if type(value) is int and 0 < value < 1 << 63 else value
        between = zip(self.since, self._now(), strict=True)
        return type(seconds) is float and any(begin <= seconds <= end for begin, end in between)

    def look(self) -> None:
        """The next look begins here."""
        self.since = self._now()


def is_iterator(value: Any) -> bool:
    """Whether the value is a running iterator, whose position nothing shows."""
    return type(value).__module__ in ("builtins", "itertools") and isinstance(value, Iterator)


def is_own(value: Any) -> bool:
    """Whether it changes within and can be put back there: a stream, or a container of streams and plain values.

    Trained tensors are plain values too, but not the parameters of modules.
    """
    return isinstance(value, GENERATORS) or (type(value) in _CHANGING and _is_plain(value, DEPTH))


def changes_in_place(value: Any) -> bool:
    """The same of a variable that is always the same object: a tensor or an array too."""
    if isinstance(value, torch.Tensor):
        return value.is_leaf
    return isinstance(value, np.ndarray) or is_own(value)


def _is_plain(value: Any, depth: int, most: int = _MOST_NODES) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_leaf and not (value.requires_grad and isinstance(value, torch.nn.Parameter))
    if isinstance(value, CONTAINERS):
        rows = _first_of(value, most) + (_first_of(value.values(), most) if isinstance(value, dict) else [])
        return depth > 0 and all(_is_plain(one, depth - 1, most // len(rows)) for one in rows)
    return isinstance(value, (*PLAIN, *TEXTUAL, *GENERATORS, np.ndarray, np.generic))


def type_of(value: Any) -> str:
    """The class as people write it."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def address(tensor: torch.Tensor) -> int:
    """Where the memory of what this rank has of the tensor begins; 0 where it has none of its own."""
    tensor = here(tensor)
    if torch.nn.parameter.is_lazy(tensor) or is_wrapper(tensor):
        return 0
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return 0
    return int(tensor.untyped_storage().data_ptr())


@dataclass(eq=False)
class MemoryOfSaved:
    """The addresses of tensors that a `state_dict` has.

    A tensor that has been given other memory since does not count: what is now at the old address may be anything.
    No weak reference leads to them, as torch does not swap a tensor that has one.
    """

    _by_address: dict[object, list[tuple[Mapping[str, Any], str]]] = field(default_factory=dict)

    def add(self, values: Mapping[str, Any], names: Iterable[str]) -> None:
        """Parameters or buffers of a module, which are looked at again when they are asked for."""
        for name in names:
            if values[name] is not None:
                self._by_address.setdefault(address(values[name]), []).append((values, name))

    def __contains__(self, where: object) -> bool:
        there = (values.get(name) for values, name in self._by_address.get(where, ()))
        return any(one is not None and address(one) == where for one in there)


def fill(now: Any, saved: Any, *, within: bool) -> bool:
    """Give an object the content of another one; False: it cannot have it.

    Args:
        within: tensors and arrays in a container stay the objects that they are.
    """
    if isinstance(now, GENERATORS) and type(now) is type(saved):
        streams.decode(now, streams.encode(saved))
    elif isinstance(now, torch.Tensor | np.ndarray) and shapes(now) == shapes(saved):
        fits = bool(now.flags.writeable if isinstance(now, np.ndarray) else now.is_leaf)
        if fits:
            with torch.no_grad():
                now[...] = saved
        return fits
    elif within and isinstance(now, list | dict) and shapes(now) and shapes(now) == shapes(saved):
        for key in now if isinstance(now, dict) else range(len(now)):
            if not fill(now[key], saved[key], within=True):
                now[key] = saved[key]
    elif isinstance(now, list | collections.deque) and type(now) is type(saved):
        now.clear()
        now.extend(saved)
    elif isinstance(now, dict | set) and isinstance(saved, dict if isinstance(now, dict) else set):
        now.clear()
        now.update(saved)
    else:
        return False
    return True


def exchanged(value: Any, others: Mapping[int, Any]) -> Any:
    """The value, or what stands for it; lists and dicts stay the objects that they are.

    Args:
        others: by the id of a tensor or array what stands for it.
    """
    if isinstance(value, dict):
        value.update({key: exchanged(one, others) for key, one in value.items()} if others else ())
    elif isinstance(value, list) and others:
        value[:] = [exchanged(one, others) for one in value]
    elif type(value) is tuple and others:
        return tuple(exchanged(one, others) for one in value)
    return others.get(id(value), value)


def shapes(value: Any) -> Any:
    """Of a tensor or array, or of a list or dict of such or of streams only; None of anything else."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return (tuple(value.shape), value.dtype)
    if not isinstance(value, list | dict):
        return None
    items = value.items() if isinstance(value, dict) else enumerate(value)
    rows = {key: type(one) if isinstance(one, GENERATORS) else shapes(one) for key, one in items}
    return None if None in rows.values() else rows


def changes_within(value: Any) -> bool:
    """Whether it may compare as another one while it stays the same object."""
    if type(value) is tuple:
        return any(map(changes_within, value))
    return is_iterator(value) or issubclass(
        type(value), (torch.Tensor, np.ndarray, np.generic, *GENERATORS, *CONTAINERS)
    )


def nbytes_of(value: Any) -> int:
    return sum(int(one.nbytes) for one in leaves(value) if isinstance(one, torch.Tensor | np.ndarray))


def tensors_in(value: Any, depth: int = DEPTH, most: int = _MOST_NODES) -> Iterator[Any]:
    """The tensors and arrays that a value is or holds."""
    if isinstance(value, torch.Tensor | np.ndarray):
        yield value
    elif depth > 0 and isinstance(value, (dict, *SEQUENCES)):
        rows = _first_of(value.values() if isinstance(value, dict) else value, most)
        for one in rows:
            yield from tensors_in(one, depth - 1, most // len(rows))


def _first_of(items: Iterable[Any], most: int) -> list[Any]:
    """Those of the first items that are no plain values."""
    return [one for one in itertools.islice(items, min(MOST_ITEMS, most)) if type(one) not in _PLAIN]


@dataclass(eq=False)
class Looked:
    """Tensors and arrays as they were when they were looked at last, for looks at the same ones.

    To read a tensor of a GPU the host waits until all queued work is done. So what tells whether one has moved is its
    version; a kernel of the user that writes without a trace there shows at the looks 1, 2, 4, 8, …, which read all.
    """

    _before: dict[int, tuple[Any, tuple[int, ...], Frozen]] = field(default_factory=dict)
    _now: dict[int, tuple[Any, tuple[int, ...], Frozen]] = field(default_factory=dict)
    _looks: int = 0

    def again(self) -> None:
        """All of them are looked at once more."""
        self._before, self._now = self._now, {}
        self._looks += 1

    def freeze(self, value: Any, saved: Container[int], *, quick: bool) -> Frozen:
        """As `freeze`; `quick`: one that is the same object, of the same version, is what it was."""
        counted = isinstance(value, torch.Tensor) and not value.is_inference()
        version = (address(value), value._version) if counted else (0, 0)
        unread = counted and value.is_cuda and self._looks & (self._looks - 1) != 0 and version[0] not in saved
        one = self._before.get(id(value))
        if not (quick or unread) or one is None or one[0]() is not value or one[1] != version:
            one = (weakref.ref(value), version, ("version", *version) if unread else freeze(value, saved))
        self._now[id(value)] = one
        return one[2]


# ---- whose attributes are values


class LiveView(Mapping[str, Any]):
    """Values that are looked up whenever they are asked for, as far as they are there, and those of a dict.

    Args:
        names: of the values.
        read: gives the value of a name; `MISSING`, a ValueError or a LookupError: it is not there.
        own: the dict.
    """

    def __init__(
        self, names: Collection[str], read: Callable[[str], Any], own: Mapping[str, Any] = types.MappingProxyType({})
    ) -> None:
        self._names, self._read, self._own = names, read, own

    def _found(self, name: str) -> Any:
        try:
            return self._read(name) if name in self._names else MISSING
        except (ValueError, LookupError, AttributeError):
            return MISSING  # a variable or slot that is not assigned yet, or an item of a list that is shorter now

    def __getitem__(self, name: str) -> Any:
        found = self._found(name)
        return self._own[name] if found is MISSING else found

    def __iter__(self) -> Iterator[str]:
        return itertools.chain((name for name in self._names if self._found(name) is not MISSING), self._own)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _slot(owner: Any, name: str) -> Any:
    kind: Any = type(owner)
    return slots_of(kind)[name].__get__(owner)


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """The first items of a dict or sequence, by key or index, but for plain values; none of other objects."""
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, SEQUENCES) else ()
    first = list(itertools.islice(rows, MOST_ITEMS))  # in one call: other threads may change the container meanwhile
    return [row for row in first if not issubclass(type(row[1]), PLAIN)]


def attributes_of(value: Any) -> Mapping[str, Any] | None:
    """The attributes of an object, those of `__slots__` included; None where it has none."""
    if is_parts(value):
        names = tuple(map(str, range(len(value)))) if isinstance(value, list) else ()
        return LiveView(names, lambda name: value[int(name)]) if names else value
    kind: Any = type(value)
    slots, own = slots_of(kind), getattr(value, "__dict__", None) if kind.__dictoffset__ else None
    return LiveView(slots, functools.partial(_slot, value), own or {}) if slots else own


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
