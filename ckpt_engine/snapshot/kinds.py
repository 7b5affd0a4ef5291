"""Typed JSON nodes for Python objects that JSON does not know (docs/format.md, "Tree").

Scalars become one JSON node (`encode_scalar`); containers give their children and a function that wraps the encoded
children again (`open_container`). Decoding is in `ckpt_engine.restore.rebuild`.
"""

from __future__ import annotations

import argparse
import base64
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import math
import pathlib
import random
import sys
import types
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Json = Any
Wrap = Callable[[list[Json]], Json]

FACTORIES: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (list, dict, set, tuple, int, float, str, bool, collections.OrderedDict)
}
"""Default factories of a `defaultdict` that can be named without pickle."""


_SURELY_SHORT = 1 << 2000
"""Below it no limit of digits ever holds."""


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
    """Python reads no number of more digits, unless the reading process was told to."""
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

    Subclasses of str, int and float are stored as their plain value.
    """
    if isinstance(node, enum.Enum):
        return {"$": "enum", "type": type_name(type(node)), "name": node.name}
    if isinstance(node, np.generic):
        if node.dtype.hasobject or node.dtype.names:
            return None
        return {"$": "npscalar", "dtype": node.dtype.str, "hex": node.tobytes().hex()}
    if isinstance(node, bool | int | str):
        return node if type(node) in (bool, int, str) else _plain(node)
    if isinstance(node, float):
        return encode_float(float(node))
    if isinstance(node, complex):
        return {"$": "complex", "re": encode_float(node.real), "im": encode_float(node.imag)}
    if isinstance(node, bytes | bytearray):
        return encode_bytes(type(node).__name__, bytes(node))
    if isinstance(node, pathlib.PurePath):
        return {"$": "path", "v": str(node), "pure": not isinstance(node, pathlib.Path)}
    if isinstance(node, datetime.datetime):
        return {"$": "datetime", "v": node.isoformat(), "fold": node.fold}
    if isinstance(node, datetime.date | datetime.time):
        return {"$": type(node).__name__, "v": node.isoformat()}
    if isinstance(node, datetime.timedelta):
        return {"$": "timedelta", "v": [node.days, node.seconds, node.microseconds]}
    if isinstance(node, uuid.UUID | decimal.Decimal | fractions.Fraction):
        return {"$": type(node).__name__.lower(), "v": str(node)}
    if isinstance(node, range | slice):
        return {"$": type(node).__name__, "v": [node.start, node.stop, node.step]} if _plain_bounds(node) else None
    if isinstance(node, torch.dtype | torch.device | torch.memory_format | torch.layout):
        return {"$": "torch." + type(node).__name__, "v": str(node).removeprefix("torch.")}
    if isinstance(node, np.dtype):
        return None if node.hasobject or node.names else {"$": "np.dtype", "v": node.str}
    return None


def _plain(node: str | int) -> Json:
    return str.__str__(node) if isinstance(node, str) else int(node)


def _plain_bounds(node: range | slice) -> bool:
    return all(x is None or type(x) is int for x in (node.start, node.stop, node.step))


def open_container(node: Any) -> tuple[Sequence[Any], Sequence[Any], Wrap] | None:
    """Children of a container kind, their path keys, and how to wrap their encoded nodes; None if not a container.

    Plain dict, list and tuple are handled by the caller on its fast path.
    """
    if isinstance(node, dict):
        return _open_mapping(node)
    if isinstance(node, torch.Size):
        return [int(x) for x in node], range(len(node)), lambda c: {"$": "torch.Size", "items": c}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        fields = list(node._fields)
        name = type_name(type(node))
        return list(node), fields, lambda c: {"$": "namedtuple", "type": name, "fields": fields, "items": c}
    if isinstance(node, set | frozenset):
        kind = "set" if isinstance(node, set) else "frozenset"
        return list(node), range(len(node)), lambda c: {"$": kind, "items": c}
    if isinstance(node, collections.deque):
        maxlen = node.maxlen
        return list(node), range(len(node)), lambda c: {"$": "deque", "maxlen": maxlen, "items": c}
    if isinstance(node, argparse.Namespace | types.SimpleNamespace):
        kind = "namespace" if isinstance(node, argparse.Namespace) else "simplenamespace"
        return _fields(vars(node), {"$": kind})
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        values = {f.name: getattr(node, f.name) for f in dataclasses.fields(node) if hasattr(node, f.name)}
        return _fields(values, {"$": "dataclass", "type": type_name(type(node))})
    return _open_generator(node) or _open_omegaconf(node)


def _fields(values: dict[str, Any], head: dict[str, Json]) -> tuple[Sequence[Any], Sequence[Any], Wrap]:
    names = list(values)
    return list(values.values()), names, lambda c: {**head, "fields": dict(zip(names, c, strict=True))}


def _open_mapping(node: dict[Any, Any]) -> tuple[Sequence[Any], Sequence[Any], Wrap] | None:
    """Dict subclasses; keys travel as children too, so that any storable key works."""
    head: dict[str, Json]
    if isinstance(node, collections.defaultdict):
        factory = node.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and FACTORIES.get(name) is not factory:
            return None
        head = {"$": "defaultdict", "factory": name}
    elif isinstance(node, collections.Counter):
        head = {"$": "counter"}
    else:
        head = {"$": "mapping", "type": type_name(type(node))}
    keys, n = list(node), len(node)

    def wrap(children: list[Json]) -> Json:
        return {**head, "items": [[k, v] for k, v in zip(children[:n], children[n:], strict=True)]}

    return [*keys, *node.values()], [*(f"key {k!r}" for k in keys), *keys], wrap


def _open_generator(node: Any) -> tuple[Sequence[Any], Sequence[Any], Wrap] | None:
    """Random generators as objects: their stream position, not their identity."""
    if isinstance(node, torch.Generator):
        device = str(node.device)
        return [node.get_state()], ["state"], lambda c: {"$": "torch.Generator", "device": device, "state": c[0]}
    if isinstance(node, np.random.Generator):
        state: Any = node.bit_generator.state
        return [state], ["state"], lambda c: {"$": "np.Generator", "state": c[0]}
    if isinstance(node, np.random.RandomState):
        legacy: Any = node.get_state(legacy=False)
        return [legacy], ["state"], lambda c: {"$": "np.RandomState", "state": c[0]}
    if type(node) is random.Random:
        return [node.getstate()], ["state"], lambda c: {"$": "random.Random", "state": c[0]}
    return None


def _open_omegaconf(node: Any) -> tuple[Sequence[Any], Sequence[Any], Wrap] | None:
    if type(node).__module__.partition(".")[0] != "omegaconf":
        return None
    from omegaconf import Container, OmegaConf  # only reached when the user's state holds one

    if not isinstance(node, Container):
        return None
    flags = {"struct": OmegaConf.is_struct(node), "readonly": OmegaConf.is_readonly(node)}
    plain = OmegaConf.to_container(node, resolve=False)
    return [plain], ["container"], lambda c: {"$": "omegaconf", "flags": flags, "container": c[0]}
