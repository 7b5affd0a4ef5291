"""Put a snapshot into the user's live state, in place: find the live tensor of every entry, and copy what is left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ckpt_engine.errors import MismatchError
from ckpt_engine.restore.match import Path
from ckpt_engine.store.manifest import Entry


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


def live_targets(tree: Mapping[str, Any], into: Any, entries: Mapping[str, Entry]) -> dict[str, torch.Tensor]:
    """The live tensor that can take the bytes of an entry as they are, by entry name.

    Left out: entries of tensors that are shared, views, of another dtype, on other devices than GPUs, or not
    C-contiguous.
    """
    found: dict[str, torch.Tensor] = {}
    uses: dict[str, int] = {}

    def visit(node: Any, live: Any) -> None:
        children: Iterable[tuple[Any, Any]]
        if isinstance(node, list):
            children = enumerate(node)
        elif not isinstance(node, dict):
            return
        elif node.get("$") is None:
            children = node.items()
        elif node["$"] == "tensor":
            name = node["entry"]
            uses[name] = uses.get(name, 0) + 1
            if "view" not in node and "stride" not in node and _takes_bytes(live, entries[name]):
                found[name] = live
            return
        elif node["$"] in ("dict", "odict"):
            children = ((key, child) for key, child in node["items"] if not isinstance(key, dict | list))
        elif node["$"] == "tuple":
            children = enumerate(node["items"])
        else:
            return
        for key, child in children:
            if isinstance(live, Mapping):
                if key in live:
                    visit(child, live[key])
            elif isinstance(live, list | tuple) and isinstance(key, int) and key < len(live):
                visit(child, live[key])

    visit(tree[""] if list(tree) == [""] else dict(tree), into)
    return {name: live for name, live in found.items() if uses[name] == 1}


def _takes_bytes(live: Any, entry: Entry) -> bool:
    return (
        isinstance(live, torch.Tensor)
        and live.device.type in ("cpu", "cuda")
        and str(live.dtype) == f"torch.{entry.dtype}"
        and tuple(live.shape) == entry.shape
        and live.is_contiguous()
        and not live.is_conj()
        and not live.is_neg()
    )


def copy_into(loaded: Any, into: Any, path: Path = ()) -> Any:
    """`loaded`, with every tensor replaced by the live tensor of `into` at the same place, which now has its values.

    Raises:
        MismatchError: the structures differ; names the path.
    """
    where = "/".join(map(str, path)) or "(root)"
    if isinstance(loaded, torch.Tensor):
        if not isinstance(into, torch.Tensor) or into.shape != loaded.shape:
            raise MismatchError(f"{where} is a tensor of shape {list(loaded.shape)} in the snapshot, not so in `into`")
        if into.data_ptr() != loaded.data_ptr() or into.stride() != loaded.stride():
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
