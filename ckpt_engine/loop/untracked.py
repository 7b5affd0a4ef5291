"""Optimizers that change weights although no snapshot has their state."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Mapping

import torch

from ckpt_engine.loop.shape import Ask, Home, tensors_of


class UntrackedOptimizers:
    """Tells the steps of tracked optimizers from those of others, and names the others.

    Args:
        optimizers: those that are tracked.
        objects: whatever is tracked; of what wraps an optimizer nothing is said.

    Attributes:
        tracked_ids: of the tracked ones.
        stepped: others that have made a step since the last boundary, by id.
        problems: what was said of each other one, by its id; "": nothing.
    """

    def __init__(self, optimizers: Collection[torch.optim.Optimizer], objects: Iterable[object]) -> None:
        self._optimizers, self.tracked_ids = optimizers, frozenset(map(id, optimizers))
        self.stepped: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self.problems: dict[int, str] = {id(one): "" for one in objects}

    def tracked(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
        """The tracked optimizer whose step this one has made, which may have it inside; another is looked at later."""
        if id(optimizer) in self.tracked_ids:
            return optimizer
        if id(optimizer) not in self.problems:
            self.stepped[id(optimizer)] = weakref.ref(optimizer)
        return next((one for one in self._optimizers if any(each is optimizer for each in vars(one).values())), None)

    def look(self, home: Home, log: logging.Logger) -> None:
        """At a boundary: name those that take a state of their own to the next step.

        One whose state that of a tracked one has, as of a wrapper that has it inside, is part of that one.

        Args:
            home: of the loop.
            log: of the adapter.
        """
        while self.stepped:
            optimizer = self.stepped.popitem()[1]()
            if optimizer is None or not optimizer.state:
                continue
            if any(_has_state_of(one, optimizer) for one in self._optimizers):
                self.problems[id(optimizer)] = ""
            elif (name := Ask(home).name_of(optimizer)) is not None:
                self.problems[id(optimizer)] = problem = (
                    f"{name} ({type(optimizer).__name__}) makes steps, and no snapshot has its state: track it and the "
                    f"model whose weights it changes, as in track(…, {name.rpartition('.')[2]}={name})"
                )
                log.warning("%s", problem)


def unsaved_within(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, str]:
    """The optimizers within others whose state theirs does not have, by path, and what to do."""
    return {
        f"{name}.{attribute} ({type(inner).__name__})": "no snapshot has its state: let the outer one share its own"
        for name, outer in optimizers.items()
        for attribute, inner in vars(outer).items()
        if isinstance(inner, torch.optim.Optimizer) and inner.state and not _has_state_of(outer, inner)
    }


def _has_state_of(tracked: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Whether what `other` takes from step to step is in the state of a tracked one."""
    own = set(map(id, tensors_of(list(other.state.values()))))
    return tracked.state is other.state or own <= set(map(id, tensors_of(tracked.state_dict())))
