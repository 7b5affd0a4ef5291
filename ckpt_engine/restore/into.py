"""Put a loaded state into the user's live one, in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckpt_engine.errors import MismatchError
from ckpt_engine.restore.match import Path


def live_shapes(node: Any, path: Path = ()) -> dict[str, tuple[int, ...]]:
    """Shapes of the live tensors of a state, by "/"-joined path."""
    if isinstance(node, torch.Tensor):
        return {"/".join(map(str, path)): tuple(node.shape)}
    if isinstance(node, Mapping):
        children = list(node.items())
    elif isinstance(node, list | tuple):
        children = list(enumerate(node))
    else:
        return {}
    found: dict[str, tuple[int, ...]] = {}
    for key, child in children:
        found.update(live_shapes(child, (*path, key)))
    return found


def copy_into(loaded: Any, into: Any, path: Path = ()) -> Any:
    """`loaded`, with every tensor replaced by the live tensor of `into` at the same place, which now has its values.

    Raises:
        MismatchError: the structures differ; names the path.
    """
    where = "/".join(map(str, path)) or "(root)"
    if isinstance(loaded, torch.Tensor):
        if not isinstance(into, torch.Tensor) or into.shape != loaded.shape:
            raise MismatchError(f"{where} is a tensor of shape {list(loaded.shape)} in the snapshot, not so in `into`")
        with torch.no_grad():
            into.copy_(loaded)
        return into
    if isinstance(loaded, dict) and isinstance(into, Mapping):
        for key, value in loaded.items():
            loaded[key] = copy_into(value, into[key], (*path, key)) if key in into else value
        return loaded
    if isinstance(loaded, list | tuple) and isinstance(into, list | tuple) and len(loaded) == len(into):
        items = [copy_into(a, b, (*path, i)) for i, (a, b) in enumerate(zip(loaded, into, strict=True))]
        if isinstance(loaded, list):
            return items
        return type(loaded)(items) if type(loaded) is tuple else tuple.__new__(type(loaded), items)
    return loaded
