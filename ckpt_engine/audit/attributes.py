"""Walks the attributes of the objects that take part in training, and freezes their values so that they compare.

A *holder* is one object whose attributes are looked at; its path is how a user reaches it (`model.encoder`,
`loader.dataset`). A frozen value is a tuple of plain values that is equal in any process if and only if the value is.
Of what is large a sample is frozen.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import functools
import itertools
import pathlib
import random
import types
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from ckpt_engine.audit.source import (
    chosen_class,
    defaults_of,
    function_decides,
    hooks_of_user,
    is_metric,
    names_of,
    slots_of,
    variable_decides,
)
from ckpt_engine.data import rng, streams
from ckpt_engine.plugins import is_function_of_user, is_library, is_standard, of_framework
from ckpt_engine.state.sharding import here

MOST_HOLDERS = 5000
"""Objects that are looked at; the walk ends there."""
_DEPTH = 8
_MOST_ITEMS = 256
_WHOLE_BYTES = 1 << 20
_SAMPLES = 4096

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_TEXTUAL = (
    *(enum.Enum, pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal),
    *(fractions.Fraction, uuid.UUID, range, slice, torch.dtype, torch.device, np.dtype),
)
_SEQUENCES = (list, tuple, collections.deque)
_SETS = (set, frozenset)
CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_CHANGING = (dict, list, set, collections.deque)
REFERENCES = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    DataLoader,
)
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_COUNTS: tuple[type, ...] = (itertools.count, itertools.cycle, type(iter([])), type(iter(range(0))))
"""Iterators that are over no loader."""
_OF_MODULES = frozenset(vars(nn.Module()))
_SAVED_BY_THEMSELVES = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_IN_METRICS = frozenset(
    {
        *("update", "compute", "_update_signature", "_defaults", "_reductions", "_persistent"),
        *("_cache", "_forward_cache", "_computed"),
    }
)
"""Of each metric: functions, what it is made of, and results that are computed again."""
_WRAPPERS = ("torch.nn.parallel", "torch._dynamo")

Frozen = tuple[Any, ...]
MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class AttributeHolder:
    """One object whose attributes are looked at.

    Args:
        path: how a user reaches it.
        owner: the object.
        values: its attributes, live.
        skipped: names of attributes that something else saves, or that belong to a framework.
        public_only: leave out names that begin with an underscore.
        shares: what its attributes refer to may belong to others too: it is replaced, never changed in place.
        plain_only: leave out what is no number, text, None, container, stream, or tensor without a gradient.
        states: parameters or buffers of a module that no snapshot has otherwise: put back whatever they are at first.
        in_place: only what changes within: streams, tensors and containers of plain values, as nothing can be assigned.
        records: containers that grow are taken for records, which training does not follow from.
    """

    path: str
    owner: Any
    values: Mapping[str, Any]
    skipped: frozenset[str]
    public_only: bool
    shares: bool = False
    plain_only: bool = False
    states: bool = False
    in_place: bool = False
    records: bool = False

    def names(self) -> Iterator[str]:
        """The attributes that are looked at."""
        for name in tuple(self.values):
            value = self.values[name]
            plain = not self.plain_only or isinstance(value, (*PLAIN, *CONTAINERS, *_COUNTS))
            if (self.in_place or not plain) and not changes_in_place(value):
                continue
            hides = self.public_only or isinstance(self.owner, type)
            if name not in self.skipped and not (hides and name.startswith("_" if self.public_only else "__")):
                yield name

    def assign(self, name: str, value: Any) -> None:
        """Put a value back."""
        if isinstance(self.owner, types.CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, nn.Module) and name in self.owner._buffers:
            self.owner._buffers[name] = value
        else:
            setattr(self.owner, name, value)


@dataclass(frozen=True, slots=True)
class UsedObject:
    """A root that the loop only uses: its numbers and texts may decide something, containers that grow are records."""

    owner: Any


@dataclass(frozen=True, slots=True)
class DerivedObject:
    """A root of a class derived from a framework's: what that class does not have counts, private names too."""

    owner: Any
    framework: type


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
        except ValueError:
            return MISSING  # a variable that is not assigned yet

    def __getitem__(self, name: str) -> Any:
        found = self._found(name)
        return self._own[name] if found is MISSING else found

    def __iter__(self) -> Iterator[str]:
        return itertools.chain((name for name in self._names if self._found(name) is not MISSING), self._own)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _attribute(owner: Any, name: str) -> Any:
    return getattr(owner, name, MISSING)


