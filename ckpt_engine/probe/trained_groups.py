"""Finds which entries of a snapshot an optimizer's parameter groups train, and marks how far each group has come.

The writer compares the marks with the digests of what it has stored: see `writer.freshness`. Nothing is done in a step,
and nothing waits for a device.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
_SEARCHES = 4
"""Plans of snapshots that bring a search for the optimizers of a script, which has named none."""


@dataclass(frozen=True, slots=True)
class _Followed:
    """Group `number` of an optimizer, and the places of the parameters there that are looked at."""

    optimizer: weakref.ref[Optimizer]
    number: int
    places: Sequence[int]


class TrainedGroups:
    """The parameter groups of one run. Training thread only.

    Attributes:
        named: the optimizers of the run now, by name; None: those of the process are searched.
    """

    def __init__(self) -> None:
        self.named: Callable[[], Mapping[str, Optimizer]] | None = None
        self._found = weakref.WeakSet[Optimizer]()
        self._searches = _SEARCHES
        self._plain: Layout | None = None
        self._form: list[Any] = []
        self._layout: Layout
        self._followed: list[list[_Followed]] = []

    def layout(self, capture: CapturedState) -> Layout:
        """That of the captured state, with the groups; the same object while both stay."""
        is_new = capture.plan.layout is not self._plain
        optimizers = self._optimizers(is_new)
        form = [(id(one), [len(group["params"]) for group in one.param_groups]) for _, one in optimizers]
        if is_new or form != self._form:
            self._plain, self._form = capture.plan.layout, form
            self._layout = replace(self._plain, groups=self._plan(capture, optimizers))
        return self._layout

    def marks(self) -> tuple[GroupMark, ...]:
        """Of the groups of the last layout, now."""
        return tuple(map(_mark_of, self._followed))

    def _optimizers(self, is_new: bool) -> list[tuple[str, Optimizer]]:
        """Those of the run, and those that they hold."""
        if self.named is None and is_new and self._searches:
            self._searches -= 1
            self._found.update(filter(_is_ready, gc.get_objects()))
        outer = [(type(one).__name__, one) for one in self._found] if self.named is None else self.named().items()
        inner = [(name, held) for name, one in outer for held in vars(one).values()]
        return [(name, one) for name, one in (*outer, *inner) if _is_ready(one)]

    def _plan(self, capture: CapturedState, optimizers: Sequence[tuple[str, Optimizer]]) -> tuple[TrainedGroup, ...]:
        entries = _entries_by_address(capture)
        looks = max(1, _LOOKS // max(1, sum(len(one.param_groups) for _, one in optimizers)))
        groups: dict[tuple[str, ...], TrainedGroup] = {}
        followed: dict[tuple[str, ...], list[_Followed]] = {}
        for name, optimizer in optimizers:
            for number, group in enumerate(optimizer.param_groups):
                trained = [place for place, p in enumerate(group["params"]) if p.requires_grad and not is_lazy(p)]
                known = [one for place in trained for one in _known(optimizer, group["params"][place])]
                tensors = [one for one in known if isinstance(one, torch.Tensor)]
                weights = _names([group["params"][place] for place in trained], entries)
                if not weights:
                    continue
                moments = _names([one for one in tensors if one.dim()], entries)
                counters = _names([one for one in tensors if not one.dim() and not one.is_cpu], entries)
                same = groups.get(weights)  # of an optimizer that holds this one
                if same is not None:
                    moments, counters = (*same.moments, *moments), (*same.counters, *counters)
                groups[weights] = TrainedGroup(f"group {number} of {name}", weights, moments, counters)
                used = [place for place in trained if _known(optimizer, group["params"][place])] or trained
                places = used[:: -(-len(used) // looks)]
                followed.setdefault(weights, []).append(_Followed(weakref.ref(optimizer), number, places))
        self._followed = list(followed.values())
        return tuple(groups.values())


def _is_ready(value: Any) -> bool:
    """Whether it is an optimizer that has its groups and states itself; a wrapper has those of another one."""
    if not issubclass(type(value), Optimizer):
        return False
    return type(vars(value).get("param_groups")) is list and isinstance(vars(value).get("state"), dict)


def _entries_by_address(capture: CapturedState) -> dict[int, str]:
    found = {}
    for draft in capture.plan.drafts:
        for index in (draft.array,) if draft.members is None else draft.members.arrays:
            if index < len(capture.addresses):  # else it is none of the state's
                found[capture.addresses[index]] = draft.name
    return found


def _names(tensors: Sequence[torch.Tensor], entries: Mapping[int, str]) -> tuple[str, ...]:
    """The entries of these; none where one of them has none, as nothing is known of that one."""
    parts = [part for one in tensors for part in parts_of(one) if part.numel()]
    found = [entries.get(part.data_ptr() if part.layout is torch.strided else 0) for part in parts]
    return () if None in found else tuple(dict.fromkeys(filter(None, found)))


def _known(optimizer: Optimizer, parameter: Any) -> list[Any]:
    """What an optimizer knows of a parameter."""
    found = optimizer.state.get(parameter)
    return list(found.values()) if isinstance(found, dict) else []


def _mark_of(followed: Sequence[_Followed]) -> GroupMark:
    weights, counts, moments, rates = list[Any](), list[Any](), list[Any](), list[Any]()
    for one in followed:
        optimizer = one.optimizer()
        if optimizer is None:
            return GroupMark(False, 0, 0)
        group = optimizer.param_groups[one.number]
        rates.append(group.get("lr"))
        for place in one.places:
            weights += _look(group["params"][place])
            for value in _known(optimizer, group["params"][place]):
                if isinstance(value, torch.Tensor) and (value.dim() or not value.is_cpu):
                    moments += _look(value)
                elif isinstance(value, torch.Tensor | int | float):
                    counts.append(float(value))
    return GroupMark(all(map(_is_positive, rates)), hash(repr((weights, counts, moments))), hash(repr(moments)))


def _look(tensor: torch.Tensor) -> Iterator[tuple[int, bytes | None]]:
    """What shows that a tensor was changed: torch counts most changes, and words of host memory show the others."""
    for part in parts_of(tensor):
        yield 0 if part.is_inference() else part._version, chunk_of(part, 0)


def _is_positive(rate: Any) -> bool:
    """Whether a learning rate is above 0, as far as that is known without a wait for a device."""
    is_known = rate.is_cpu if isinstance(rate, torch.Tensor) else isinstance(rate, int | float)
    return is_known and bool(rate > 0)
