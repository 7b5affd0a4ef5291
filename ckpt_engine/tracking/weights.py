"""What lies between the weights and states of a snapshot and those of live modules and optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch

from ckpt_engine.snapshot.sharding import here

_T = TypeVar("_T")


def with_tied(module: torch.nn.Module, values: Mapping[str, _T]) -> dict[str, _T]:
    """Values by name, those of tied weights under all of their names: other programs store them under one."""
    names: dict[tuple[int, torch.Size], list[str]] = {}
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, torch.Tensor) and not torch.nn.parameter.is_lazy(tensor) and tensor.numel():
            names.setdefault((here(tensor).data_ptr(), tensor.shape), []).append(name)
    found = dict(values)
    for tied in names.values():
        stored = next((name for name in tied if name in values), None)
        if stored is not None:
            found |= {name: found[stored] for name in tied if name not in values}
    return found


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
