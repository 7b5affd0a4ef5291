"""The state of an optimizer as empty tensors that are divided as its parameters are, to read a snapshot into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckpt_engine.restore.named import dtype_of
from ckpt_engine.snapshot.flat import FlatPart
from ckpt_engine.snapshot.sharding import is_sharded
from ckpt_engine.store.manifest import Entry


def optimizer_shell(
    optimizer: torch.optim.Optimizer,
    tree: Any,
    entries: Mapping[str, Entry],
    flat: Mapping[int, FlatPart] | None = None,
) -> dict[str, dict[Any, dict[str, Any]]]:
    """What of `optimizer.state_dict()` is divided over ranks.

    Before its first step an optimizer has no state that could be filled. Everything that is not of the shape of a
    parameter that is a DTensor (the count of steps) is left out: it is read as it is.

    Args:
        tree: the node of that state dict in a manifest; its states have the numbers of parameters, as torch's have.
        entries: of the manifest.
        flat: of parameters that are no DTensors but divided all the same, by their `id`.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parts = flat or {}
    found: dict[Any, dict[str, Any]] = {}
    for number, states in _pairs(tree.get("state")):
        if not isinstance(number, int) or number >= len(parameters):
            continue
        parameter = parts.get(id(parameters[number]), parameters[number])
        if not is_sharded(parameter):
            continue
        for name, node in _pairs(states):
            entry = entries.get(str(node.get("entry"))) if isinstance(node, dict) else None
            if entry is not None and entry.shape == tuple(parameter.shape):
                found.setdefault(number, {})[name] = _empty(parameter, dtype_of(entry.dtype))
    return {"state": found}


def _empty(parameter: Any, dtype: torch.dtype) -> Any:
    if isinstance(parameter, FlatPart):
        return parameter.like(torch.zeros_like(parameter.part, dtype=dtype))
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)


def _pairs(node: Any) -> Iterator[tuple[Any, Any]]:
    """Keys and nodes of a dict."""
    if isinstance(node, dict):
        yield from (map(tuple, node["items"]) if node.get("$") == "dict" else node.items())
