"""Tells training from a look at the data: says when a gradient arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckpt_engine.tracking.parts import Parts, managed


class GradientWatch:
    """Hooks on the parameters that optimizers manage, from `install` to `remove`.

    Args:
        parts: of the run.
        arrived: called with every gradient, maybe on one of autograd's own threads.
    """

    def __init__(self, parts: Parts, arrived: Callable[[], None]) -> None:
        self._parts = parts
        self._arrived = arrived
        self._handles: list[Any] = []

    @property
    def installed(self) -> bool:
        return bool(self._handles)

    def install(self) -> None:
        """Start watching; harmless when installed already."""
        if self.installed:
            return

        def arrived(_: torch.Tensor) -> None:
            self._arrived()

        parameters: Any = managed(self._parts.optimizers.values())
        self._handles = [p.register_post_accumulate_grad_hook(arrived) for p in parameters if p.requires_grad]

    def remove(self) -> None:
        """Stop watching. Not from within a hook: autograd walks through them then."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
