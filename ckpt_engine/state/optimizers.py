"""The state of optimizers, put back bit for bit: `torch.optim.Optimizer.load_state_dict` casts every tensor to the
dtype of its parameter, and makes other containers and texts again from their items.

Which parameter is where in the groups of optimizers: stored by name, and put in place by name. The state has the
numbers of parameters, and a script that takes their names from a set has them in another order each time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from ckpt_engine.errors import CorruptError, MismatchError
from ckpt_engine.grouping import grouped
from ckpt_engine.observe.units import first
from ckpt_engine.state.flatten import bytes_tensor
from ckpt_engine.state.module_names import canonical, stored_name
from ckpt_engine.state.wrapped import duplicate, kinds_of, mapped, require_made, with_made

_CAST = (torch.Tensor, dict, bool, int, float, complex, type(None))
"""What `load_state_dict` casts or takes as it is, besides plain lists and tuples."""
Groups = list[list[str]]
"""The names of the parameters in each group of an optimizer."""
_OF_PARAMETERS = {"params", "param_names"}
MOVED = "the script gives its parameters in another order now: each has its own state, by its name"
_HINT = "make the parameter groups as in the saved run, or use another folder for the new run"
_SHOWN = 3


class _Guarded:
    """A value that `load_state_dict` must not iterate over. No dataclass: Lightning goes into those."""

    def __init__(self, value: Any) -> None:
        self.value = value


def load_exactly(optimizer: torch.optim.Optimizer, saved: Any, load: Callable[[Any], object]) -> None:
    """Put a state back in memory of its own.

    In the memory that the snapshot was read into tensors are not aligned as torch aligns its own, which changes the
    last bit of sums and products that a library computes in aligned blocks (L-BFGS).

    Args:
        optimizer: out of whatever wraps it.
        saved: its `state_dict`.
        load: its `load_state_dict`, or that of what wraps it.
    """
    with linked([optimizer]):
        load(guarded(saved))
    put_exactly(optimizer, saved)


@contextmanager
def linked(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Inside, states are loaded; afterwards an inner optimizer has the state and groups of its outer one, if it had.

    torch's `load_state_dict` makes new ones, for the optimizer alone that it is called of.
    """
    shared = [
        (outer, inner, name, getattr(outer, name))
        for outer in optimizers
        for inner in vars(outer).values()
        for name in ("state", "param_groups")
        if isinstance(inner, torch.optim.Optimizer) and _is_shared(getattr(outer, name), getattr(inner, name))
    ]
    yield
    for outer, inner, name, before in shared:
        newest = getattr(inner if getattr(outer, name) is before else outer, name)
        setattr(outer, name, newest)
        setattr(inner, name, newest)


def _is_shared(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, list) and list(map(id, one)) == list(map(id, other)))


def guarded(saved: Any) -> Any:
    """The state for `load_state_dict`, with what that would damage out of its sight until `put_exactly`; the names of
    parameters are those of the script, which a wrapper may change."""
    if not isinstance(saved, dict) or "state" not in saved:
        return saved
    groups = [{key: one for key, one in group.items() if key != "param_names"} for group in saved["param_groups"]]
    return {**saved, "state": {key: _guard(value) for key, value in saved["state"].items()}, "param_groups": groups}


def _guard(value: Any) -> Any:
    if type(value) is dict:
        return {key: _guard(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_guard, value))
    return value if isinstance(value, _CAST) else _Guarded(value)


