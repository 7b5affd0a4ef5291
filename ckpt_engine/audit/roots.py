"""Where state may hide besides the trainer's objects: the user's modules, and what their loaders read; and what all of
it is at one moment.

Of modules these are global variables, what functions keep, and how functions change both.

Large programs have thousands of functions. Their bytecode is read once, and only as far as it can matter.
"""

from __future__ import annotations

import dis
import itertools
import operator
import os
import sys
import traceback
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from ckpt_engine.audit import source
from ckpt_engine.audit.attributes import AttributeHolder, Variables, Walk
from ckpt_engine.audit.source import codes_in, function_of, names_in
from ckpt_engine.audit.values import (
    CONTAINERS,
    GENERATORS,
    MISSING,
    PLAIN,
    Clocks,
    Frozen,
    Looked,
    address,
    changes_in_place,
    changes_within,
    digest,
    freeze,
    is_drawn,
    is_iterator,
    is_no_value,
    is_own,
    tensors_in,
)
from ckpt_engine.whose_code import is_function_of_user, is_library, is_library_file, is_standard_name, of_framework

_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_CHANGE_ITEMS = frozenset(dis.opmap[name] for name in ("STORE_SUBSCR", "DELETE_SUBSCR"))
_FOREIGN: set[str] = set()
"""Names of modules, and of whole packages, that are not the user's, as far as they have been looked at."""
OURS = tuple(f"{os.sep}{name}{os.sep}" for name in ("ckpt_engine", "lightning_ckpt", "accelerate_ckpt"))
_SIZED = frozenset({"dict", "list", "tuple", "deque", "set"})
_MOST_KEYS = 10_000
_NO_LIST = ((), ("list", -1))
"""Beside a key and its value, frozen: any list has more."""
_PROCESS = Clocks(of_process=True)
_MOST_INPUTS = 1000


def of_modules() -> dict[str, Any]:
    """What is state in the user's modules, as roots by path: random streams among the global variables, variables that
    functions set or may change within, and what functions keep."""
    found: dict[str, Any] = {}
    frames = (one for one, _ in traceback.walk_stack(sys._getframe(1)) if one.f_code.co_name == "<module>")
    bodies = {id(one.f_globals): one.f_code for one in frames}
    for name, module in _modules_of_user():
        values, functions = vars(module), tuple(_functions(module))
        codes = [one.__code__ for one in functions]
        codes += [bodies[id(values)]] if id(values) in bodies else []  # functions in it may be made in any step
        assigned, near = (frozenset[str]().union(*map(used, codes)) for used in (_assigned, _near_changes))
        assigned |= {key for key, one in values.items() if issubclass(type(one), GENERATORS)}
        near |= {key for key, one in values.items() if issubclass(type(one), torch.Tensor) and one.requires_grad}
        iterators = [key for key, one in values.items() if is_iterator(one)]
        assigned |= {key for key in iterators if any(key in names_in(one) for one in functions)}
        within = frozenset(key for key in near - assigned if changes_in_place(values.get(key)))
        if assigned or within:
            found[name] = Variables(vars(module).__getitem__, assigned, within, module, functions=functions)
        found |= {
            f"{name}.{one.__qualname__}": one
            for one in functions
            if vars(one).keys() - {"__wrapped__"} or any(map(is_own, source.defaults_of(one).values()))
        }
    return found


def _modules_of_user() -> Iterator[tuple[str, Any]]:
    """Those that are neither Python's, nor installed, nor ours.

    Of thousands of modules only those of packages that are not known yet are looked at: each look reads cold memory.
    """
    for name in [one for one in tuple(sys.modules) if one not in _FOREIGN]:
        package = name.partition(".")[0]
        if package in _FOREIGN or is_standard_name(name) or _is_foreign_package(sys.modules.get(package)):
            _FOREIGN.update((package, name))
        elif not (file := _own(module := sys.modules.get(name), "__file__") or "").endswith(".py") or _is_foreign(file):
            _FOREIGN.add(name)
        else:
            yield name, module


def _is_foreign_package(module: Any) -> bool:
    """Whether all of a package lies where foreign files do: one that is spread over folders may have some of each."""
    file = _own(module, "__file__")
    return bool(file) and all(map(_is_foreign, (file, *(_own(module, "__path__") or ()))))


def _is_foreign(path: str) -> bool:
    return is_library_file(path) or any(part in f"{path}{os.sep}" for part in OURS)


def _own(module: Any, name: str) -> Any:
    """What a module itself has; asking a lazy one imports things."""
    return getattr(module, "__dict__", {}).get(name)


