"""Finds which entries of a snapshot an optimizer's parameter groups train.

It marks how far each group has come, too.

The writer compares the marks with the digests of what it has stored: see `writer.freshness`. Nothing waits for a
device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckpt_engine.copy.job import GroupMark, Layout, TrainedGroup
from ckpt_engine.probe.sample import chunk_of
from ckpt_engine.state.layout import CapturedState
from ckpt_engine.state.sharding import parts_of

_LOOKS = 16
"""At most so many parameters of a group are looked at for its mark."""


@dataclass(frozen=True, slots=True)
class _Followed:
    """A parameter group: its optimizer and itself by their numbers, and which parameters are looked at for its mark."""

    optimizer: int
    group: int
    places: Sequence[int]


class TrainedGroups:
    """The parameter groups of one run. Training thread only.

    Until the run names its optimizers, those that have made a step count.
    """

    def __init__(self) -> None:
        stepped = weakref.WeakSet[Optimizer]()
        self._named: Callable[[], Mapping[str, Optimizer]] = lambda: {
            f"{type(one).__name__} {number}": one for number, one in enumerate(stepped)
        }
        self._hook = register_optimizer_step_post_hook(lambda one, *_: stepped.add(one))
        self._plain: Layout | None = None
        self._form: list[Any] = []
        self._layout: Layout
        self._followed: Sequence[_Followed] = ()

    def name(self, optimizers: Callable[[], Mapping[str, Optimizer]]) -> None:
        """The optimizers of the run now, by name."""
        self._named = optimizers
        self.close()

    def close(self) -> None:
        """Follow no more steps. Idempotent."""
        self._hook.remove()

    def look(self, capture: CapturedState) -> tuple[Layout, tuple[GroupMark, ...]]:
        """The layout of the captured state with its groups, the same object while both stay; and how they are now."""
        # An optimizer within another one comes first, as the outer one has the same parameters.
        every = [(name, one) for name, outer in self._named().items() for one in (*vars(outer).values(), outer)]
        optimizers = [(name, one) for name, one in every if _is_ready(one)]
        form = [(name, weakref.ref(one), len(one.param_groups)) for name, one in optimizers]
        if capture.plan.layout is not self._plain or form != self._form:
            self._plain, self._form = capture.plan.layout, form
            groups, self._followed = _plan(optimizers, capture)
            self._layout = replace(self._plain, groups=groups)
        return self._layout, tuple([_mark_of(optimizers[one.optimizer][1], one) for one in self._followed])


def _is_ready(value: Any) -> bool:
    """Whether it is an optimizer that has its groups and states itself; a wrapper has those of another one."""
    return issubclass(type(value), Optimizer) and vars(value).keys() >= {"param_groups", "state"}


def _plan(
    optimizers: Sequence[tuple[str, Optimizer]], capture: CapturedState
) -> tuple[tuple[TrainedGroup, ...], list[_Followed]]:
    """The groups of which a snapshot has all weights, and where their marks are looked for."""
    drafts, addresses = capture.plan.drafts, capture.addresses
    arrays = ((i, one.name) for one in drafts for i in ((one.array,) if one.members is None else one.members.arrays))
    entries = {addresses[index]: name for index, name in arrays if index < len(addresses)}  # more are our own
    groups: dict[tuple[str, ...], TrainedGroup] = {}
    followed: list[_Followed] = []
    for which, (name, optimizer) in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            trained = [place for place, p in enumerate(group["params"]) if p.requires_grad and not is_lazy(p)]
            weights = _names([group["params"][place] for place in trained], entries)
            if not weights or weights in groups:
                continue
            known = {place: _known(optimizer, group["params"][place]) for place in trained}
            tensors = [one for each in known.values() for one in each if isinstance(one, torch.Tensor)]
            moments = _names([one for one in tensors if one.dim()], entries)
            counters = _names([one for one in tensors if not one.dim() and not one.is_cpu], entries)
            groups[weights] = TrainedGroup(f"group {number} of {name}", weights, moments, counters)
            used = [place for place in trained if known[place]] or trained
            followed.append(_Followed(which, number, used[:: -(-len(used) // _LOOKS)]))
    return tuple(groups.values()), followed


def _names(tensors: Iterable[torch.Tensor], entries: Mapping[int, str]) -> tuple[str, ...]:
    """The entries of these; none where one of them has none, as nothing is known of that one."""
    parts = [part for one in tensors for part in parts_of(one) if part.numel()]
    found = [entries.get(part.data_ptr() if part.layout is torch.strided else 0) for part in parts]
    return () if None in found else tuple(dict.fromkeys(filter(None, found)))


def _known(optimizer: Optimizer, parameter: Any) -> list[Any]:
    """What an optimizer knows of a parameter."""
    found = optimizer.state.get(parameter)
    return list(found.values()) if isinstance(found, dict) else []


def _mark_of(optimizer: Optimizer, followed: _Followed) -> GroupMark:
    weights, counts, moments = list[Any](), list[float](), list[Any]()
    group = optimizer.param_groups[followed.group]
    for place in followed.places:
        weights += _look(group["params"][place])
        for one in _known(optimizer, group["params"][place]):
            if isinstance(one, torch.Tensor) and (one.dim() or not one.is_cpu):
                moments += _look(one)
            elif isinstance(one, torch.Tensor | int | float):
                counts.append(float(one))
    return GroupMark(
        _trains(group.get("lr"), group.get("initial_lr", 0.0)),
        hash(repr((weights, counts, moments))),
        hash(repr(moments)),
    )


def _look(tensor: torch.Tensor) -> Iterator[tuple[int, bytes | None]]:
    """What shows that a tensor was changed: torch counts most changes, and words of host memory show the others."""
    return ((0 if one.is_inference() else one._version, chunk_of(one, 0)) for one in parts_of(tensor))


def _trains(rate: Any, at_first: Any) -> bool | None:
    """See `GroupMark`. Nothing waits for a device.

    Args:
        at_first: what a scheduler multiplies; nothing can be made of 0.
    """
    known = (one.is_cpu if isinstance(one, torch.Tensor) else isinstance(one, int | float) for one in (rate, at_first))
    return (bool(rate > 0) or (None if at_first > 0 else False)) if all(known) else None
