"""Values that people pass where a number, a text or a path belongs, and some that make no sense."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import math
import pathlib
import types
import uuid
from typing import Any

import numpy as np
import torch

HUGE = 10**4400
"""More digits than Python turns into a text."""
LONE = "a\ud800b"
"""Half of a surrogate pair: a text that has no bytes in UTF-8."""


class Level(enum.IntEnum):
    ONE = 1


class Colour(enum.Enum):
    RED = "red"


class Spiteful:
    """A number by its methods, which raise unexpected exceptions."""

    def __float__(self) -> float:
        raise ZeroDivisionError("no")

    def __index__(self) -> int:
        raise KeyError("no")

    def __fspath__(self) -> str:
        raise OSError("no")

    def __repr__(self) -> str:
        return "Spiteful()"


def cyclic() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["self"] = found
    return found


def nested(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = collections.OrderedDict(a=(found,))
    return found


WHOLE: dict[str, Any] = {
    "int": 3,
    "float": 3.0,
    "IntEnum": Level.ONE,
    "Fraction": fractions.Fraction(6, 2),
    "Decimal": decimal.Decimal(3),
    "np.array": np.array(3),
    "np.array[1]": np.array([3]),
    "tensor": torch.tensor(3),
    "tensor[1]": torch.tensor([3]),
    "Parameter": torch.nn.Parameter(torch.tensor(3.0)),
    **{f"np.{kind}": getattr(np, kind)(3) for kind in ("int8", "uint8", "int64", "uint64", "float16", "float32")},
    "np.float64": np.float64(3),
    "np.longdouble": np.longdouble(3),
    **{
        f"torch.{kind}": torch.tensor(3, dtype=getattr(torch, kind))
        for kind in ("uint8", "int8", "int16", "int32", "float16", "bfloat16", "float64", "float8_e4m3fn", "uint16")
    },
}
"""Whole numbers of any make."""

REAL: dict[str, Any] = {
    "fraction of float": 0.5,
    "negative": -1,
    "NaN": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "True": True,
    "np.bool": np.bool_(True),
    "torch.bool": torch.tensor(True),
    "half": torch.tensor(0.5, dtype=torch.bfloat16),
    "np.nan": np.float32("nan"),
    "Decimal NaN": decimal.Decimal("NaN"),
    "above": 2**53 + 2,
    "int of 300 digits": 10**300,
    "third": fractions.Fraction(1, 3),
    "nearly nothing": fractions.Fraction(1, 10**4000),
    "nearly three": decimal.Decimal("3.00000000000000000000000000001"),
}
"""Numbers that are no steps."""

TEXTS: dict[str, Any] = {
    "text": "val/loss ü",
    "np.str": np.str_("text"),
    "empty": "",
    "Path": pathlib.Path("/data/run"),
    "PurePath": pathlib.PurePosixPath("a/b"),
    "nul": "a\0b",
    "emoji": "\U0001f600",
    "long": "x" * 100_000,
}

ABSURD: dict[str, Any] = {
    "None": None,
    "lone surrogate": LONE,
    "path with a lone surrogate": pathlib.Path(LONE),
    "huge": HUGE,
    "minus huge": -HUGE,
    "sNaN": decimal.Decimal("sNaN"),
    "complex": 1 + 2j,
    "np.complex": np.complex64(1),
    "torch.complex": torch.tensor(1 + 0j),
    "bytes": b"\xff",
    "object": object(),
    "function": print,
    "class": dict,
    "module": math,
    "set": {1},
    "frozenset": frozenset("a"),
    "generator": (n for n in ()),
    "range": range(3),
    "enum": Colour.RED,
    "datetime": datetime.datetime(2020, 1, 1),
    "timedelta": datetime.timedelta(seconds=1),
    "np.timedelta64": np.timedelta64(1, "s"),
    "np.datetime64": np.datetime64("2020-01-01"),
    "np.void": np.zeros(1, dtype=[("a", "i4")])[0],
    "np objects": np.array([object()]),
    "UUID": uuid.UUID(int=1),
    "array of two": np.zeros(2),
    "empty array": np.zeros(0),
    "tensor of two": torch.zeros(2),
    "empty tensor": torch.zeros(0),
    "meta tensor": torch.zeros((), device="meta"),
    "sparse tensor": torch.zeros(2).to_sparse(),
    "namespace": argparse.Namespace(a=1),
    "simple namespace": types.SimpleNamespace(a=1),
    "spiteful": Spiteful(),
    "cyclic": cyclic(),
    "list": [1, "a"],
    "tuple": (1, 2),
    "dict": {"a": 1},
    "dict with other keys": {1: 2},
    "dict with a lone surrogate": {LONE: 1},
    "deep": nested(300),
}

ALL: dict[str, Any] = {**WHOLE, **REAL, **TEXTS, **ABSURD}
