"""Finds the classes and dtypes that a snapshot names, and makes objects of them, without running any code of theirs.

A snapshot is not trusted, and what lies in the modules of this process may do anything when it is merely looked at:
`getattr` on a module may import, on a metaclass or a descriptor may run a program. So a class is taken only as it lies
in the dictionary of a module that is imported already, or of a class there; objects are made by the built-in type
that is under them, and their fields are put where they lie.
"""

from __future__ import annotations

import abc
import collections
import enum
import keyword
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ckpt_engine.errors import FormatError

# As the interpreter reads them itself: a class may have attributes of these names that are something else.
_of_module: Callable[[Any], dict[str, Any] | None] = vars(types.ModuleType)["__dict__"].__get__
_of_class: Callable[[type], Mapping[str, Any]] = vars(type)["__dict__"].__get__
_line: Callable[[type], tuple[type, ...]] = vars(type)["__mro__"].__get__
_flags: Callable[[type], int] = vars(type)["__flags__"].__get__
_MADE_BY_PYTHON = 1 << 9
_METACLASSES = (type, abc.ABCMeta, enum.EnumMeta, object)
_NUMPY_DTYPE = re.compile(r"[<>|=][biufcmMSUV][0-9]{1,9}(\[[0-9A-Za-z/]{1,16}\])?")
_MOST_FIELDS = 1000
"""Of a named tuple whose class is made here; one with more comes back as a tuple."""
_MOST_MADE = 1000
"""Classes of named tuples that are made here: each costs as much as a thousand values."""

_made: dict[tuple[str, tuple[str, ...]], type] = {}


def find_class(name: str) -> type | None:
    """The class `module:qualname`, if its module is imported and nothing in its way runs code."""
    module_name, _, qualname = name.partition(":")
    module = sys.modules.get(module_name)
    if not issubclass(type(module), types.ModuleType):
        return None
    found: Any = None
    inside: Mapping[str, Any] = _of_module(module) or {}
    for part in qualname.split("."):
        found = inside.get(part)
        if not issubclass(type(found), type):
            return None
        inside = _of_class(found)
    return found if _is_quiet(found) else None


def _is_quiet(cls: type) -> bool:
    """Whether neither reading attributes of a class and of its objects nor forgetting these runs code of theirs."""
    metaclass = (base for base in _line(type(cls)) if base not in _METACLASSES)
    if any("__getattribute__" in _of_class(base) or "__getattr__" in _of_class(base) for base in metaclass):
        return False
    own = (_of_class(base) for base in _line(cls) if _flags(base) & _MADE_BY_PYTHON)
    return not any(hook in names for names in own for hook in ("__getattribute__", "__class__", "__del__"))


def _lookup(cls: type, name: str) -> Any:
    return next((_of_class(base)[name] for base in _line(cls) if name in _of_class(base)), None)


def _bare(cls: type, *allowed: type) -> Any:
    """A new object without any content, made by the built-in type under its class; None: that is none of `allowed`."""
    base: Any = next(base for base in _line(cls) if not _flags(base) & _MADE_BY_PYTHON)
    return base.__new__(cls) if base in allowed else None


def is_mapping(cls: type) -> bool:
    """Whether it is a subclass of dict."""
    return dict in _line(cls)


def mapping(cls: type, pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any] | None:
    """An object of a subclass of dict; None: it cannot be made without running code."""
    out: dict[Any, Any] | None = _bare(cls, dict, collections.OrderedDict, collections.defaultdict)
    if out is None:
        return None
    put = collections.OrderedDict.__setitem__ if collections.OrderedDict in _line(cls) else dict.__setitem__
    for key, value in pairs:
        put(out, key, value)
    return out


def is_dataclass(cls: type) -> bool:
    """Whether it is a dataclass."""
    return type(_lookup(cls, "__dataclass_fields__")) is dict


def dataclass(cls: type, values: Mapping[str, Any]) -> Any:
    """An object of a dataclass whose `__init__` has not run; None: it cannot be made without running code."""
    found = {name: _lookup(cls, name) for name in values}
    slots = {name: one for name, one in found.items() if type(one) is types.MemberDescriptorType}
    if any(_takes_values(one) for name, one in found.items() if name not in slots):
        return None
    holds: Any = _lookup(cls, "__dict__")
    if len(slots) < len(values) and type(holds) is not types.GetSetDescriptorType:
        return None
    out = _bare(cls, object)
    if out is None:
        return None
    for name, value in values.items():
        if name in slots:
            slots[name].__set__(out, value)
        else:
            holds.__get__(out)[name] = value
    return out


def _takes_values(attribute: Any) -> bool:
    """Whether an attribute of a class is a descriptor that a value would be handed to."""
    return any("__set__" in _of_class(base) or "__delete__" in _of_class(base) for base in _line(type(attribute)))


def is_namedtuple(cls: type, fields: tuple[str, ...]) -> bool:
    """Whether it is a named tuple with these fields."""
    found = _lookup(cls, "_fields")
    return tuple in _line(cls) and type(found) is tuple and all(type(one) is str for one in found) and found == fields


def plain_namedtuple(name: str, fields: tuple[str, ...]) -> type:
    """A class of that name made here; `tuple` where there can be none."""
    known = _made.get((name, fields))
    if known is not None:
        return known
    if len(fields) > _MOST_FIELDS or len(_made) >= _MOST_MADE:
        return tuple
    short = name.rpartition(":")[2].rpartition(".")[2]
    try:
        is_name = short.isidentifier() and not keyword.iskeyword(short)
        made: type = collections.namedtuple(short if is_name else "Row", fields)  # type: ignore[misc]
    except ValueError:  # no names of attributes
        return tuple
    made.__reduce__ = _as_tuple  # type: ignore[method-assign, assignment]
    return _made.setdefault((name, fields), made)


def _as_tuple(self: tuple[Any, ...]) -> tuple[type, tuple[list[Any]]]:
    """How pickle stores an object of a class that no module has: exports and torch.distributed.checkpoint pickle."""
    return tuple, (list(self),)


def member(cls: type, name: str | None) -> Any:
    """The member of an enum; None: it is no enum, or has none of that name."""
    members = _of_class(cls).get("_member_map_")
    if enum.Enum not in _line(cls) or type(members) is not dict:
        return None
    return members.get(name)


def dtype_of(name: Any) -> torch.dtype:
    """The dtype that manifests call so.

    Raises:
        FormatError: this torch has none of that name.
    """
    found = torch_value(name, torch.dtype)
    assert isinstance(found, torch.dtype)
    return found


def torch_value(name: Any, kind: type) -> Any:
    """The value of a type of torch's that is called so in `torch`.

    Raises:
        FormatError: there is none.
    """
    found = vars(torch).get(name) if isinstance(name, str) else None  # not getattr: that imports what is named
    if type(found) is not kind:
        raise FormatError(f"this torch has no {kind.__name__} {str(name)[:60]!r}", hint="read it with a newer torch")
    return found


def numpy_dtype(text: Any) -> np.dtype[Any]:
    """The dtype of plain data that numpy describes so.

    Raises:
        ValueError: none that the format knows. numpy's own parser takes far more, references to objects among it.
    """
    if not isinstance(text, str) or _NUMPY_DTYPE.fullmatch(text) is None:
        raise ValueError(f"{str(text)[:60]!r} is no dtype of plain data")
    return np.dtype(text)
