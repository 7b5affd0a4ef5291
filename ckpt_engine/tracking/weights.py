"""Finishes what a restore by `load_state_dict` leaves inexact in optimizer state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def into_own_memory(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Copy the state of optimizers out of the memory that the snapshot was read into.

    An optimizer keeps the tensors it is given. In that memory they are not aligned as torch aligns its own, which
    changes the last bit of sums and products that a library computes in aligned blocks (L-BFGS), and one of them would
    keep all of it.
    """
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                state[name] = own_copy(value)


def own_copy(value: Any) -> Any:
    """The value with every tensor in lists, tuples and dicts in memory of its own."""
    if isinstance(value, torch.Tensor):
        return value.clone() if value.device.type == "cpu" else value
    if type(value) in (list, tuple):
        return type(value)(own_copy(item) for item in value)
    if type(value) is dict:
        return {key: own_copy(item) for key, item in value.items()}
    return value
