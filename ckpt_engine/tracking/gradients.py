"""Gradients: those that wait, as a snapshot stores them, and a watch that says when one arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckpt_engine.snapshot.sharding import divided_like, here
from ckpt_engine.tracking.parts import Parts, managed


def stored(gradient: torch.Tensor) -> Any:
    """A gradient as a tensor that a snapshot can hold, or the parts of a sparse one; of a DTensor what is here."""
    tensor = here(gradient)
    if tensor.layout is not torch.sparse_coo:
        return tensor
    # Values of the same place are not added up here: that would round in another order. torch documents these two
    # methods for tensors that are not coalesced.
    return {"indices": tensor._indices(), "values": tensor._values(), "coalesced": tensor.is_coalesced()}


def put_back(parameter: torch.nn.Parameter, saved: Any) -> None:
    """The inverse of `stored`."""
    if isinstance(saved, Mapping):
        indices, values = (saved[name].to(parameter.device, copy=True) for name in ("indices", "values"))
        shape = tuple(parameter.shape)
        parameter.grad = torch.sparse_coo_tensor(indices, values, shape, is_coalesced=saved["coalesced"])
    else:
        parameter.grad = divided_like(parameter, saved.to(parameter.device, copy=True))


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
