"""Finds which entries of a snapshot an optimizer's parameter groups train, and marks how far each group has come.

The writer compares the marks with the digests of what it has stored: see `writer.freshness`. Nothing is done in a step,
and nothing waits for a device.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ckpt_engine.copy.job import GroupMark, Layout, TrainedGroup
from ckpt_engine.probe.sample import chunk_of
from ckpt_engine.state.layout import CapturedState
from ckpt_engine.state.sharding import parts_of

_LOOKS = 64
"""About so many parameters of a run are looked at for its marks, and at least one of each group."""
_Place = tuple[weakref.ref[Optimizer], int, Sequence[int]]
"""An optimizer, the number of a group of it, and the places of the parameters there that are looked at."""


class TrainedGroups:
    """The parameter groups of one run. Training thread only.

    Attributes:
        named: the optimizers of the run now, by name; None: the first snapshot takes those of the process.
    """

    def __init__(self) -> None:
        self.named: Callable[[], Mapping[str, Optimizer]] | None = None
        self._known: tuple[Layout, list[Any]] | None = None
        self._layout: Layout
        self._places: Sequence[_Place] = ()

    def look(self, capture: CapturedState) -> tuple[Layout, tuple[GroupMark, ...]]:
        """The layout of the captured state with its groups, the same object while both stay; and how they are now."""
        self.named = self.named or _of_process()
        # An optimizer within another one comes first, as the outer one has the same parameters.
        every = [(name, one) for name, outer in self.named().items() for one in (*vars(outer).values(), outer)]
        optimizers = [(name, weakref.ref(one), len(one.param_groups)) for name, one in every if _is_ready(one)]
        known = capture.plan.layout, optimizers
        if self._known is None or self._known[0] is not known[0] or self._known[1] != optimizers:
            self._known = known
            groups, self._places = _plan(optimizers, _entries_by_address(capture))
            self._layout = replace(known[0], groups=groups)
        return self._layout, tuple(map(_mark_of, self._places))


def _of_process() -> Callable[[], Mapping[str, Optimizer]]:
    """The optimizers of a script that has named none, as long as they live."""
    found = weakref.WeakSet[Optimizer](filter(_is_ready, gc.get_objects()))
    return lambda: {f"{type(one).__name__} {number}": one for number, one in enumerate(found)}


def _is_ready(value: Any) -> bool:
    """Whether it is an optimizer that has its groups and states itself; a wrapper has those of another one."""
    return issubclass(type(value), Optimizer) and vars(value).keys() >= {"param_groups", "state"}


def _entries_by_address(capture: CapturedState) -> dict[int, str]:
    found = {}
    for draft in capture.plan.drafts:
        for index in (draft.array,) if draft.members is None else draft.members.arrays:
            if index < len(capture.addresses):  # else it is none of the state's
                found[capture.addresses[index]] = draft.name
    return found


def _plan(
    optimizers: Sequence[tuple[str, weakref.ref[Optimizer], int]], entries: Mapping[int, str]
) -> tuple[tuple[TrainedGroup, ...], list[_Place]]:
    """The groups of which a snapshot has all weights, and where their marks are looked for."""
    groups: dict[tuple[str, ...], TrainedGroup] = {}
    places: list[_Place] = []
    looks = max(1, _LOOKS // max(1, sum(count for *_, count in optimizers)))
    for name, ref, count in optimizers:
        for number in range(count):
            rows = list(_rows((ref, number, ())))
            weights = _names([p for _, p, _ in rows], entries)
            if not weights or weights in groups:
                continue
            tensors = [one for *_, known in rows for one in known if isinstance(one, torch.Tensor)]
            moments = _names([one for one in tensors if one.dim()], entries)
            counters = _names([one for one in tensors if not one.dim() and not one.is_cpu], entries)
            groups[weights] = TrainedGroup(f"group {number} of {name}", weights, moments, counters)
            used = [place for place, _, known in rows if known] or [place for place, *_ in rows]
            places.append((ref, number, used[:: -(-len(used) // looks)]))
    return tuple(groups.values()), places


def _rows(place: _Place) -> Iterator[tuple[int, Any, list[Any]]]:
    """The trainable parameters there, each with its place and what the optimizer knows of it; of no place all."""
    ref, number, chosen = place
    if (optimizer := ref()) is None:
        return
    params = optimizer.param_groups[number]["params"]
    for one in chosen or range(len(params)):
        if params[one].requires_grad and not is_lazy(params[one]):
            known = optimizer.state.get(params[one])
            yield one, params[one], list(known.values()) if isinstance(known, dict) else []


def _names(tensors: Iterable[torch.Tensor], entries: Mapping[int, str]) -> tuple[str, ...]:
    """The entries of these; none where one of them has none, as nothing is known of that one."""
    parts = [part for one in tensors for part in parts_of(one) if part.numel()]
    found = [entries.get(part.data_ptr() if part.layout is torch.strided else 0) for part in parts]
    return () if None in found else tuple(dict.fromkeys(filter(None, found)))


def _mark_of(place: _Place) -> GroupMark:
    weights, counts, moments = list[Any](), list[float](), list[Any]()
    for _, parameter, known in _rows(place):
        weights += _look(parameter)
        for one in known:
            if isinstance(one, torch.Tensor) and (one.dim() or not one.is_cpu):
                moments += _look(one)
            elif isinstance(one, torch.Tensor | int | float):
                counts.append(float(one))
    optimizer = place[0]()
    trains = optimizer is not None and _is_positive(optimizer.param_groups[place[1]].get("lr"))
    return GroupMark(trains, hash(repr((weights, counts, moments))), hash(repr(moments)))


def _look(tensor: torch.Tensor) -> Iterator[tuple[int, bytes | None]]:
    """What shows that a tensor was changed: torch counts most changes, and words of host memory show the others."""
    for part in parts_of(tensor):
        yield 0 if part.is_inference() else part._version, chunk_of(part, 0)


def _is_positive(rate: Any) -> bool:
    """Whether a learning rate is above 0, as far as that is known without a wait for a device."""
    is_known = rate.is_cpu if isinstance(rate, torch.Tensor) else isinstance(rate, int | float)
    return is_known and bool(rate > 0)
