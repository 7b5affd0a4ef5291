"""One Python object as typed JSON that JSON itself does not know (docs/format.md, "Tree"), and the classes and dtypes
that a snapshot names, found without running their code.

Scalars become one JSON node (`encode_scalar`); containers give their children and a function that wraps the encoded
children again (`open_container`). Decoding is in `ckpt_engine.state.rebuild`.

A snapshot is not trusted, and what lies in the modules of this process may do anything when it is merely looked at:
`getattr` on a module may import, on a metaclass or a descriptor may run a program. So a class is taken only as it lies
in the dictionary of a module that is imported already, or of a class there; objects are made by the built-in type
that is under them, and their fields are put where they lie.
"""

from __future__ import annotations

import abc
import argparse
import base64
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import keyword
import math
import pathlib
import random
import re
import sys
import types
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch

from ckpt_engine.errors import FormatError

Json = Any
Wrap = Callable[[list[Json]], Json]
OpenedContainer = tuple[Sequence[Any], Sequence[Any], Wrap]
"""See `open_container`."""

FACTORIES: dict[str | None, Callable[[], Any]] = {
    f.__name__: f for f in (list, dict, set, tuple, int, float, str, bool, collections.OrderedDict)
}
"""Default factories of a `defaultdict` that can be named without pickle."""


_SURELY_SHORT = 1 << 2000
"""Below it no limit of digits ever holds."""


