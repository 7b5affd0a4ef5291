"""Tensors of other tensors (low-bit weights and moments): a snapshot has the inner tensors and the name of the class.

No class is taken because a snapshot names it. A live tensor gets the inner tensors of one of its class. Where nothing
is yet, as in an optimizer that has not stepped, a class counts that the optimizer's parameters have, that its own
module names, or that `torch.serialization.add_safe_globals` has been given.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ckpt_engine.errors import MismatchError, UnstorableLeafError
from ckpt_engine.state.flatten import Flattener, show_path
from ckpt_engine.state.json_types import CONTEXT, type_name
from ckpt_engine.state.sharding import is_wrapper
from ckpt_engine.store.tree import TreePath

Kinds = Mapping[str, type]
"""Classes of such tensors by their names in a manifest."""
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Wrapped:
    """A tensor of other tensors as a snapshot has it.

    Args:
        path: of its leaf.
        node: of the manifest's tree.
        context: what else `__tensor_flatten__` gives.
        tensors: the inner ones by name; one may be such a tensor, too.
    """

    path: TreePath
    node: Mapping[str, Any]
    context: Any
    tensors: dict[str, Any]

    def refused(self, why: str) -> MismatchError:
        """The error that this leaf does not fit."""
        return MismatchError(
            f"{show_path(self.path)} is a tensor of class {self.node['type']} in the snapshot, {why}",
            hint="make it as the saved run did, or torch.serialization.add_safe_globals([its class]) if none is there",
        )

    def fits(self, tensor: Any) -> bool:
        """Whether a live tensor is of the same class, with inner tensors of the same names and the same context."""
        if type_name(type(tensor)) != self.node["type"] or not is_wrapper(tensor):
            return False
        names, context = tensor.__tensor_flatten__()
        return set(names) == self.tensors.keys() and _form(context) == _form(self.context)

    def fill(self, live: Any) -> None:
        """Give the live tensor at its place what was saved.

        Raises:
            MismatchError: that is no such tensor.
        """
        if not self.fits(live):
            raise self.refused(f"and a {type_name(type(live))} here, or one of another context")
        for name, saved in self.tensors.items():
            inner = getattr(live, name)
            if isinstance(saved, Wrapped):
                saved.fill(inner)
            elif (inner.shape, inner.dtype) == (saved.shape, saved.dtype):
                with torch.no_grad():
                    inner.copy_(saved)
            else:
                raise self.refused(f"and its {name!r} is of another shape or dtype here")

    def made(self, kinds: Kinds, device: torch.device) -> torch.Tensor:
        """A new tensor of one of these classes, in memory of its own.

        Raises:
            MismatchError: its class is none of them, or makes another one of what was saved.
        """
        kind: Any = kinds.get(self.node["type"])
        if kind is None:
            raise self.refused("and nothing here is or names one")
        inner = {
            name: one.made(kinds, device) if isinstance(one, Wrapped) else one.detach().clone().to(device)
            for name, one in self.tensors.items()
        }
        try:
            found: torch.Tensor = kind.__tensor_unflatten__(
                inner, self.context, tuple(self.node["size"]), tuple(self.node["stride"])
            )
        except Exception as err:
            raise self.refused(f"and cannot be made of it: {type(err).__name__}: {err}") from err
        if not self.fits(found):
            raise self.refused("and another one when it is made")
        found.requires_grad_(self.node["requires_grad"])
        return torch.nn.Parameter(found, self.node["requires_grad"]) if self.node["parameter"] else found


def duplicate(tensor: Any) -> Any:
    """The tensor in memory of its own; of others by its inner ones, as its class may not know `clone`."""
    if not is_wrapper(tensor):
        return tensor.detach().clone()
    names, context = tensor.__tensor_flatten__()
    inner = {name: duplicate(getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


def _form(context: Any) -> Any:
    """Equal for equal contexts, whatever `==` means for their parts."""
    flattener = Flattener(["*"])
    scan = flattener.scan(context, ())
    return flattener.describe(context, ()).tree, scan.values, [array.tolist() for array in scan.arrays]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with `change` of whatever is in its lists, tuples, deques and dicts, which are others then."""
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple.__new__(type(value), [mapped(item, change) for item in value])
    if isinstance(value, list | dict | deque):
        made: Any = copy.copy(value)
        rows: Mapping[Any, Any] = value if isinstance(value, dict) else dict(enumerate(value))
        for key, item in rows.items():
            made[key] = mapped(item, change)
        return made
    return change(value)


def with_made(value: Any, kinds: Kinds, device: torch.device = _HOST) -> Any:
    """The value with tensors in the place of each `Wrapped`, made as `Wrapped.made` does.

    Raises:
        MismatchError: one cannot be made; names it.
    """
    return mapped(value, lambda one: one.made(kinds, device) if isinstance(one, Wrapped) else one)


def as_plain(value: Any) -> Any:
    """The value for programs that know no such tensors: with dicts of their inner ones."""
    return mapped(
        value, lambda one: as_plain(one.tensors | {CONTEXT: one.context}) if isinstance(one, Wrapped) else one
    )


def kinds_of(optimizer: torch.optim.Optimizer | None = None) -> Kinds:
    """The classes of which new tensors may be made, here or in the state of an optimizer."""
    found: Iterable[Any] = torch.serialization.get_safe_globals()
    if optimizer is not None:
        modules = {kind.__module__ for kind in type(optimizer).__mro__} & sys.modules.keys()
        code = [list(vars(sys.modules[name]).values()) for name in modules]  # other threads may import
        found = chain(found, *code, (type(p) for group in optimizer.param_groups for p in group["params"]))
    tensors = (kind for kind in found if isinstance(kind, type) and issubclass(kind, torch.Tensor))
    return {type_name(kind): kind for kind in tensors if hasattr(kind, "__tensor_unflatten__")}


def require_made(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Raise where the state of an optimizer has such tensors that no later process could make.

    Raises:
        UnstorableLeafError: names the class.
    """
    for name, optimizer in optimizers.items():
        states = (state.values() for state in optimizer.state.values() if isinstance(state, dict))
        wrappers = {type(one): one for one in chain.from_iterable(states) if is_wrapper(one)}
        if unknown := {type_name(kind) for kind in wrappers} - kinds_of(optimizer).keys() if wrappers else ():
            raise UnstorableLeafError(
                f"cannot store the state of {name!r}: a new process would not make its tensors of class {min(unknown)}",
                hint="say that snapshots may make them: torch.serialization.add_safe_globals([that class])",
            )


@contextmanager
def in_place(module: torch.nn.Module, saved: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Fill the module's tensors of tensors; inside, its `load_state_dict` takes the rest, which this gives.

    What `copy_` does is up to their classes: some round again, others leave out inner tensors.

    Raises:
        MismatchError: one is of another class here; names it.
    """
    whole = {key: one for key, one in saved.items() if isinstance(one, Wrapped)}
    named = (module.named_parameters, module.named_buffers) if whole else ()
    live = dict(chain.from_iterable(those(remove_duplicate=False) for those in named))
    for key, one in whole.items():
        one.fill(live.get(key))

    def ignore(_: torch.nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [key for key in keys.missing_keys if key not in whole]

    handle = module.register_load_state_dict_post_hook(ignore)  # type: ignore[no-untyped-call]
    try:
        yield {key: one for key, one in saved.items() if key not in whole} if whole else saved
    finally:
        handle.remove()