def _functions(module: Any) -> Iterator[FunctionType]:
    """Those that a module defines, methods too."""
    values = list(vars(module).values())
    values += [one for kind in values if issubclass(type(kind), type) for one in tuple(vars(kind).values())]
    for one in values:
        function = function_of(one)
        if issubclass(type(function), FunctionType) and function.__globals__ is vars(module):
            yield function


@cache
def _assigned(code: CodeType) -> frozenset[str]:
    """Global variables that a function sets."""
    stores = [one for one in codes_in(code) if _STORE_GLOBAL in one.co_code[::2]]
    rows = (row for one in stores for row in dis.get_instructions(one))
    return frozenset(row.argval for row in rows if row.opcode == _STORE_GLOBAL)


@cache
def _near_changes(code: CodeType) -> frozenset[str]:
    """Names of globals and attributes in a function that changes something within; many functions take little time."""
    return frozenset(name for one in codes_in(code) if _changes(one) for name in one.co_names)


def _changes(code: CodeType) -> bool:
    """Whether it may change something within: items, containers, or tensors by methods such as `add_`."""
    if not _CHANGE_ITEMS.isdisjoint(code.co_code[::2]) or not source.GROWS.isdisjoint(code.co_names):
        return True
    return any(name.endswith("_") and not name.endswith("__") for name in code.co_names)


def roots_of_loader(name: str, loader: Any) -> dict[str, Any]:
    """What of a loader lives in this process and may count: positions and samplers are followed on their own."""
    if not isinstance(loader, DataLoader):
        return {}
    found: dict[str, Any] = {f"{name}.collate_fn": loader.collate_fn, f"{name}.worker_init_fn": loader.worker_init_fn}
    if not isinstance(loader.dataset, IterableDataset):
        found[f"{name}.dataset"] = loader.dataset
    return {path: value for path, value in found.items() if value is not None}


def roots_of_loaders(loaders: Mapping[str, Any]) -> dict[str, Any]:
    """As `roots_of_loader`, of each loader, also in any nesting of lists and mappings."""
    found: dict[str, Any] = {}
    for name, one in loaders.items():
        rows: Any = enumerate(one) if isinstance(one, list | tuple) else one.items() if isinstance(one, Mapping) else ()
        found |= roots_of_loader(name, one)
        found |= roots_of_loaders({f"{name}[{key!r}]": inner for key, inner in rows})
    return found


def read_by_loading(loaders: Mapping[str, Any]) -> set[str]:
    """The names of loaders, and the global variables and classes that the code of their datasets and collate functions
    names, as paths."""
    found, seen, waiting = set(loaders), set[int](), list[Any]()
    for loader in (one for one in loaders.values() if isinstance(one, DataLoader)):
        kinds = [kind for root in (loader.dataset, loader.collate_fn) for kind in type(root).__mro__]
        waiting += [loader.collate_fn, *[one for kind in kinds if not is_library(kind) for one in vars(kind).values()]]
    for function in waiting:  # it grows meanwhile
        if not isinstance(function, FunctionType) or id(function) in seen or not is_function_of_user(function):
            continue
        seen.add(id(function))
        named = {name: function.__globals__[name] for name in names_in(function) if name in function.__globals__}
        found |= {
            one.__qualname__ if isinstance(one, type) else f"{function.__module__}.{name}"
            for name, one in named.items()
        }
        waiting += named.values()
    return found


# ---- what it is at one moment


@dataclass(frozen=True, slots=True)
class Unrepeated:
    """An attribute before something that no other process does, frozen too, and as it was after that."""

    value: Any
    before: Frozen
    after: Frozen