def _content(cell: types.CellType, _: str) -> Any:
    return cell.cell_contents


@dataclass(frozen=True, slots=True)
class Variables:
    """A root that is no object: variables of a module, or of a function that is running.

    Args:
        read: gives the value of a name, or `MISSING`.
        assigned: names of variables that get new values.
        within: names of variables whose values change within.
        module: that new values are assigned to.
    """

    read: Callable[[str], Any]
    assigned: frozenset[str] = frozenset()
    within: frozenset[str] = frozenset()
    module: types.ModuleType | None = None


class Walk:
    """The objects below `roots`, each once, parents first.

    Args:
        roots: objects by the names that users know them by.
        skipped: attributes of the trainer's own classes, which users' classes inherit.
    """

    def __init__(self, roots: Mapping[str, Any], skipped: Iterable[str] = ()) -> None:
        self.found: list[AttributeHolder] = []
        self.saved: set[int] = set()
        """Addresses of parameters and persistent buffers, which a `state_dict` has."""
        self._seen: set[int] = set()
        modules = [one for root in roots.values() if isinstance(root, nn.Module) for one in root.modules()]
        self._covered = set(map(id, modules))
        """Modules whose parameters and buffers a snapshot has."""
        self._with_states = {id(one) for one in modules if is_metric(one)}
        """Metrics whose states a snapshot has."""
        self._skipped = frozenset(skipped)
        for path, root in roots.items():
            self.visit(root, path, _DEPTH, root=True)

    def visit(self, value: Any, path: str, depth: int, *, root: bool = False) -> None:
        if isinstance(value, (*PLAIN, *_TEXTUAL, torch.Tensor, np.ndarray)) or len(self.found) >= MOST_HOLDERS:
            return
        if depth == 0 or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module | torch.optim.Optimizer):
            for index, hook in enumerate(hooks_of_user(value)):
                self._visit_hook(hook, f"{path}.hooks[{index}]", depth - 1)
        if isinstance(value, UsedObject):
            self._visit_used(value.owner, path, depth)
        elif isinstance(value, Variables):
            decide = frozenset(name for name in value.within if variable_decides(value.module, name))
            self._hold(path, None, LiveView(decide, value.read), in_place=True)
            self._hold(path, None, LiveView(value.within - decide, value.read), in_place=True, records=True)
            self._hold(path, value.module, LiveView(value.assigned, value.read))
        elif isinstance(value, DerivedObject):
            self._visit_derived(value, path, depth)
        elif isinstance(value, dict):
            for key, item in itertools.islice(value.items(), _MOST_ITEMS):
                self.visit(item, f"{path}[{key!r}]", depth - 1)
        elif isinstance(value, _SEQUENCES):
            for index, item in enumerate(itertools.islice(value, _MOST_ITEMS)):
                self.visit(item, f"{path}[{index}]", depth - 1)
        elif isinstance(value, functools.partial):
            self.visit(value.func, path, depth - 1)
            self.visit([*value.args, *value.keywords.values()], path, depth - 1)
        elif isinstance(value, types.MethodType):
            self.visit(value.__self__, path, depth - 1)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, path, depth, self.visit)
        elif self._looks_into(value, root=root):
            self._visit_attributes(value, path, depth)

    def _hold(self, path: str, owner: Any, values: Mapping[str, Any], **how: bool) -> None:
        self.found.append(AttributeHolder(path, owner, values, frozenset(), public_only=False, **how))

    def _visit_used(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, type) and is_used(value):
            self._visit_class(value, records=True)
        if depth == 0 or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, types.FunctionType) and is_function_of_user(value):
            self._visit_function(value, path, depth, self._visit_used)
        if is_metric(value):
            self._visit_attributes(value, path, depth)
        elif isinstance(value, nn.Module):
            for name, module in value.named_modules():
                self._visit_state(module, f"{path}.{name}".rstrip("."))
        if (values := _of_user(value)) is None:
            return
        how: dict[str, bool] = {"public_only": False, "plain_only": True, "records": True}
        self.found.append(AttributeHolder(path, value, values, _saved(value), **how))
        self._visit_class(type(value), records=True)
        for name, one in tuple(values.items()):
            self._visit_used(one, f"{path}.{name}", depth - 1)

    def _visit_hook(self, hook: Any, path: str, depth: int) -> None:
        """Hooks often only record: their containers that grow are no state, as those of other objects that are used."""
        if isinstance(hook, functools.partial):
            names = getattr(getattr(hook.func, "__code__", None), "co_varnames", ())
            values = {**dict(zip(names, hook.args, strict=False)), **hook.keywords}
            records = not any(function_decides(hook.func, name) for name in values)
            self._hold(path, hook, values, in_place=True, records=records)
            for one in (*hook.args, *hook.keywords.values()):
                self._visit_used(one, path, depth)
            self._visit_hook(hook.func, path, depth)
        else:
            self._visit_used(getattr(hook, "__self__", hook), path, depth)

    def _visit_state(self, module: nn.Module, path: str) -> None:
        """Of a module that is in none of those that a snapshot has."""
        if id(module) in self._covered:
            return
        self._covered.add(id(module))
        for values in (module._parameters, module._buffers):
            if values:
                self._hold(path, module, values, states=True)

    def _visit_class(self, kind: type, *, records: bool) -> None:
        """Numbers, texts and containers that all objects of a class of the user's share."""
        for base in kind.__mro__:
            if id(base) not in self._seen and not (is_library(base) or is_standard(base) or of_framework(base)):
                self._seen.add(id(base))
                self._hold(base.__qualname__, base, vars(base), plain_only=True, records=records)

    def _visit_derived(self, value: DerivedObject, path: str, depth: int) -> None:
        values = vars(value.owner)
        holder = AttributeHolder(path, value.owner, values, names_of(value.framework), public_only=False)
        self.found.append(holder)
        self._visit_class(type(value.owner), records=False)
        for name in holder.names():
            self.visit(values[name], f"{path}.{name}", depth - 1)

    def _looks_into(self, value: Any, *, root: bool) -> bool:
        kind = type(value)
        if isinstance(value, (*REFERENCES, *GENERATORS, *_SAVED_BY_THEMSELVES)) or attributes_of(value) is None:
            return False
        if isinstance(value, nn.Module | Dataset | Sampler):
            return True
        return not is_standard(kind) and (root or not of_framework(kind))

    def _visit_attributes(self, value: Any, path: str, depth: int) -> None:
        kind, values = chosen_class(value), attributes_of(value) or {}
        skipped = frozenset(values) if kind.__module__.startswith(_WRAPPERS) or kind is nn.Module else _saved(value)
        if isinstance(value, nn.Module) and id(value) not in self._covered:
            skipped |= _OF_MODULES | self._skipped
            self._visit_state(value, path)
        elif isinstance(value, nn.Module):
            skipped |= _OF_MODULES | self._skipped
            persistent = frozenset(value._buffers) - value._non_persistent_buffers_set
            if len(persistent) < len(value._buffers):
                self.found.append(AttributeHolder(path, value, value._buffers, persistent, public_only=False))
            tensors = [*value._parameters.values(), *(value._buffers[name] for name in persistent)]
            self.saved.update(address(one) for one in tensors if one is not None)
        elif of_framework(kind) or self._skipped & values.keys():
            skipped |= self._skipped
        public_only, metric = is_library(kind), is_metric(value)
        if metric:
            saved = id(value) in self._with_states
            skipped |= _IN_METRICS
            skipped |= {name for name, one in values.items() if saved and isinstance(one, torch.Tensor | list)}
            public_only = saved
        holder = AttributeHolder(path, value, values, skipped, public_only=public_only, shares=metric)
        self.found.append(holder)
        self._visit_class(kind, records=False)
        if isinstance(value, nn.Module):
            for name, child in value._modules.items():
                self.visit(child, f"{path}.{name}", _DEPTH)
        for name in holder.names():
            self.visit(values[name], f"{path}.{name}", depth - 1)

    def _visit_function(self, function: types.FunctionType, path: str, depth: int, visit: Callable[..., None]) -> None:
        """What it keeps from call to call: variables of its closure, attributes, and defaults that are containers."""
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            view = LiveView((name,), functools.partial(_content, cell))
            content = view.get(name)
            if isinstance(content, (*PLAIN, torch.Tensor, np.ndarray)):
                self._hold(path, cell, view)
            elif is_own(content):
                records = visit == self._visit_used and not function_decides(function, name)
                self._hold(path, cell, view, in_place=True, records=records)
            else:
                visit(content, f"{path}.{name}", depth - 1)
        self._hold(path, function, vars(function), plain_only=True, records=True)
        records = not any(function_decides(function, name) for name in defaults_of(function))
        self._hold(path, function, defaults_of(function), in_place=True, records=records)


