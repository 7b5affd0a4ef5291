"""The fence at optimizer steps: lazily copied weights are read before any optimizer of the process changes them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ckpt_engine.snapshot.ownership import leavers

_log = logging.getLogger(__name__)

Fence = Callable[[], object]


class StepFence:
    """A process-wide hook on `torch.optim.Optimizer.step`, for steps that are not announced.

    Args:
        fence: waits for lazy copies; cheap where none is under way.

    With a closure the fence is put behind the closure, because torch's own optimizers run it before they change
    anything. An optimizer whose `step` is not torch's may change weights first, so there the fence comes before it.
    """

    def __init__(self, fence: Fence) -> None:
        self._fence = fence
        self._reported: set[type] = set()
        self._handle: RemovableHandle | None = None

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

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None or not self._runs_closure_first(optimizer):
            self._fence()
            return None

        def fenced() -> Any:
            result = closure()
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
            _log.info(
                "%s.%s has its own step(): snapshots are copied before its closure runs, not during it",
                kind.__module__,
                kind.__qualname__,
            )
        return False
