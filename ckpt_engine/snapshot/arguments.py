"""What callers pass beside the state, as plain values: what means a number, a text or a path becomes one.

Everything else is refused here, at the call: what comes later only sees values that every manifest can hold. Pure
functions; each error names the argument and the leaf in it.
"""

from __future__ import annotations

import decimal
import enum
import fractions
import math
import numbers
import operator
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

import numpy as np
import torch

from ckpt_engine.errors import ArgumentError
from ckpt_engine.state.json_types import problem_of

MOST = 1 << 53
"""Of steps and epochs: the largest whole number that every reader of JSON has exactly."""
_MOST_DEPTH = 64
_NO_NUMBERS = "cmMSUO"
"""Kinds of numpy dtypes whose elements mean no real number, though some of them convert."""


def plain_number(value: Any) -> bool | int | float:
    """The number that `value` means: a number of Python, numpy or torch, or an array with a single element.

    Raises:
        ValueError: it means none, or none that fits; says why.
    """
    kind = f"a {type(value).__qualname__}"
    try:
        if isinstance(value, np.ndarray | np.generic):
            if value.size != 1 or value.dtype.kind in _NO_NUMBERS or value.dtype.names:
                raise ValueError(f"{kind} of {value.size} elements of {value.dtype} is no number")
            value = value.item() if value.dtype.kind in "biuf" else float(value)
        elif isinstance(value, torch.Tensor):
            if value.numel() != 1 or value.is_complex():
                raise ValueError(f"{kind} of {value.numel()} elements of {value.dtype} is no number")
            value = value.item()
        if isinstance(value, bool):
            return value
        if hasattr(type(value), "__index__"):
            return int(operator.index(value))
        if isinstance(value, numbers.Real | decimal.Decimal) or hasattr(type(value), "__float__"):
            return float(value)
    except ValueError:
        raise
    except Exception as err:  # of a class of the user's: whatever it raises, it is no number
        raise ValueError(f"{kind} gives no number: {type(err).__name__}: {err}") from err
    raise ValueError(f"{kind} is no number")


def whole_number(name: str, value: Any) -> int:
    """`value` as a count, such as a step.

    Raises:
        ArgumentError: it is none, or above `MOST`.
    """
    try:
        found = plain_number(value)
    except ValueError as err:
        raise ArgumentError(f"{name} must be a whole number: {err}") from err
    exact = value if isinstance(value, fractions.Fraction | decimal.Decimal) else found
    if isinstance(found, bool) or not 0 <= found <= MOST or exact != int(found):
        shown = f"one of {found.bit_length()} bits" if isinstance(found, int) and abs(found) > MOST else exact
        raise ArgumentError(f"{name} must be a whole number from 0 to 2**53, not {shown}")
    return int(found)


def of_load(step: Any, into: Any, live: Any, check: Any) -> tuple[int | None, Any, Any]:
    """The arguments that say which snapshot is to be found, and how it is read.

    Raises:
        ArgumentError: one of them cannot be used.
    """
    if callable(getattr(into, "state_dict", None)):
        raise ArgumentError(
            f"into is a {type(into).__name__}, not its state",
            hint="into={'model': model.state_dict()}, as it was saved",
        )
    found = None if step is None else whole_number("step", step)
    return found, function("live", live), function("check", check)


def seconds(timeout: Any, otherwise: float) -> float:
    """`timeout` as a time to wait: at least 0, and no more than a lock can be waited for; `otherwise` where it is None.

    Raises:
        ArgumentError: it is none.
    """
    if timeout is None:
        return otherwise
    try:
        found = float(plain_number(timeout))
    except (ValueError, OverflowError) as err:
        raise ArgumentError(f"timeout must be a number of seconds, or None: {err}") from err
    if math.isnan(found):
        raise ArgumentError(f"timeout must be a number of seconds, or None, not {found}")
    return min(max(found, 0.0), threading.TIMEOUT_MAX / 2)