def put_exactly(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """After `load_state_dict`: what it has changed becomes what was saved, in memory of its own.

    What the class itself has made of an older form of its state stays.
    """
    if not isinstance(saved, dict) or "state" not in saved:
        into_own_memory([optimizer])
        return
    numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
    live = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    owners: dict[Any, Any] = dict(zip(numbers, live, strict=False))
    kinds = kinds_of(optimizer)
    for key, value in saved["state"].items():
        owner = owners.get(key, key)
        if owner in optimizer.state:
            make = partial(with_made, kinds=kinds, device=getattr(owner, "device", torch.device("cpu")))
            optimizer.state[owner] = _as_saved(value, optimizer.state[owner], make)


def _as_saved(saved: Any, live: Any, make: Callable[[Any], Any]) -> Any:
    if isinstance(live, _Guarded):
        return make(own_copy(live.value))
    if isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor):
        made = own_copy(saved) if saved.shape == live.shape else live
        return made if made.device == live.device else made.to(live.device)
    if isinstance(saved, dict) and isinstance(live, dict):
        for key in saved.keys() & live.keys():
            live[key] = _as_saved(saved[key], live[key], make)
    elif type(saved) in (list, tuple) and type(live) is type(saved) and len(saved) == len(live):
        return type(saved)(_as_saved(one, other, make) for one, other in zip(saved, live, strict=True))
    return live