CONTEXT = "__tensor_flatten__"
"""The key of what a tensor of other tensors has beside them."""
_PATHS = (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
"""Others have more than their text."""


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


def problem_of(node: Json) -> str | None:
    """Why an encoded value could not be written, or not be read again; None: it can be both."""
    if isinstance(node, str):
        return None if node.isascii() or _is_unicode(node) else "a text with a lone surrogate has no bytes in UTF-8"
    if isinstance(node, int):
        return None if -_SURELY_SHORT < node < _SURELY_SHORT else _too_long(node)
    if isinstance(node, dict):
        return next((found for item in node.items() for one in item if (found := problem_of(one))), None)
    if isinstance(node, list):
        return next((found for one in node if (found := problem_of(one))), None)
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _too_long(number: int) -> str | None:
    """Python reads no number of more digits, unless the reading process allows it."""
    most = min(sys.int_info.default_max_str_digits, sys.get_int_max_str_digits() or sys.maxsize)
    if abs(number) < 10**most:
        return None
    return f"a whole number of {number.bit_length()} bits has more than {most} digits; int.to_bytes makes bytes of it"


def type_name(cls: type) -> str:
    """`module:qualname`, how a class is named in a manifest."""
    return f"{cls.__module__}:{cls.__qualname__}"


def encode_float(value: float) -> Json:
    """JSON number, or a node for the values JSON lacks."""
    return value if math.isfinite(value) else {"$": "float", "v": repr(value)}


def encode_bytes(kind: str, value: bytes) -> Json:
    return {"$": kind, "b64": base64.b64encode(value).decode("ascii")}


def encode_scalar(node: Any) -> Json | None:
    """The JSON node of a leaf that is neither an array nor a container, or None if the kind is unknown.

    Subclasses of str, int and float keep their class; one with attributes of its own is unknown.
    """
    return next((encode(node) for kinds, encode in _ENCODERS if isinstance(node, kinds)), None)


def _encode_path(node: pathlib.PurePath) -> Json | None:
    windows = {"windows": True} if isinstance(node, pathlib.PureWindowsPath) else {}
    is_plain = type(node) in _PATHS
    return {"$": "path", "v": str(node), "pure": not isinstance(node, pathlib.Path), **windows} if is_plain else None


def _encode_subclass(node: Any, plain: Json) -> Json | None:
    return None if getattr(node, "__dict__", None) else {"$": "subclass", "type": type_name(type(node)), "v": plain}


def _plain_bounds(node: range | slice) -> bool:
    return all(x is None or type(x) is int for x in (node.start, node.stop, node.step))


def open_container(node: Any) -> OpenedContainer | None:
    """Children of a container kind, their path keys, and how to wrap their encoded nodes; None if not a container.

    Plain dict, list and tuple are handled by the caller on its fast path.
    """
    for kinds, opened in _CONTAINERS:
        if isinstance(node, kinds):
            return opened(node)
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        fields = list(node._fields)
        return _items(list(node), {"$": "namedtuple", "type": type_name(type(node)), "fields": fields}, fields)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        values = {f.name: getattr(node, f.name) for f in dataclasses.fields(node) if hasattr(node, f.name)}
        return _fields(values, {"$": "dataclass", "type": type_name(type(node))})
    if hasattr(type(node), "__tensor_flatten__"):
        return _open_wrapper(node)
    return open_generator(node) or _open_omegaconf(node)


def _open_wrapper(node: torch.Tensor) -> OpenedContainer:
    """A tensor of other tensors, as torch opens it."""
    names, context = node.__tensor_flatten__()  # type: ignore[attr-defined]
    head = {
        "$": "wrapper",
        "type": type_name(type(node)),
        "size": list(node.shape),
        "stride": list(node.stride()),
        "parameter": getattr(node, "_is_param", False),
        "requires_grad": node.requires_grad and node.is_leaf,
    }
    return _fields({**{name: getattr(node, name) for name in names}, CONTEXT: context}, head)


def _items(children: list[Any], head: dict[str, Json], keys: Sequence[Any] | None = None) -> OpenedContainer:
    return children, keys or range(len(children)), lambda c: {**head, "items": c}


def _one(key: str, child: Any, head: dict[str, Json]) -> OpenedContainer:
    return [child], [key], lambda c: {**head, key: c[0]}


def _fields(values: dict[str, Any], head: dict[str, Json]) -> OpenedContainer:
    names = list(values)
    return list(values.values()), names, lambda c: {**head, "fields": dict(zip(names, c, strict=True))}


def _open_mapping(node: dict[Any, Any]) -> OpenedContainer | None:
    """Dict subclasses; keys travel as children too, so that any storable key works."""
    head: dict[str, Json]
    if isinstance(node, collections.defaultdict):
        factory = node.default_factory
        name = getattr(factory, "__name__", None)
        if FACTORIES.get(name) is not factory:  # of None, too, there is none
            return None
        head = {"$": "defaultdict", "factory": name}
    else:
        is_counter = isinstance(node, collections.Counter)
        head = {"$": "counter"} if is_counter else {"$": "mapping", "type": type_name(type(node))}
    keys, n = list(node), len(node)

    def wrap(children: list[Json]) -> Json:
        return {**head, "items": [[k, v] for k, v in zip(children[:n], children[n:], strict=True)]}

    return [*keys, *node.values()], [*(f"key {k!r}" for k in keys), *keys], wrap


def open_generator(node: Any) -> OpenedContainer | None:
    """Random generators as objects: their stream position, not their identity."""
    if isinstance(node, random.Random) and type(node) is not random.Random:
        return None  # it has more
    return next((opened(node) for kind, opened in _GENERATORS if isinstance(node, kind)), None)


def _open_omegaconf(node: Any) -> OpenedContainer | None:
    if type(node).__module__.partition(".")[0] != "omegaconf":
        return None
    from omegaconf import Container, OmegaConf  # only reached when the user's state holds one

    if not isinstance(node, Container):
        return None
    flags = {"struct": OmegaConf.is_struct(node), "readonly": OmegaConf.is_readonly(node)}
    return _one("container", OmegaConf.to_container(node, resolve=False), {"$": "omegaconf", "flags": flags})


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


def mapping(cls: type, pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any] | None:
    """An object of a subclass of dict; None: it cannot be made without running code."""
    out: dict[Any, Any] | None = _bare(cls, dict, collections.OrderedDict, collections.defaultdict)
    if out is None:
        return None
    put = collections.OrderedDict.__setitem__ if collections.OrderedDict in _line(cls) else dict.__setitem__
    for key, value in pairs:
        put(out, key, value)
    return out


def of_subclass(cls: type, value: Any) -> Any:
    """A text or number as an object of a subclass of its type, made without code of that class; None: it is none."""
    kind = type(value)
    return kind.__new__(cls, value) if kind in (str, int, float) and kind in _line(cls) else None


def dataclass(cls: type, values: Mapping[str, Any]) -> Any:
    """An object of a dataclass whose `__init__` has not run; None: it is none, or making it would run code."""
    if type(_lookup(cls, "__dataclass_fields__")) is not dict:
        return None
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


@lru_cache(256)
def dtype_of(name: str) -> torch.dtype:
    """The dtype that manifests call so.

    Raises:
        FormatError: this torch has none of that name.
    """
    return cast(torch.dtype, torch_value(name, torch.dtype))


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


_ENCODERS: Sequence[tuple[type | types.UnionType, Callable[[Any], Json | None]]] = (
    (
        enum.Enum,  # of several flags, or none, their class would have to compute them again
        lambda v: {"$": "enum", "type": type_name(type(v)), "name": v.name} if v.name in type(v).__members__ else None,
    ),
    (
        np.generic,
        lambda v: (
            None
            if v.dtype.hasobject or v.dtype.names
            else {"$": "npscalar", "dtype": v.dtype.str, "hex": v.tobytes().hex()}
        ),
    ),
    (bool | int, lambda v: v if type(v) in (bool, int) else _encode_subclass(v, int(v))),
    (str, lambda v: v if type(v) is str else _encode_subclass(v, str.__str__(v))),
    (float, lambda v: encode_float(v) if type(v) is float else _encode_subclass(v, encode_float(float(v)))),
    (pathlib.PurePath, _encode_path),
    (complex, lambda v: {"$": "complex", "re": encode_float(v.real), "im": encode_float(v.imag)}),
    (bytes | bytearray, lambda v: encode_bytes(type(v).__name__, bytes(v))),
    (datetime.datetime, lambda v: {"$": "datetime", "v": v.isoformat(), "fold": v.fold}),
    (datetime.date | datetime.time, lambda v: {"$": type(v).__name__, "v": v.isoformat()}),
    (datetime.timedelta, lambda v: {"$": "timedelta", "v": [v.days, v.seconds, v.microseconds]}),
    (uuid.UUID | decimal.Decimal | fractions.Fraction, lambda v: {"$": type(v).__name__.lower(), "v": str(v)}),
    (range | slice, lambda v: {"$": type(v).__name__, "v": [v.start, v.stop, v.step]} if _plain_bounds(v) else None),
    (
        torch.dtype | torch.device | torch.memory_format | torch.layout,
        lambda v: {"$": f"torch.{type(v).__name__}", "v": str(v).removeprefix("torch.")},
    ),
    (np.dtype, lambda v: None if v.hasobject or v.names else {"$": "np.dtype", "v": v.str}),
)
"""How the kinds of leaves are written; the first one that fits. `rebuild` reads them by the same names."""
_CONTAINERS: Sequence[tuple[type | types.UnionType, Callable[[Any], OpenedContainer | None]]] = (
    (dict, _open_mapping),
    (torch.Size, lambda v: _items([int(x) for x in v], {"$": "torch.Size"})),
    (set, lambda v: _items(list(v), {"$": "set"})),
    (frozenset, lambda v: _items(list(v), {"$": "frozenset"})),
    (collections.deque, lambda v: _items(list(v), {"$": "deque", "maxlen": v.maxlen})),
    (argparse.Namespace, lambda v: _fields(vars(v), {"$": "namespace"})),
    (types.SimpleNamespace, lambda v: _fields(vars(v), {"$": "simplenamespace"})),
)
"""The kinds of containers that their classes tell."""
_GENERATORS: Sequence[tuple[type, Callable[[Any], OpenedContainer]]] = (
    (torch.Generator, lambda v: _one("state", v.get_state(), {"$": "torch.Generator", "device": str(v.device)})),
    (np.random.Generator, lambda v: _one("state", v.bit_generator.state, {"$": "np.Generator"})),
    (np.random.RandomState, lambda v: _one("state", v.get_state(legacy=False), {"$": "np.RandomState"})),
    (random.Random, lambda v: _one("state", v.getstate(), {"$": "random.Random"})),
)