def flag(name: str, value: Any) -> bool:
    """`value` as True or False.

    Raises:
        ArgumentError: it is neither.
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise ArgumentError(f"{name} must be True or False, not a {type(value).__qualname__}")


def function(name: str, value: Any) -> Any:
    """`value`, a function or None.

    Raises:
        ArgumentError: it cannot be called.
    """
    if value is None or callable(value):
        return value
    raise ArgumentError(f"{name} must be a function, or None, not a {type(value).__qualname__}")


def text(name: str, value: Any) -> str:
    """`value` as a text.

    Raises:
        ArgumentError: it is none, or has no bytes in UTF-8.
    """
    if not isinstance(value, str):
        raise ArgumentError(f"{name} must be a text, not a {type(value).__qualname__}")
    plain = str.__str__(value)
    _require(name, plain)
    return plain


def metrics(value: Any) -> dict[str, float]:
    """`value` as numbers by name; NaN and infinity are numbers, truth values are 1 and 0. None: none.

    Raises:
        ArgumentError: it is no mapping, or one of its values is no number; names it.
    """
    found: dict[str, float] = {}
    for key, one in _items("metrics", value):
        try:
            found[key] = float(plain_number(one))
        except (ValueError, OverflowError) as err:
            raise ArgumentError(f"metrics/{key} must be a number: {err}", hint="notes take texts and lists") from err
    return found


class Metrics(dict[str, float]):
    """Numbers by name: what means a number becomes one, and the rest is refused where it is put in.

    Raises:
        ArgumentError: at each change, as `metrics`.
    """

    def __init__(self, *values: Any, **more: Any) -> None:
        super().__init__(metrics(dict(*values, **more)))

    def __setitem__(self, key: str, value: Any) -> None:
        super().update(metrics({key: value}))

    def setdefault(self, key: str, default: Any = None) -> float:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *values: Any, **more: Any) -> None:
        super().update(metrics(dict(*values, **more)))

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc]
        self.update(other)
        return self


def numbers_among(values: Mapping[str, Any], most: int | None = None) -> dict[str, float]:
    """The values that `metrics` takes, `most` of them, of a trainer that reports other things among them."""
    found: dict[str, float] = {}
    for key, one in values.items():
        if len(found) == most:
            break
        with suppress(ArgumentError):
            found |= metrics({key: one})
    return found


def notes(value: Any) -> dict[str, Any]:
    """`value` as JSON that a manifest can hold: numbers as `plain_number`, paths as texts, tuples as lists. None: none.

    Raises:
        ArgumentError: it is no mapping, or something in it is not JSON; names it.
    """
    return {key: _json(f"notes/{key}", one, 1) for key, one in _items("notes", value)}


def _items(name: str, value: Any) -> list[tuple[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{name} must be a mapping of texts to values, not a {type(value).__qualname__}")
    return [(text(f"a key of {name}", key), one) for key, one in value.items()]


def _json(name: str, value: Any, depth: int) -> Any:
    if depth > _MOST_DEPTH:
        raise ArgumentError(f"{name[:200]} is nested deeper than {_MOST_DEPTH} levels (does it contain itself?)")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(name, value)
    if isinstance(value, Mapping):
        return {key: _json(f"{name}/{key}", one, depth + 1) for key, one in _items(name, value)}
    if isinstance(value, list | tuple):
        return [_json(f"{name}/{index}", one, depth + 1) for index, one in enumerate(value)]
    if isinstance(value, enum.Enum) and not isinstance(value, int | float):
        raise ArgumentError(f"{name} is an enum member, which is not JSON", hint="pass its name or its value")
    try:
        found = _path_text(value) if isinstance(value, os.PathLike) else plain_number(value)
    except ValueError as err:
        raise ArgumentError(f"{name} is not JSON: {err}", hint=_instead_of(value)) from err
    if isinstance(value, os.PathLike):
        return text(name, found)
    if isinstance(found, float) and not math.isfinite(found):
        raise ArgumentError(f"{name} is {found}, which is not JSON", hint="metrics take it; or pass it as a text")
    _require(name, found)
    return found


def _path_text(path: os.PathLike[Any]) -> Any:
    try:
        return os.fspath(path)
    except Exception as err:
        raise ValueError(f"a {type(path).__qualname__} gives no path: {type(err).__name__}: {err}") from err


def _instead_of(value: Any) -> str:
    if isinstance(value, set | frozenset):
        return "sorted(...) makes a list of it"
    if isinstance(value, np.ndarray | torch.Tensor):
        return ".tolist() makes a list of it"
    return "pass texts, numbers, lists and mappings, or put it into the state"


def _require(name: str, plain: Any) -> None:
    problem = problem_of(plain)
    if problem is not None:
        raise ArgumentError(f"{name.encode(errors='backslashreplace').decode()} cannot be stored: {problem}")
