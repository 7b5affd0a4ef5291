"""Put a snapshot into the user's live state, in place: find the live tensor of every entry, and copy what is left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckpt_engine.errors import MismatchError, StateError
from ckpt_engine.ranks.boxes import Box, boxes_of, runs
from ckpt_engine.restore.match import require_match, tensor_shapes
from ckpt_engine.restore.regions import Region
from ckpt_engine.snapshot.flat import FlatPart
from ckpt_engine.snapshot.flatten import MAX_DEPTH, show_path
from ckpt_engine.snapshot.sharding import is_sharded, local, shard_of
from ckpt_engine.snapshot.sharding import problem as sharding_problem
from ckpt_engine.store.manifest import Entry, Manifest
from ckpt_engine.store.tree import TreePath


def require_fit(into: Any, manifest: Manifest) -> None:
    """Raises where the snapshot has other tensors than `into`, but for components that are None there.

    Raises:
        MismatchError: names them.
        StateError: `into` is nested deeper than any state that can be saved.
    """
    # Deeper down a None may be what a fresh optimizer has, and what the snapshot has must not get lost.
    made = {str(key) for key, value in into.items() if value is None} if isinstance(into, Mapping) else set()
    found = {path: shape for path, shape in tensor_shapes(manifest).items() if path.split("/")[0] not in made}
    hint = "use the state this run was started with; None takes a component as it is read: into={..., 'rng': None}"
    require_match(_shapes(into), found, what="state", snapshot=manifest.info.id, hint=hint)


def _shapes(node: Any, path: TreePath = ()) -> dict[str, tuple[int, ...]]:
    """Shapes of the live tensors of a state, by "/"-joined path."""
    if len(path) > MAX_DEPTH:
        raise StateError(f"`into` is nested too deeply at {show_path(path[:8])}/… (does it contain itself?)")
    if isinstance(node, torch.Tensor | FlatPart):
        return {show_path(path) if path else "": tuple(node.shape)}
    if isinstance(node, Mapping):
        children = list(node.items())
    elif isinstance(node, list | tuple):
        children = list(enumerate(node))
    else:
        return {}
    found: dict[str, tuple[int, ...]] = {}
    for key, child in children:
        found.update(_shapes(child, (*path, key)))
    return found


@dataclass(frozen=True, slots=True)
class Targets:
    """The live tensors that take what is read without a second copy.

    Args:
        plain: by entry name those that take the bytes of an entry as they are.
        regions: parts of arrays: of DTensors, and of what DTensors were stored as.
        stored: of the entries of `regions` the boxes that they have one behind another.
        filled: what those entries are in the state.
    """

    plain: dict[str, torch.Tensor]
    regions: list[Region]
    stored: dict[str, tuple[Box, ...]]
    filled: dict[str, torch.Tensor]

    @property
    def live(self) -> dict[str, torch.Tensor]:
        """All of them by entry name."""
        return {**self.plain, **self.filled}


def live_targets(tree: Mapping[str, Any], into: Any, entries: Mapping[str, Entry]) -> Targets:
    """The live tensors for the entries of a tree.

    Left out: entries of tensors that are views, not C-contiguous when saved, or not in `into`; of plain tensors also
    those that are shared, of another dtype, on other devices than GPUs, or not C-contiguous.

    Raises:
        StateError: a live DTensor cannot be filled; names the entry.
    """
    uses: dict[str, list[tuple[Mapping[str, Any], Any]]] = {}
    if into is not None:
        _visit(tree[""] if list(tree) == [""] else dict(tree), into, uses)
    found = Targets({}, [], {}, {})
    for name, pairs in uses.items():
        node, live = pairs[0]
        if any(one["$"] == "sharded" or is_sharded(it) for one, it in pairs):
            regions = [_regions(name, entries[name], *pair) for pair in pairs]
            if all(region is not None for region in regions):
                found.regions.extend(one for region in regions if region is not None for one in region)
                found.stored[name] = boxes_of(node, entries[name].shape)
                found.filled[name] = live
        elif len(pairs) == 1 and "view" not in node and "stride" not in node and _takes_bytes(live, entries[name]):
            found.plain[name] = live
    return found


def _visit(node: Any, live: Any, uses: dict[str, list[tuple[Mapping[str, Any], Any]]]) -> None:
    """Collect by entry the nodes of tensors, each with what is at its place in the live state; None: nothing is."""
    children: Iterable[tuple[Any, Any]]
    if isinstance(node, list):
        children = enumerate(node)
    elif not isinstance(node, dict):
        return
    elif node.get("$") is None:
        children = node.items()
    elif node["$"] in ("tensor", "sharded"):
        uses.setdefault(node["entry"], []).append((node, live))
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
                _visit(child, live[key], uses)
        elif isinstance(live, list | tuple) and isinstance(key, int) and key < len(live):
            _visit(child, live[key], uses)


def _regions(name: str, entry: Entry, node: Mapping[str, Any], live: Any) -> list[Region] | None:
    """What of an entry a live tensor takes; None: it has to be read as it is first."""
    if "view" in node or "stride" in node or not isinstance(live, torch.Tensor | FlatPart):
        return None
    if tuple(live.shape) != entry.shape:
        return None
    if isinstance(live, FlatPart):
        return _runs(name, live)
    if not is_sharded(live):
        return [Region(name, Box.whole(entry.shape), live.detach())]
    return [Region(name, _box(name, live), local(live).detach())]


def _runs(name: str, live: FlatPart) -> list[Region]:
    """The boxes that a run of elements is, one behind another in its tensor."""
    (first,), (count,) = live.box.offsets, live.box.shape
    found, at, flat = [], 0, live.part.detach()
    for box in runs(live.shape, first, first + count):
        found.append(Region(name, box, flat[at : at + box.count].view(box.shape)))
        at += box.count
    return found


def _box(name: str, live: torch.Tensor) -> Box:
    problem = sharding_problem(live)
    if problem:
        raise StateError(f"cannot fill the DTensor for {name!r}: {problem}", hint="load without `into`")
    return shard_of(live).box


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


def copy_into(loaded: Any, into: Any, path: TreePath = ()) -> Any:
    """`loaded`, with every tensor replaced by the live tensor of `into` at the same place, which now has its values.

    Raises:
        MismatchError: the structures differ; names the path.
    """
    if into is None and len(path) == 1:
        return loaded
    where = "/".join(map(str, path)) or "(root)"
    if isinstance(into, FlatPart):
        if isinstance(loaded, torch.Tensor) and tuple(loaded.shape) == into.shape:
            (first,), (count,) = into.box.offsets, into.box.shape
            with torch.no_grad():
                into.part.copy_(loaded.reshape(-1)[first : first + count])
        elif loaded is not into:
            raise MismatchError(f"{where} is not a tensor of shape {list(into.shape)} in the snapshot, as in `into`")
        return into
    if isinstance(loaded, torch.Tensor):
        if not isinstance(into, torch.Tensor) or into.shape != loaded.shape:
            raise MismatchError(f"{where} is a tensor of shape {list(loaded.shape)} in the snapshot, not so in `into`")
        if is_sharded(into):
            if not is_sharded(loaded):  # else all live DTensors of that entry are filled
                with torch.no_grad():
                    local(into).copy_(loaded[_box(where, into).slices(Box.whole(loaded.shape))])
            return into
        if is_sharded(loaded):
            return into
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
