"""Where state may hide besides the trainer's objects: the user's modules, and what their loaders read.

Of modules these are global variables, what functions keep, and how functions change both.

Large programs have thousands of functions. Their bytecode is read once, and only as far as it can matter.
"""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import chain
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ckpt_engine.audit import source
from ckpt_engine.audit.attributes import Variables
from ckpt_engine.audit.source import names_in
from ckpt_engine.audit.values import GENERATORS, MISSING, changes_in_place, is_iterator, is_own
from ckpt_engine.plugins import is_function_of_user, is_library, is_library_file, is_standard_name

_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_CHANGE_ITEMS = frozenset(dis.opmap[name] for name in ("STORE_SUBSCR", "DELETE_SUBSCR"))
_KEEPER = type(lru_cache(abs))
_RANDOM = frozenset(
    {
        *("random", "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "normal", "uniform", "gauss"),
        *("choice", "choices", "shuffle", "sample", "bernoulli", "multinomial", "betavariate"),
    }
)
_FOREIGN: set[str] = set()
"""Names of modules, and of whole packages, that are not the user's, as far as they have been looked at."""
OURS = tuple(f"{os.sep}{name}{os.sep}" for name in ("ckpt_engine", "lightning_ckpt", "accelerate_ckpt"))


@dataclass(frozen=True, slots=True)
class _ModuleCode:
    """What the functions of a module can do to its variables, read once: large programs have thousands.

    Args:
        values: ids of the module's variables then; others mean that it is read again.
        functions: of the module and its classes, and what it has them in.
        assigned: variables that they set.
        near: names of variables and attributes in those that change something within.
    """

    values: tuple[int, ...]
    functions: Mapping[FunctionType, Any]
    assigned: frozenset[str]
    near: frozenset[str]


_CODE: dict[str, _ModuleCode] = {}


def _code_of(name: str, module: Any, body: CodeType | None) -> _ModuleCode:
    """Args: body: of the module itself, if it runs: the functions in it may be made in any step."""
    ids = tuple(map(id, (body, *vars(module).values())))
    if (known := _CODE.get(name)) is None or known.values != ids:
        functions = dict(_functions(module))
        codes = [one.__code__ for one in functions] + ([] if body is None else [body])
        assigned, near = (frozenset[str]().union(*map(used, codes)) for used in (_assigned, _near_changes))
        known = _CODE[name] = _ModuleCode(ids, functions, assigned, near.intersection(vars(module)))
    return known


def of_modules() -> dict[str, Any]:
    """What is state in the user's modules, as roots by path: random streams among the global variables, variables that
    functions set or change within, what functions keep, and results that were drawn at random and are kept."""
    found, bodies = dict[str, Any](), dict[int, CodeType]()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            bodies[id(frame.f_globals)] = frame.f_code
        frame = frame.f_back
    for name, module in _modules_of_user():
        code, values = _code_of(name, module, bodies.get(id(vars(module)))), vars(module)
        own = frozenset(key for key in code.near if changes_in_place(values.get(key)))
        assigned = code.assigned.union(key for key, one in values.items() if issubclass(type(one), GENERATORS))
        iterators = [key for key, one in values.items() if is_iterator(one)]
        assigned |= {key for key in iterators if any(key in names_in(one) for one in code.functions)}
        changing = [one.__code__ for one in code.functions if own and not own.isdisjoint(_near_changes(one.__code__))]
        within = own.intersection(chain.from_iterable(map(_changed_within, changing))) - assigned
        if assigned or within:
            found[name] = Variables(partial(_global, module), assigned, within, module)
        for one, member in code.functions.items():
            if isinstance(member, _KEEPER) and not _RANDOM.isdisjoint(source.names_in(one)):
                found[f"{name}.{one.__qualname__}"] = Variables(partial(_kept, member), frozenset({"cache"}))
            elif vars(one).keys() - {"__wrapped__"} or any(map(is_own, source.defaults_of(one).values())):
                found[f"{name}.{one.__qualname__}"] = one
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


def _global(module: Any, name: str) -> Any:
    return vars(module).get(name, MISSING)


class KeptDraws:
    """Stands for results that `functools` keeps and that were drawn at random: no snapshot can have them."""


KEPT = KeptDraws()


def _kept(keeper: Any, _: str) -> KeptDraws | None:
    return KEPT if keeper.cache_info().currsize else None


def _functions(module: Any) -> Iterator[tuple[FunctionType, Any]]:
    """Those that a module defines, methods too, and what it has them in."""
    values = list(vars(module).values())
    values += [one for kind in values if issubclass(type(kind), type) for one in tuple(vars(kind).values())]
    for one in values:
        function = _function_of(one)
        if issubclass(type(function), FunctionType) and function.__globals__ is vars(module):
            yield function, one


def _function_of(one: Any) -> Any:
    """What is in a method, a property, or a wrapper of `functools`; nothing else is asked, as that may raise."""
    kind = type(one)
    if issubclass(kind, property):
        one = one.fget
    elif issubclass(kind, classmethod | staticmethod):
        one = one.__func__
    return vars(one).get("__wrapped__", one) if issubclass(type(one), FunctionType | _KEEPER) else one


@cache
def _assigned(code: CodeType) -> frozenset[str]:
    """Global variables that a function sets."""
    stores = _STORE_GLOBAL in code.co_code[::2]
    names = frozenset(one.argval for one in dis.get_instructions(code) if one.opcode == _STORE_GLOBAL) if stores else ()
    return frozenset(names).union(*map(_assigned, _inner(code)))


@cache
def _near_changes(code: CodeType) -> frozenset[str]:
    """Names of globals and attributes in a function that changes something within; many functions take little time."""
    return frozenset(code.co_names if _changes(code) else ()).union(*map(_near_changes, _inner(code)))


@cache
def _changed_within(code: CodeType) -> frozenset[str]:
    """Global variables that a function may change within."""
    found = [_changed_within(one) for one in _inner(code)]
    if _changes(code):
        found.append(frozenset(one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"))
    return frozenset[str]().union(*found)


def _changes(code: CodeType) -> bool:
    """Whether it may change something within: items, containers, or tensors by methods such as `add_`."""
    if not _CHANGE_ITEMS.isdisjoint(code.co_code[::2]) or not source.GROWS.isdisjoint(code.co_names):
        return True
    return any(name.endswith("_") and not name.endswith("__") for name in code.co_names)


def _inner(code: CodeType) -> list[CodeType]:
    return [one for one in code.co_consts if isinstance(one, CodeType)]


def roots_of_loader(name: str, loader: Any) -> dict[str, Any]:
    """What of a loader lives in this process and may count: positions and samplers are followed on their own."""
    if not isinstance(loader, DataLoader):
        return {}
    found: dict[str, Any] = {f"{name}.collate_fn": loader.collate_fn, f"{name}.worker_init_fn": loader.worker_init_fn}
    if not isinstance(loader.dataset, IterableDataset):
        found[f"{name}.dataset"] = loader.dataset
    return {path: value for path, value in found.items() if value is not None}


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
        for name, one in named.items():
            found.add(one.__qualname__ if isinstance(one, type) else f"{function.__module__}.{name}")
        waiting += named.values()
    return found
