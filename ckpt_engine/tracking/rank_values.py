"""What one rank has otherwise than rank 0, whose values a snapshot has of all that is not divided among the ranks.

A callback of Lightning that looks at a metric of its own rank, averaged weights with the statistics of a batch norm, a
metric: each rank keeps its own beside its streams and positions. What is the same on all ranks is left out, and so is
what is large: of that a digest tells at the resume whether it was different.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

from ckpt_engine.audit.attributes import PLAIN, digest, freeze
from ckpt_engine.observe.resume_report import NotRestored
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.snapshot.flatten import Flattener, problems
from ckpt_engine.tracking.fsdp1 import clean_name
from ckpt_engine.tracking.parts import Parts

_DEEPEST = 64
_NUMBERS = ("param_groups", "params")
"""Where an optimizer's state has the numbers of its parameters."""
MOST_BYTES = 16 << 20
"""Of all tensors that a rank keeps for itself."""
LARGE_BYTES = 1 << 18
"""A tensor that is larger is not kept."""
_COMMON = "ckpt_engine: as on rank 0"
"""Stands for a value that is left out: alone, before its digest, or in a dict as the key of those digests."""
_ABSENT: Any = object()


def own_values(state: Mapping[str, Any], ranks: Ranks | None) -> dict[str, Any]:
    """What `merged` needs beside rank 0's `state`, for this rank's own component; copies nothing."""
    if ranks is None or ranks.rank == 0:
        return {}
    found = _Walk(ranks).kept(dict(state), ())
    return found if isinstance(found, dict) else {}


def merged(state: dict[str, Any], own: Mapping[str, Any]) -> list[NotRestored]:
    """Put this rank's values into the state as it was read; returns those that are rank 0's although they were not."""
    missing: list[NotRestored] = []
    if own:
        _merge(own, state, "", missing)
    return missing


def alike(parts: Parts) -> Callable[[tuple[Any, ...]], bool]:
    """Which arrays of a loop's components are the same on all ranks: parameters, and what optimizers know of them.

    All else, buffers too, may differ.
    """

    @cache
    def parameters(component: str) -> frozenset[str]:
        named = parts.modules[component].named_parameters(remove_duplicate=False)
        return frozenset(clean_name(name) for name, _ in named)

    def is_alike(path: tuple[Any, ...]) -> bool:
        if path[0] in parts.optimizers:
            return len(path) > 1 and path[1] == "state"
        return len(path) == 2 and path[0] in parts.modules and path[1] in parameters(path[0])

    return is_alike


class _Walk:
    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._left = MOST_BYTES
        self._flattener = Flattener()

    def kept(self, value: Any, path: tuple[Any, ...]) -> Any:
        """The value without what is common to all ranks."""
        if path and (self._ranks.divides(path) or len(path) > _DEEPEST or path[-3::2] == _NUMBERS):
            return _COMMON
        if isinstance(value, dict):
            return _dict_of({key: self.kept(one, (*path, key)) for key, one in value.items()})
        if type(value) in (list, tuple):
            found = [self.kept(one, (*path, index)) for index, one in enumerate(value)]
            return type(value)(found) if not found or any(one is not _COMMON for one in found) else _COMMON
        if isinstance(value, torch.Tensor | np.ndarray):
            return self._kept_of_array(value)
        return value if type(value) in PLAIN or problems(value, path, self._flattener) is None else _COMMON

    def _kept_of_array(self, value: Any) -> Any:
        if type(value) not in (torch.Tensor, torch.nn.Parameter, np.ndarray):
            return _COMMON  # each rank saves its part of it
        if isinstance(value, torch.Tensor) and (value.layout is not torch.strided or value.is_meta):
            return _COMMON
        if value.nbytes > min(LARGE_BYTES, self._left):
            return _COMMON + digest(freeze(value))
        self._left -= value.nbytes
        return value


def _dict_of(found: dict[Any, Any]) -> Any:
    common = {key: one for key, one in found.items() if _is_common(one)}
    if not common:
        return found
    digests = {key: one.removeprefix(_COMMON) for key, one in common.items() if one is not _COMMON}
    if len(common) == len(found) and not digests:
        return _COMMON
    return {_COMMON: digests, **{key: one for key, one in found.items() if key not in common}}


def _merge(own: Any, there: Any, where: str, missing: list[NotRestored]) -> Any:
    if _is_common(own):
        expected = own.removeprefix(_COMMON)
        if there is _ABSENT or (expected and digest(freeze(there)) != expected):
            why = f"it was not the same on all ranks, and is larger than {LARGE_BYTES} bytes: it is that of rank 0 now"
            missing.append(NotRestored(where, why))
        return None if there is _ABSENT else there
    if isinstance(own, dict):
        return _merge_dict(own, there, where, missing)
    if type(own) in (list, tuple):
        others = there if isinstance(there, list | tuple) else ()
        pairs = ((one, others[index] if index < len(others) else _ABSENT) for index, one in enumerate(own))
        return type(own)(_merge(*pair, f"{where}/{index}", missing) for index, pair in enumerate(pairs))
    return own


def _merge_dict(own: dict[Any, Any], there: Any, where: str, missing: list[NotRestored]) -> Any:
    others = there if isinstance(there, dict) else {}
    digests = own.get(_COMMON)
    found = dict(others) if digests is not None or not where else {}
    own = {**{key: _COMMON + one for key, one in (digests or {}).items()}, **own}
    for key, one in own.items():
        if key != _COMMON:
            found[key] = _merge(one, others.get(key, _ABSENT), f"{where}/{key}".removeprefix("/"), missing)
    if not isinstance(there, dict):
        return found
    there.clear()  # it keeps its class
    there.update(found)
    return there


def _is_common(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(_COMMON)