def _saved(value: Any) -> frozenset[str]:
    """Attributes that the object's own `state_dict` has: those of its keys, and those whose values are in it."""
    if isinstance(value, nn.Module):
        return frozenset()  # parameters and buffers are no attributes of the object itself
    state_dict = getattr(value, "state_dict", None)
    if not callable(state_dict) or not callable(getattr(value, "load_state_dict", None)):
        return frozenset()
    streams = rng.capture()
    try:
        state = state_dict()
    except Exception:  # noqa: BLE001 - it is the user's code, and the snapshot itself reports what is wrong with it
        return frozenset()
    finally:
        rng.restore(streams)
    if not isinstance(state, dict):
        return frozenset(attributes_of(value) or ())
    keys = {str(key).lstrip("_") for key in state}
    there = {id(state), *map(id, state.values())}
    values = attributes_of(value) or {}
    return frozenset(name for name, one in values.items() if name.lstrip("_") in keys or id(one) in there)


def attributes_of(value: Any) -> Mapping[str, Any] | None:
    """The attributes of an object, those of `__slots__` included; None where it has none."""
    kind: Any = type(value)
    slots, own = slots_of(kind), getattr(value, "__dict__", None)
    return LiveView(slots, functools.partial(_attribute, value), own or {}) if slots else own


