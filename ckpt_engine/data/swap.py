"""Makes an existing DataLoader report its iterations without changing the object, its type's name or its methods.

The loader's class becomes a subclass that overrides `__iter__` only. Pickles and copies of the loader are of the
original class, so spawned workers, launchers and `copy.deepcopy` never see the subclass.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader

__all__ = ["Iterations", "followed_by", "original_class", "swap_back", "swap_in"]

_ATTRIBUTE = "_ckpt_engine_position"
_subclasses: dict[type, type] = {}
_set_class = object.__dict__["__class__"].__set__  # works where a class hides `__class__` behind a read-only property


class Iterations(Protocol):
    """Who is told about iterations: gets the loader's own `__iter__` and returns the iterator to use."""

    def begin(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]: ...


def swap_in(loader: DataLoader[Any], iterations: Iterations) -> None:
    """From now on `iter(loader)` returns `iterations.begin(the original iter)`."""
    original = type(loader)
    loader.__dict__[_ATTRIBUTE] = iterations
    _set_class(loader, _subclass_of(original))


def swap_back(loader: DataLoader[Any]) -> None:
    """Undo `swap_in`; does nothing to a loader that is not swapped."""
    if loader.__dict__.pop(_ATTRIBUTE, None) is not None:
        _set_class(loader, original_class(loader))


def followed_by(loader: DataLoader[Any]) -> Iterations | None:
    """Who follows this loader, or None."""
    return loader.__dict__.get(_ATTRIBUTE)


def original_class(loader: DataLoader[Any]) -> type:
    """The loader's class as the user knows it."""
    cls: type = type(loader)
    return cls.__mro__[1] if cls in _subclasses.values() else cls


def _subclass_of(original: type) -> type:
    known = _subclasses.get(original)
    if known is not None:
        return known
    base: Any = original

    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807
        iterations: Iterations | None = self.__dict__.get(_ATTRIBUTE)
        if iterations is None:
            return base.__iter__(self)  # type: ignore[no-any-return]
        return iterations.begin(lambda: base.__iter__(self))

    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # noqa: N807
        return _without_position(base.__reduce_ex__(self, protocol), original)

    subclass: type = type(original)(
        original.__name__,
        (original,),
        {
            "__iter__": __iter__,
            "__reduce_ex__": __reduce_ex__,
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
        },
    )
    _subclasses[original] = subclass
    return subclass


def _without_position(reduced: Any, original: type) -> Any:
    """The result of `__reduce_ex__` as the original class would have given it."""
    if not isinstance(reduced, tuple):
        return reduced
    function, arguments, *rest = reduced
    arguments = tuple(original if a is _subclasses.get(original) else a for a in arguments)
    if function is copyreg.__newobj__:  # type: ignore[attr-defined]
        function = original.__new__  # pickle insists that `__newobj__` is given the class of the very object
    if rest and isinstance(rest[0], dict):
        rest[0] = {k: v for k, v in rest[0].items() if k != _ATTRIBUTE}
    return (function, arguments, *rest)
