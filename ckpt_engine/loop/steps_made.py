"""Whose gradients have been used up since the boundary before."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from ckpt_engine.errors import ConfigError
from ckpt_engine.state.sharding import here

_Mark = tuple[torch.Tensor, "weakref.ref[torch.Tensor]", int]
"""A parameter, its gradient, and the version of that."""


class StepsMade(set[int]):
    """The optimizers, by id, that have used up their gradients since the last boundary.

    A backward pass behind the step leaves gradients that wait: of a loop that steps first, or one that trains a model
    through another (a GAN's generator through its discriminator). So do those that a loop does not clear before its
    next backward pass, once it has stepped with them again, and those that a step begins with before it runs its
    closure. At the first step of an optimizer all gradients are looked at; later the first and the last stand for all.
    Where a loop had cleared them at the last boundary, its next step does not touch them: if they are there at the next
    boundary after all, they wait.

    Args:
        optimizers: by name.
        uses_left: see `StepFence`.
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer], uses_left: Collection[int]) -> None:
        super().__init__()
        self._optimizers, self._uses_left = optimizers, uses_left
        self._marks: dict[int, list[_Mark]] = {}
        self._left: dict[int, list[_Mark]] = {}
        """The same of the last boundary, where the gradients were still there."""
        self._cleared: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        """The two parameters of those whose gradients were gone at the last boundary."""
        self._known: set[int] = set()
        self._reuse: set[int] = set()

    def mark(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped. Without a gradient it has used up nothing."""
        one, groups = id(optimizer), optimizer.param_groups
        if one in self._cleared:
            self.add(one)
            return
        ends = (iter, reversed) if one in self._known else ()
        found = [mark for way in ends for mark in islice(_graded(groups, way), 1)] or list(_graded(groups))
        self._known.add(one)
        for mark in self._left.pop(one, ()):
            if mark[0].grad is not None and mark[0].grad is mark[1]() and _version(mark[0].grad) != mark[2]:
                self._reuse.add(one)
        self._marks[one] = found
        (self.add if found else self.discard)(one)

    def reused(self) -> list[str]:
        """The optimizers whose gradients the loop does not clear before it adds to them."""
        return [name for name, one in self._optimizers.items() if id(one) in self._reuse]

    def expect(self, reused: Collection[str]) -> None:
        """What `reused` was in a snapshot."""
        self._reuse = {id(one) for name, one in self._optimizers.items() if name in reused}

    def look(self) -> None:
        """At a boundary: those whose gradients have changed since their step wait."""
        for one in self._cleared.keys() & self if self._cleared else ():
            if any((parameter := end()) is None or parameter.grad is not None for end in self._cleared[one]):
                self.discard(one)
                del self._cleared[one]
        for one, marks in self._marks.items():
            there = [mark for mark in marks if mark[0].grad is not None]
            if one in self._reuse or one in self._uses_left or any(map(_is_changed, there)):
                self.discard(one)
            elif there:
                self._left[one] = there
            elif marks:
                self._cleared[one] = [weakref.ref(end[0]) for end in (marks[0], marks[-1])]
        self._marks = {}


def _version(grad: torch.Tensor) -> int:
    return grad._version if type(grad) is torch.Tensor else here(grad)._version


def _is_changed(mark: _Mark) -> bool:
    grad = mark[0].grad
    return grad is None or grad is not mark[1]() or _version(grad) != mark[2]


def _graded(groups: Sequence[Mapping[str, Any]], way: Callable[[Any], Iterable[Any]] = iter) -> Iterator[_Mark]:
    """The parameters that have a gradient, from the beginning (`iter`) or from the end (`reversed`)."""
    every = (p for group in way(groups) for p in way(group["params"]))
    return ((p, weakref.ref(grad), _version(grad)) for p in every if (grad := p.grad) is not None)


def needs_optimizer(name: str) -> ConfigError:
    """Of a run whose weights an optimizer of torch changes that is not tracked.

    Args:
        name: how to track it.
    """
    return ConfigError(
        "track() needs the optimizer: its steps are the steps of the run",
        hint=f"track(model=model, optimizer={name}, loader=loader)",
    )