class Beginning:
    """What all attributes are at one moment."""

    def __init__(self, roots: Mapping[str, Any], skipped: Iterable[str]) -> None:
        walk = Walk(roots, skipped)
        self._opaque, self._used = walk.opaque, walk.of_libraries
        self._clocks, self._readings = Clocks(), dict[str, bool]()
        """Of paths that have moved: whether they hold what a clock shows."""
        self._memory_of_saved = walk.saved
        self._watched = [_Watched(holder) for holder in walk.found]
        self._of = {f"{one.holder.path}.{name}": (one, name) for one in self._watched for name in one.before}
        self.frozen: dict[str, Frozen] = {
            path: freeze(one.before[name], self._memory_of_saved) for path, (one, name) in self._of.items()
        }
        self._by_path = {one.holder.path: one.holder for one in self._watched}
        self._looked = Looked()

    def differences(self, later: Beginning) -> Iterator[tuple[str, Unrepeated]]:
        """By path what has changed until then."""
        for path, (one, name) in self._of.items():
            after = later.frozen.get(path)
            if after is not None and after != self.frozen[path]:
                yield path, Unrepeated(one.before[name], self.frozen[path], after)

    def take_back(self, unrepeated: Mapping[str, Unrepeated]) -> None:
        """Those that have not changed since begin as they were before."""
        for path, row in unrepeated.items():
            if row.after == self.frozen.get(path):
                one, name = self._of[path]
                self.frozen[path], one.before[name] = row.before, row.value
                one.look()

    def holder_of(self, path: str) -> AttributeHolder | None:
        """Whose attribute it is, one that is not there yet included."""
        return self._of[path][0].holder if path in self._of else self._by_path.get(path.rpartition(".")[0])

    def is_of_library(self, path: str) -> bool:
        """Whether it is an attribute of an object of an installed package."""
        holder = self.holder_of(path)
        return holder is not None and (of_framework(type(holder.owner)) or is_library(type(holder.owner)))

    def opaque(self, rows: Collection[str]) -> list[tuple[str, Any]]:
        """What nothing shows, of objects of packages of which something else has moved."""
        return [(path, one) for root, path, one in self._opaque if any(row.startswith(f"{root}.") for row in rows)]

    def inputs(self, rows: Collection[str]) -> dict[str, str]:
        """Digests of what may have been drawn and has not moved; see `HiddenState.inputs`."""
        return {
            path: was
            for path, was in self._inputs.items()
            if path not in rows and (not self._of[path][0].holder.inputs_only or self._is_there(path))
        }

    @cached_property
    def _inputs(self) -> Mapping[str, str]:
        """The same, as the first snapshot finds it: every attribute is looked at."""
        drawn = itertools.islice(filter(self._is_input, self._of), _MOST_INPUTS)
        return {path: self.input_at(path) for path in drawn}

    def _is_there(self, path: str) -> bool:
        return freeze(self.value_at(path), self._memory_of_saved) == self.frozen[path]

    def _is_input(self, path: str) -> bool:
        holder, frozen, value = self._of[path][0].holder, self.frozen[path], self.value_at(path)
        if of_framework(type(holder.owner)) and not holder.states:
            return False
        if not is_drawn(value) or not (holder.states or (frozen[-1] != "saved" and "trained" not in frozen)):
            return False
        return not _PROCESS.are_read(value) and self._is_there(path)

    def input_at(self, path: str) -> str:
        """Short digests of the form and of the values of what was there at that moment, or of nothing."""
        frozen = self.frozen.get(path, ("",))
        form = frozen[: 3 if frozen[0] in ("tensor", "array") else 2 if frozen[0] in _SIZED else 1]
        return f"{digest(form)[:8]}{digest(frozen)[:8]}"

    def is_drawn_again(self, path: str, was: str) -> bool:
        """Whether other values of the same form are there now; data of another form was changed on purpose."""
        return (now := self.input_at(path)) != was and now[:8] == was[:8]

    def kept(self, path: str, value: Any) -> str:
        """What of it is still the objects of that moment: all, the container, or nothing."""
        one, name = self._of.get(path, (None, ""))
        if one is None or one.before[name] is not value:
            return "nothing"
        same = [*map(id, tensors_in(value))] == [id(ref()) for ref in one.within[name]]
        return "all" if same else "container"

    def is_saved(self, value: Any) -> bool:
        """Whether it is memory of what a `state_dict` has, or holds such."""
        tensors = (one for one in tensors_in(value) if isinstance(one, torch.Tensor))
        return any(address(one) in self._memory_of_saved for one in tensors)

    def same_at(self, path: str, value: Any) -> str:
        """Another path that had the same object at that moment; empty: none."""
        rows = ((other, one.before[name]) for other, (one, name) in self._of.items() if other != path)
        return next((other for other, was in rows if was is value), "")

    def value_at(self, path: str) -> Any:
        """What is there now, or `MISSING`."""
        holder = self.holder_of(path)
        return MISSING if holder is None else holder.values.get(path.rpartition(".")[2], MISSING)

    def states_of(self, paths: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Those of modules, moved or not: a fresh process may begin with any other."""
        for path in paths:
            one, name = self._of.get(path, (None, ""))
            if one is not None and one.holder.states and name in one.holder.values:
                yield path, one.holder.values[name]

    def sets_in_each_process(self, path: str) -> bool:
        """Whether a flag there may say that something, such as an open file, is ready in a process.

        Not of a module, nor of an object of a package that the loop uses, if all that it has got since is looked at.
        """
        holder, (one, _) = self.holder_of(path), self._of.get(path, (None, ""))
        if holder is None or isinstance(holder.owner, torch.nn.Module):
            return holder is None
        return one is None or holder.path not in self._used or bool(self.opaque([path])) or one.hides()

    def moved(self) -> Iterator[tuple[str, Any]]:
        """The attributes that are not what they were at that moment."""
        return ((path, value) for path, value, _ in self.changes())

    def changes(self, *, quick: bool = False) -> Iterator[tuple[str, Any, Frozen]]:
        """The same with their frozen values; `quick` as in `HiddenState.frozen`."""
        self._looked.again()
        for one in self._watched:
            if one.holder.inputs_only:
                continue
            if not one.untouched():
                one.look()
            for name, path, value in one.rows:
                was = one.before.get(name, MISSING)
                if was is MISSING and value is getattr(type(one.holder.owner), name, MISSING):
                    continue  # `self.seen += …` of a list of the class: the class has it
                frozen = self._moved_to(path, value, was, quick=quick)
                before = self.frozen.get(path, ())
                if frozen is None or self._is_reading(path, value):
                    continue
                if one.holder.kept_only and value is not was and isinstance(value, torch.Tensor | np.ndarray):
                    continue
                if _is_record(value, frozen, before, one.holder.in_place) and one.holder.may_record(name):
                    continue
                yield path, value, frozen
        self._clocks.look()

    def _is_reading(self, path: str, value: Any) -> bool:
        """Whether it was, when it had moved first, what a clock shows, and may still be."""
        if path not in self._readings:
            self._readings[path] = self._clocks.are_read(value)
        return self._readings[path]

    def _moved_to(self, path: str, value: Any, before: Any, *, quick: bool) -> Frozen | None:
        """What it is now; None: what it was."""
        same = value is before
        if (same and type(value) in PLAIN) or is_no_value(value):
            return None
        if is_iterator(value) and not isinstance(value, itertools.count):
            return ("iterator",)
        saved = self._memory_of_saved
        frozen = freeze(value, saved, arrays=lambda one: self._looked.freeze(one, saved, quick=quick))
        return frozen if frozen != self.frozen.get(path) or (frozen[0] == "object" and not same) else None


class _Watched:
    """One holder, with its attributes as they were at the beginning, and as they were looked at last.

    Attributes:
        before: those of the beginning.
        there: the names of all that it had at the beginning.
        within: the tensors and arrays that they were then, or had inside.
        rows: name, path and value of those that may have moved: what is another object, or may change within.
    """

    __slots__ = ("_all_names", "_all_values", "before", "holder", "rows", "there", "within")

    def __init__(self, holder: AttributeHolder) -> None:
        self.holder, self.there = holder, frozenset(holder.values)
        self.before = {name: holder.values[name] for name in holder.names()}
        self.within = {name: list(map(weakref.ref, tensors_in(value))) for name, value in self.before.items()}
        self.look()

    def hides(self) -> bool:
        """Whether it has got something that is not looked at."""
        names = frozenset(self.holder.names())
        return any(name not in names and (name in self.before or name not in self.there) for name in self.holder.values)

    def look(self) -> None:
        """Look at every attribute."""
        path, values, before = self.holder.path, self.holder.values, self.before
        self._all_names, self._all_values = list(values), list(values.values())
        rows = ((name, f"{path}.{name}", values[name]) for name in self.holder.names())
        self.rows = [row for row in rows if changes_within(row[2]) or row[2] is not before.get(row[0], MISSING)]

    def untouched(self) -> bool:
        """Whether every attribute is the object that was looked at last. Cheap."""
        values = self.holder.values
        return list(values) == self._all_names and all(map(operator.is_, values.values(), self._all_values))


def _is_record(value: Any, now: Frozen, before: Frozen, of_variable: bool) -> bool:
    """Whether a container only writes down what happens: it grows, without a bound, and is no dict of tensors.

    A dict with more keys remembers something, but for lists in it that grow.

    Args:
        of_variable: it is no attribute: lists in it that are new are none that have grown.
    """
    if not isinstance(value, CONTAINERS) or isinstance(value, tuple) or getattr(value, "maxlen", None) is not None:
        return False
    if isinstance(value, dict) and all(isinstance(one, torch.Tensor) for one in list(value.values())):
        return False
    if isinstance(value, dict) and before and len(value) <= _MOST_KEYS:
        new = itertools.repeat(() if of_variable else _NO_LIST)
        return any(map(_has_grown, now[2:], itertools.chain(before[2:], new)))
    return _has_grown(now, before)


def _has_grown(now: Any, before: Any) -> bool:
    """Whether a frozen container, or one in it, has more items than before."""
    if not (isinstance(now, tuple) and isinstance(before, tuple)):
        return False
    if now and now[0] in _SIZED and before[:1] != ("NoneType",) and (now[:1] != before[:1] or now[1] > before[1]):
        return True
    return any(map(_has_grown, now, before))
