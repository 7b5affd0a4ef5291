"""The fence at optimizer steps: lazily copied weights are read before any optimizer of the process changes them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ckpt_engine.observe.events import LOG
from ckpt_engine.observe.run_times import hook_time
from ckpt_engine.snapshot.ownership import leavers

Fence = Callable[[], object]


@dataclass(eq=False)
class StepFence:
    """A process-wide hook on `torch.optim.Optimizer.step`, for steps that are not announced.

    Args:
        fence: waits for lazy copies; cheap where none is under way.

    Attributes:
        uses_left: by id, the optimizers in whose last step with a closure the gradients counted that the step before
            had left: they change weights ahead of the closure (SAM), or it was their first step.

    With a closure the fence is put behind the closure, because torch's own optimizers run it before they change
    anything. An optimizer whose `step` is not torch's may change weights first, so there the fence comes before it.
    """

    _fence: Fence
    uses_left: set[int] = field(default_factory=set, init=False)
    _stepped: weakref.WeakSet[torch.optim.Optimizer] = field(default_factory=weakref.WeakSet, init=False)
    _reported: set[type] = field(default_factory=set, init=False)
    _handle: RemovableHandle | None = field(default=None, init=False)

    def install(self) -> None:
        """Start watching; harmless when installed already."""
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._before_step)
            leavers.add(self)

    def remove(self) -> None:
        """Stop watching."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def leave_fork(self) -> None:
        """See `Leaver`: a fork has copies of the weights, and nothing copies them."""
        self.remove()

    @hook_time.counted
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        runs_first = closure is not None and self._runs_closure_first(optimizer)
        if not runs_first:
            self._fence()
        if closure is None:
            return None
        versions = _versions(optimizer)

        def fenced() -> Any:
            if not runs_first:
                uses = optimizer not in self._stepped or _versions(optimizer) != versions
                (self.uses_left.add if uses else self.uses_left.discard)(id(optimizer))
                self._stepped.add(optimizer)
            result = closure()
            if runs_first:
                self._fence()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": fenced}
        return (args[0], fenced, *args[2:]), kwargs

    def _runs_closure_first(self, optimizer: torch.optim.Optimizer) -> bool:
        kind = type(optimizer)
        if getattr(kind.step, "__module__", "").startswith("torch.optim"):
            return True
        if kind not in self._reported:
            self._reported.add(kind)
            LOG.info(
                "%s.%s has its own step(): snapshots are copied before its closure runs, not during it",
                kind.__module__,
                kind.__qualname__,
            )
        return False


def _versions(optimizer: torch.optim.Optimizer) -> list[int]:
    return [parameter._version for group in optimizer.param_groups for parameter in group["params"]]
