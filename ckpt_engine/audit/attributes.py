"""Walks the attributes of the objects that take part in training.

A *holder* is one object whose attributes are looked at; its path is how a user reaches it (`model.encoder`,
`loader.dataset`).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

from ckpt_engine.audit.source import (
    chosen_class,
    defaults_of,
    hooks_of_user,
    is_metric,
    is_more_than_a_record,
    methods_of,
    names_of,
)
from ckpt_engine.audit.values import (
    CONTAINERS,
    DEPTH,
    GENERATORS,
    NAMESPACES,
    PLAIN,
    REFERENCES,
    SAVED_BY_THEMSELVES,
    SEQUENCES,
    TEXTUAL,
    LiveView,
    MemoryOfSaved,
    attributes_of,
    changes_in_place,
    is_opaque,
    is_own,
    is_parts,
    is_used,
    items_of,
    of_user,
    text_of,
)
from ckpt_engine.data import rng
from ckpt_engine.data.native import is_stateful
from ckpt_engine.whose_code import is_function_of_user, is_library, is_standard, of_framework

_MOST_OF_LIBRARIES = 500
"""Objects of installed packages among those that the loop uses."""
MOST_HOLDERS = 5000
"""Objects that are looked at; the walk ends there."""
_COUNTS: tuple[type, ...] = (itertools.count, itertools.cycle, type(iter([])), type(iter(range(0))))
"""Iterators that are over no loader."""
_OF_MODULES = frozenset(vars(nn.Module()))
_SET_BY_SCHEDULERS = frozenset({"_opt_called"})
"""What schedulers of torch note at an optimizer to see that it steps before them; a test fails where they note more."""
_IN_METRICS = frozenset(
    {
        *("update", "compute", "_update_signature", "_defaults", "_reductions", "_persistent"),
        *("_cache", "_forward_cache", "_computed"),
    }
)
"""Of each metric: functions, what it is made of, and results that are computed again."""
_WRAPPERS = ("torch.nn.parallel", "torch._dynamo")
_CALLBACK_DEPTH = 3
"""Containers around a callback: by event a list of tuples with arguments."""


@dataclass(frozen=True, slots=True)
class AttributeHolder:
    """One object whose attributes are looked at.

    Args:
        path: how a user reaches it.
        owner: the object.
        values: its attributes, live.
        skipped: names of attributes that something else saves, or that belong to a framework.
        public_only: leave out names that begin with an underscore.
        plain_private: of those leave out what is not plain.
        shares: what its attributes refer to may belong to others too: it is replaced, never changed in place.
        plain_only: leave out what is no number, text, None, container, stream, or tensor, or is what autograd computes.
        states: parameters or buffers of a module that no snapshot has otherwise: put back whatever they are at first.
        in_place: only what changes within: streams, tensors and containers of plain values, as nothing can be assigned.
        users: functions that show whether a container that grows is more than a record; None: it counts anyway.
        kept_only: leave out tensors that were replaced by others: what they share memory with is not known.
        inputs_only: only what is compared with the first process, and never changes.
    """

    path: str
    owner: Any
    values: Mapping[str, Any]
    skipped: frozenset[str] = frozenset()
    public_only: bool = False
    plain_private: bool = False
    shares: bool = False
    plain_only: bool = False
    states: bool = False
    in_place: bool = False
    users: Sequence[Any] | None = None
    kept_only: bool = False
    inputs_only: bool = False

    def names(self) -> Iterator[str]:
        """The attributes that are looked at."""
        for name in tuple(self.values):
            value = self.values[name]
            plain = not self.plain_only or isinstance(value, (*PLAIN, *CONTAINERS, *_COUNTS))
            if (self.in_place or not plain) and not (self.inputs_only or changes_in_place(value)):
                continue
            is_private = self.plain_private and name.startswith("_")
            if is_private and not (isinstance(value, PLAIN) or changes_in_place(value)):
                continue
            hides = self.public_only or isinstance(self.owner, type)
            if name not in self.skipped and not (hides and name.startswith("_" if self.public_only else "__")):
                yield name

    def may_record(self, name: str) -> bool:
        """Whether a container of this name that grows only writes down what happens."""
        return self.users is not None and not is_more_than_a_record(self.users, name, of_variable=self.in_place)

    def assign(self, name: str, value: Any) -> None:
        """Put a value back."""
        if isinstance(self.owner, types.CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, dict):
            self.owner[name] = value
        elif isinstance(self.owner, list):
            self.owner[int(name) : int(name) + 1] = [value]
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


def _content(cell: types.CellType, _: str) -> Any:
    return cell.cell_contents


@dataclass(frozen=True, slots=True)
class Variables:
    """A root of some variables only: of a module, of a function that is running, or of an object.

    Args:
        read: gives the value of a name, or `MISSING`.
        assigned: names of variables that get new values.
        within: names of variables whose values change within.
        module: or another object, that new values are assigned to.
        inputs: names of variables that are only compared with the first process.
        functions: those that may use the variables whose values change within.
    """

    read: Callable[[str], Any]
    assigned: frozenset[str] = frozenset()
    within: frozenset[str] = frozenset()
    module: Any = None
    inputs: frozenset[str] = frozenset()
    functions: Sequence[types.FunctionType] = ()


class Walk:
    """The objects below `roots`, each once, parents first.

    Args:
        roots: objects by the names that users know them by.
        skipped: attributes of the trainer's own classes, which users' classes inherit.
    """

    def __init__(self, roots: Mapping[str, Any], skipped: Iterable[str] = ()) -> None:
        self.found: list[AttributeHolder] = []
        self.saved = MemoryOfSaved()
        """That of parameters and persistent buffers, which a `state_dict` has."""
        self.opaque: list[tuple[str, str, Any]] = []
        """Path of an object of a package that the loop uses, and path and value of what it has that nothing shows."""
        self.of_libraries, self._library = list[str](), ""
        """Paths of the objects of packages that the loop uses; of one whose attributes are visited now."""
        self._seen: set[int] = set()
        modules = [one for root in roots.values() if isinstance(root, nn.Module) for one in root.modules()]
        self._covered = set(map(id, modules))
        """Modules whose parameters and buffers a snapshot has."""
        self._with_states = {id(one) for one in modules if is_metric(one)}
        """Metrics whose states a snapshot has."""
        self._skipped = frozenset(skipped)
        for path, root in roots.items():
            self.visit(root, path, DEPTH, root=True)

    def visit(self, value: Any, path: str, depth: int, *, root: bool = False) -> None:
        if isinstance(value, (*PLAIN, *TEXTUAL, torch.Tensor, np.ndarray)) or len(self.found) >= MOST_HOLDERS:
            return
        if depth == 0 or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module | torch.optim.Optimizer):
            for index, hook in enumerate(hooks_of_user(value)):
                self._visit_hook(hook, f"{path}.hooks[{index}]", depth - 1)
        if isinstance(value, UsedObject):
            self._visit_used(value.owner, path, 2 * DEPTH)  # environments are wrapped many times
        elif isinstance(value, Variables):
            within, local = LiveView(value.within, value.read), value.module is None
            self._hold(path, None, within, in_place=True, users=value.functions, kept_only=local)
            self._hold(path, value.module, LiveView(value.assigned, value.read))
            self._hold(path, None, LiveView(value.inputs, value.read), inputs_only=True)
        elif isinstance(value, DerivedObject):
            self._visit_derived(value, path, depth)
        elif isinstance(value, torch.optim.Optimizer) and not of_framework(type(value)):
            self._visit_derived(DerivedObject(value, torch.optim.Optimizer), path, depth)
        elif isinstance(value, (dict, *SEQUENCES)):
            if is_parts(value):
                self._hold(path, value, attributes_of(value) or {})
            for key, item in items_of(value):
                self.visit(item, f"{path}[{text_of(key)}]", depth - 1)
        elif isinstance(value, functools.partial):
            self.visit(value.func, path, depth - 1)
            self.visit([*value.args, *value.keywords.values()], path, depth - 1)
        elif isinstance(value, types.MethodType):
            self.visit(value.__self__, path, depth - 1)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, path, depth, self.visit)
        elif self._looks_into(value, root=root):
            self._visit_attributes(value, path, depth)

    def _hold(
        self, path: str, owner: Any, values: Mapping[str, Any], skipped: frozenset[str] = frozenset(), **how: Any
    ) -> AttributeHolder:
        self.found.append(AttributeHolder(path, owner, values, skipped, **how))
        return self.found[-1]

    def _visit_used(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, type) and is_used(value):
            self._visit_class(value, is_used=True)
        if depth == 0 or id(value) in self._seen:
            return
        self._seen.add(id(value))
        for key, item in items_of(value):
            if is_used(item):  # tables of plain values can have millions of items within
                self._visit_used(item, f"{path}[{text_of(key)}]", depth - 1)
        if isinstance(value, types.FunctionType) and is_function_of_user(value):
            self._visit_function(value, path, depth, self._visit_used)
        if is_metric(value):
            self._visit_attributes(value, path, depth)
        elif isinstance(value, nn.Module):
            for name, module in value.named_modules():
                self._visit_state(module, f"{path}.{name}".rstrip("."))
        if (values := of_user(value)) is None:
            if self._library and is_opaque(value):
                self.opaque.append((self._library, path, value))
            return
        kind: Any = type(value)
        outer, self._library = self._library, self._library or (path if is_library(kind) else "")
        self.of_libraries += [path] * bool(self._library)
        if len(self.of_libraries) <= _MOST_OF_LIBRARIES:
            self._hold(path, value, values, plain_only=True, users=methods_of(kind))
            self._visit_class(kind, is_used=True)
            for name, one in tuple(values.items()):
                self._visit_used(one, f"{path}.{name}", depth - 1)
        self._library = outer

    def _visit_hook(self, hook: Any, path: str, depth: int) -> None:
        """Hooks often only record: their containers that grow count as those of other objects that are used."""
        if isinstance(hook, functools.partial):
            names = getattr(getattr(hook.func, "__code__", None), "co_varnames", ())
            values = {**dict(zip(names, hook.args, strict=False)), **hook.keywords}
            self._hold(path, hook, values, in_place=True, users=(hook.func,))
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

    def _visit_class(self, kind: type, *, is_used: bool) -> None:
        """Numbers, texts and containers that all objects of a class of the user's share."""
        for base in kind.__mro__:
            if id(base) not in self._seen and not (is_library(base) or is_standard(base) or of_framework(base)):
                self._seen.add(id(base))
                users = methods_of(base) if is_used else None
                self._hold(base.__qualname__, base, vars(base), plain_only=True, users=users)

    def _visit_derived(self, value: DerivedObject, path: str, depth: int) -> None:
        values = vars(value.owner)
        holder = self._hold(path, value.owner, values, names_of(value.framework) | _SET_BY_SCHEDULERS)
        self._visit_class(type(value.owner), is_used=False)
        for name in holder.names():
            self.visit(values[name], f"{path}.{name}", depth - 1)

    def _looks_into(self, value: Any, *, root: bool) -> bool:
        kind = type(value)
        if isinstance(value, (*REFERENCES, *GENERATORS, *SAVED_BY_THEMSELVES)) or attributes_of(value) is None:
            return False
        known = isinstance(value, (nn.Module, Dataset, Sampler, *NAMESPACES))
        return known or (not is_standard(kind) and (root or not of_framework(kind)))

    def _visit_attributes(self, value: Any, path: str, depth: int) -> None:
        kind, values = chosen_class(value), attributes_of(value) or {}
        skipped = frozenset(values) if kind.__module__.startswith(_WRAPPERS) or kind is nn.Module else _saved(value)
        if isinstance(value, nn.Module):
            skipped |= _OF_MODULES | self._skipped
            if id(value) in self._covered:
                persistent = frozenset(value._buffers) - value._non_persistent_buffers_set
                if len(persistent) < len(value._buffers):
                    self._hold(path, value, value._buffers, persistent)
                self.saved.add(value._parameters, value._parameters)
                self.saved.add(value._buffers, persistent)
            self._visit_state(value, path)
        elif of_framework(kind) or self._skipped & values.keys():
            skipped |= self._skipped
        library, metric = is_library(kind), is_metric(value)
        public_only = library and isinstance(value, nn.Module)
        if metric:
            public_only = id(value) in self._with_states
            states = {name for name, one in values.items() if public_only and isinstance(one, torch.Tensor | list)}
            skipped |= _IN_METRICS | states
        holder = self._hold(path, value, values, skipped, shares=metric, public_only=public_only, plain_private=library)
        self._visit_class(kind, is_used=False)
        if isinstance(value, nn.Module):
            for name, child in value._modules.items():
                self.visit(child, f"{path}.{name}", DEPTH)
        for name in holder.names():
            self.visit(values[name], f"{path}.{name}", depth - 1)
        for name in values if library else ():
            if name.startswith("_") and name not in skipped:
                self._visit_callbacks(values[name], f"{path}.{name}", _CALLBACK_DEPTH)

    def _visit_callbacks(self, value: Any, path: str, depth: int) -> None:
        """What an object of a package calls in each step, such as the handlers of ignite's engine."""
        for key, one in items_of(value) if depth else ():
            inner = f"{path}[{text_of(key)}]"
            if callable(one) and not isinstance(one, type | nn.Module):
                self._visit_hook(inspect.unwrap(one) if isinstance(one, types.FunctionType) else one, inner, DEPTH)
            self._visit_callbacks(one, inner, depth - 1)

    def _visit_function(self, function: types.FunctionType, path: str, depth: int, visit: Callable[..., None]) -> None:
        """What it keeps from call to call: variables of its closure, attributes, and defaults that are containers."""
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            view = LiveView((name,), functools.partial(_content, cell))
            content = view.get(name)
            if isinstance(content, (*PLAIN, torch.Tensor, np.ndarray)):
                self._hold(path, cell, view)
            elif is_own(content):
                users = (function,) if visit == self._visit_used else None
                self._hold(path, cell, view, in_place=True, users=users)
            else:
                visit(content, f"{path}.{name}", depth - 1)
        self._hold(path, function, vars(function), plain_only=True, users=(function,))
        self._hold(path, function, defaults_of(function), in_place=True, users=(function,))


def _saved(value: Any) -> frozenset[str]:
    """Attributes that the object's own `state_dict` has: those of its keys, and those whose values are in it."""
    if isinstance(value, nn.Module) or not is_stateful(value):
        return frozenset()  # parameters and buffers are no attributes of the object itself
    owner = next((kind for kind in type(value).__mro__ if "state_dict" in vars(kind)), object)
    if is_library(owner) and isinstance(value, Iterable):
        # A loader may begin a pass to tell its state, and forget the one it is to continue (torchdata.nodes does).
        return frozenset(attributes_of(value) or ()) if owner is type(value) else names_of(owner)
    try:
        with rng.untouched():
            state = value.state_dict()
    except Exception:  # noqa: BLE001 - it is the user's code, and the snapshot itself reports what is wrong with it
        return frozenset()
    if not isinstance(state, dict):
        return frozenset(attributes_of(value) or ())
    keys = {str(key).lstrip("_") for key in state}
    there = {id(state), *map(id, state.values())}
    values = attributes_of(value) or {}
    return frozenset(name for name, one in values.items() if name.lstrip("_") in keys or id(one) in there)