def is_used(value: object) -> bool:
    """Whether it is an object or function of the user's own, or a module, that a loop may use without tracking it."""
    if isinstance(value, types.FunctionType):
        return is_function_of_user(value)
    if isinstance(value, type):
        return not (is_library(value) or is_standard(value) or of_framework(value))
    return isinstance(value, nn.Module) or _of_user(value) is not None


def _of_user(value: object) -> Mapping[str, Any] | None:
    """The attributes of an object of a class of the user's own that is no part of training known to torch."""
    kind = type(value)
    if isinstance(value, (*REFERENCES, *GENERATORS, *_SAVED_BY_THEMSELVES, nn.Module, Dataset, Sampler, torch.Tensor)):
        return None
    return None if is_standard(kind) or is_library(kind) or of_framework(kind) else attributes_of(value)


# ---- values


def freeze(
    value: Any,
    saved: Collection[int] = (),
    depth: int = _DEPTH,
    arrays: Callable[[Any], Frozen] | None = None,
) -> Frozen:
    """The value as a tuple that compares; objects by their class, as their attributes have a holder of their own.

    Args:
        saved: addresses of tensors that a `state_dict` has; what they hold does not count.
        arrays: freezes tensors and arrays.
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
    if isinstance(value, GENERATORS):
        return ("stream", type_of(value), xxhash.xxh3_128_hexdigest(repr(_stream_state(value)).encode()))
    if isinstance(value, (*_TEXTUAL, itertools.count)):
        return ("text", type_of(value), repr(value))
    if depth > 0 and isinstance(value, dict):
        rows = _sampled(list(value.items()))
        return (
            "dict",
            len(value),
            *((freeze(key, saved, depth - 1, arrays), freeze(one, saved, depth - 1, arrays)) for key, one in rows),
        )
    if depth > 0 and isinstance(value, _SETS):
        rows = sorted(map(repr, value)) if len(value) <= _MOST_ITEMS else []
        return ("set", len(value), *rows)
    if depth > 0 and isinstance(value, _SEQUENCES):
        items = value if isinstance(value, list | tuple) else list(value)
        return (kind.__name__, len(value), *(freeze(one, saved, depth - 1, arrays) for one in _sampled(items)))
    return ("object", type_of(value))


def _freeze_plain(value: Any) -> Frozen:
    if type(value) in (str, bytes) and len(value) > _WHOLE_BYTES >> 6:
        data = value.encode(errors="surrogatepass") if isinstance(value, str) else value
        return (type(value).__name__, len(value), xxhash.xxh3_128_hexdigest(data))
    return (type(value).__name__, repr(value))


def _freeze_tensor(tensor: torch.Tensor, saved: Collection[int]) -> Frozen:
    tensor = here(tensor)
    head = ("tensor", str(tensor.dtype), tuple(tensor.shape))
    if saved and address(tensor) in saved:
        return (*head, "saved")
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


def _sampled(rows: Sequence[Any]) -> Sequence[Any]:
    """All of a short sequence; the beginning, the end and some between of a long one."""
    if len(rows) <= _MOST_ITEMS:
        return rows
    part = _MOST_ITEMS // 4
    return [*rows[:part], *rows[part : -part : max(1, len(rows) // (2 * part))], *rows[-part:]]


def digest(frozen: Frozen) -> str:
    """A short text that is the same in every process for the same frozen value."""
    return str(xxhash.xxh3_128_hexdigest(repr(frozen).encode()))


def is_iterator(value: Any) -> bool:
    """Whether the value is a running iterator, whose position nothing shows."""
    return isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")


def is_own(value: Any) -> bool:
    """Whether it changes within and can be put back there: a stream, or a container of streams and plain values."""
    return isinstance(value, GENERATORS) or (type(value) in _CHANGING and _is_plain(value, _DEPTH))


def changes_in_place(value: Any) -> bool:
    """The same of a variable that is always the same object: a tensor or an array too."""
    if isinstance(value, torch.Tensor):
        return not value.requires_grad
    return isinstance(value, np.ndarray) or is_own(value)


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.requires_grad
    if isinstance(value, CONTAINERS):
        items = itertools.chain(value, value.values() if isinstance(value, dict) else ())
        return depth > 0 and all(_is_plain(one, depth - 1) for one in itertools.islice(items, _MOST_ITEMS))
    return isinstance(value, (*PLAIN, *_TEXTUAL, *GENERATORS, np.ndarray, np.generic))


def type_of(value: Any) -> str:
    """The class as people write it."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def address(tensor: torch.Tensor) -> int:
    """Where the memory of what this rank has of the tensor begins; 0 where it has none of its own."""
    tensor = here(tensor)
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return 0
    return int(tensor.untyped_storage().data_ptr())


def _stream_state(stream: Any) -> Any:
    if isinstance(stream, random.Random):
        return stream.getstate()
    if isinstance(stream, np.random.Generator):
        return stream.bit_generator.state
    if isinstance(stream, np.random.RandomState):
        return stream.get_state(legacy=False)
    return bytes(stream.get_state().numpy())


def copy_stream(stream: Any, saved: Any) -> None:
    """Set `stream` to where `saved`, of the same class, is; in place, so that others that use it see it too."""
    streams.decode(stream, streams.encode(saved))