def into_own_memory(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Copy the state of optimizers out of the memory that it was read into; see `load_exactly`."""
    for optimizer in optimizers:
        for owner, state in optimizer.state.items():
            optimizer.state[owner] = own_copy(state)


def own_copy(value: Any) -> Any:
    """The value with every tensor and array in lists, tuples, deques and dicts in memory of its own."""
    return mapped(value, _own)


def _own(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return duplicate(value).requires_grad_(value.requires_grad) if value.device.type == "cpu" else value
    return value.copy() if isinstance(value, np.ndarray) else value


class Parts(Protocol):
    """Models and the optimizers of their parameters, by component."""

    @property
    def modules(self) -> Mapping[str, torch.nn.Module]:
        """The models."""

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """The optimizers."""


def names_of(parts: Parts) -> dict[str, Groups]:
    """The names of the parameters in the groups of each optimizer; of one that is in no model its shape."""
    names: dict[int, str] = {}
    for key, module in parts.modules.items():
        canonical_name = canonical(module)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            full = f"{key}.{canonical_name(name)}"
            names[id(parameter)] = min(full, names.get(id(parameter), full))
    return {
        key: [
            [names.get(id(p)) or ("lazy" if is_lazy(p) else str(list(p.shape))) for p in group["params"]]
            for group in optimizer.param_groups
        ]
        for key, optimizer in parts.optimizers.items()
    }


@dataclass(eq=False)
class StoredOrder:
    """The names as one array, which is the same object as long as the groups stay: a snapshot has it as it was before.

    Args:
        _parts: of the run.
    """

    _parts: Parts
    _ids: list[list[int]] = field(default_factory=list)
    _stored: torch.Tensor = field(init=False)

    def array(self) -> torch.Tensor:
        """For a snapshot; see `read_order`.

        Raises:
            UnstorableLeafError: as `require_made`, which has to see each state that is stored.
        """
        require_made(self._parts.optimizers)
        groups = chain.from_iterable(one.param_groups for one in self._parts.optimizers.values())
        ids = [list(map(id, group["params"])) for group in groups]
        if not self._ids or ids != self._ids:
            self._ids, self._stored = ids, bytes_tensor(json.dumps(names_of(self._parts)).encode())
        return self._stored


def read_order(stored: torch.Tensor | None) -> dict[str, Groups]:
    """What `StoredOrder` has stored; nothing where an older version has written the snapshot.

    Raises:
        CorruptError: it is not that.
    """
    with suppress(AttributeError, TypeError, ValueError, RecursionError):
        found: Any = {} if stored is None else json.loads(stored.numpy().tobytes())
        names = chain.from_iterable(chain.from_iterable(found.values()))
        if all(isinstance(name, str) for name in names):
            return dict(found)
    raise CorruptError("the names of the optimizers' parameters cannot be read from the snapshot")


def as_named_here(saved: Mapping[str, Groups], parts: Parts) -> dict[str, Groups]:
    """The names of a snapshot as `names_of` makes them; see `module_names.stored_name`."""
    known = {key: stored_name(module) for key, module in parts.modules.items()}

    def name(full: str) -> str:
        component, _, rest = full.partition(".")
        return f"{component}.{known[component](rest)}" if component in known else full

    return {key: [list(map(name, names)) for names in groups] for key, groups in saved.items()}


def put_in_order(saved: dict[str, Groups], parts: Parts, *, divided: bool) -> list[str]:
    """Give the groups of each optimizer the parameters that they had, in their order; the names of those optimizers.

    Args:
        saved: by component.
        divided: ranks have parts of parameters, which are read into those that have their numbers now.

    Raises:
        MismatchError: an optimizer has other parameters than it had, or groups them otherwise; names them.
    """
    now, moved, saved = names_of(parts), [], as_named_here(saved, parts)
    for key in saved.keys() & now.keys():
        if saved[key] == now[key]:
            continue
        require_same(key, saved[key], now[key])
        if divided:
            raise MismatchError(
                f"{key!r} has its parameters in another order than in the snapshot, and they are divided over ranks",
                hint="give them to it in the same order in each process (sort names that come out of a set)",
            )
        optimizer = parts.optimizers[key]
        rows = zip(now[key], optimizer.param_groups, strict=True)
        groups = grouped((frozenset(names), (names, group)) for names, group in rows)
        for index, names in enumerate(saved[key]):
            here, group = groups[frozenset(names)].pop(0)
            at = {name: number for number, name in enumerate(here)}
            for one in _OF_PARAMETERS & group.keys():
                group[one][:] = [group[one][at[name]] for name in names]
            optimizer.param_groups[index] = group
        moved.append(key)
    return moved


def matched(saved: Any, before: Groups, live: Any, now: Groups, is_new: Callable[[str], bool]) -> dict[str, Any]:
    """The state of an optimizer for the parameters that it has now: each gets its own by its name.

    Args:
        saved, live: its `state_dict`.
        before, now: the names of its parameters.
        is_new: whether a parameter begins without a state.
    """
    numbers = {name: number for number, name in enumerate(chain.from_iterable(before))}
    origins = {name: group for names, group in zip(before, saved["param_groups"], strict=False) for name in names}
    state, groups = dict[Any, Any](), []
    for names, group in zip(now, live["param_groups"], strict=True):
        origin: dict[str, Any] = next((origins[name] for name in names if name in origins), {})
        own = {key: group[key] for key in _OF_PARAMETERS & group.keys()}
        groups.append({**group, **origin, **own})
        state |= {
            number: saved["state"][numbers[name]]
            for name, number in zip(names, group["params"], strict=True)
            if numbers.get(name) in saved["state"] and not is_new(name)
        }
    return {**saved, "state": state, "param_groups": groups}


def require_same(key: str, saved: Groups, now: Groups) -> None:
    """Raise unless both have the same groups of the same parameters, in any order.

    Raises:
        MismatchError: names what differs.
    """
    before, after = Counter(chain.from_iterable(saved)), Counter(chain.from_iterable(now))
    gone, new = sorted((before - after).elements()), sorted((after - before).elements())
    if gone or new:
        rows = [
            f"{what}: {first(names, _SHOWN)}" for what, names in (("only saved", gone), ("only here", new)) if names
        ]
        raise MismatchError(f"{key!r} trains other parameters than in the snapshot ({'; '.join(rows)})", hint=_HINT)
    if sorted(map(sorted, saved)) != sorted(map(sorted, now)):
        mates = {name: group for group in map(sorted, now) for name in group}
        other = [name for group in map(sorted, saved) for name in group if mates[name] != group]
        raise MismatchError(
            f"{key!r} has these parameters in another group than in the snapshot: {first(other, _SHOWN)}", hint=_HINT
        )
    if several := [name for name, count in after.items() if count > 1]:
        raise MismatchError(
            f"{key!r} has its parameters in another order than in the snapshot, and several have no name: "
            f"they are in no tracked model, and their shape is {first(several, _SHOWN)}",
            hint="track the module that has them, or give them in the same order in each process",
        )
