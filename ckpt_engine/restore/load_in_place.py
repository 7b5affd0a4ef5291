"""Puts a snapshot into the user's live state, in place.

Any number of ranks reads what any other has written. Host tensors are read directly, device tensors through page-locked
memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckpt_engine.errors import MismatchError, StateError
from ckpt_engine.ranks.boxes import Box, boxes_of, runs
from ckpt_engine.restore.array_regions import ArrayRegion, read_regions
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.restore.device_copies import fill
from ckpt_engine.state.sharding import FlatPart, is_sharded, local, shard_of
from ckpt_engine.state.sharding import problem as sharding_problem
from ckpt_engine.state.wrapped import Wrapped
from ckpt_engine.store.manifest import Entry, Manifest
from ckpt_engine.store.tree import TreePath, keyed


def fill_live(
    sources: Sources, manifest: Manifest, into: Any
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor], int]:
    """Fill what of the live state `into` takes entries without a second copy: by entry name.

    Left out: entries of tensors that are views, not C-contiguous when saved, or not in `into`; of plain tensors also
    those that are shared, of another dtype, on other devices than GPUs, or not C-contiguous.

    Returns:
        What is filled; what of it is as it is to be in the state; and bytes as of `read_regions`.

    Raises:
        StateError: a live DTensor cannot be filled; names the entry.
        CorruptError, NewerFormatError, StorageError: as `read_moves`.
    """
    tree, entries = manifest.tree, manifest.entries
    uses: dict[str, list[tuple[Mapping[str, Any], Any]]] = {}
    _visit(tree[""] if list(tree) == [""] else dict(tree), into, uses)
    plain: dict[str, torch.Tensor] = {}  # they take the bytes of an entry as they are
    parts: list[ArrayRegion] = []  # of arrays: of DTensors, and of what DTensors were stored as
    stored: dict[str, tuple[Box, ...]] = {}  # the boxes that the entries of parts have one behind another
    whole: dict[str, torch.Tensor] = {}  # what those entries are in the state
    for name, pairs in uses.items():
        node, live = pairs[0]
        if any(one["$"] == "sharded" or is_sharded(it) for one, it in pairs):
            regions = [_regions(name, entries[name], *pair) for pair in pairs]
            if all(region is not None for region in regions):
                parts.extend(one for region in regions if region is not None for one in region)
                stored[name] = boxes_of(node, entries[name].shape)
                whole[name] = live
        elif len(pairs) == 1 and "view" not in node and "stride" not in node and _takes_bytes(live, entries[name]):
            plain[name] = live
    fill(sources, manifest, plain)
    unverified_bytes = read_regions(sources, manifest, parts, stored)
    return {**plain, **whole}, whole, unverified_bytes


def _visit(node: Any, live: Any, uses: dict[str, list[tuple[Mapping[str, Any], Any]]]) -> None:
    """Collect by entry the nodes of tensors, each with what is at its place in the live state; None: nothing is."""
    if isinstance(node, dict) and node.get("$") in ("tensor", "sharded"):
        uses.setdefault(node["entry"], []).append((node, live))
    for key, child in keyed(node):
        if isinstance(live, Mapping):
            if key in live:
                _visit(child, live[key], uses)
        elif isinstance(live, list | tuple) and isinstance(key, int) and key < len(live):
            _visit(child, live[key], uses)


def _regions(name: str, entry: Entry, node: Mapping[str, Any], live: Any) -> list[ArrayRegion] | None:
    """What of an entry a live tensor takes; None: it has to be read as it is first."""
    is_plain = "view" not in node and "stride" not in node
    if not (is_plain and isinstance(live, torch.Tensor | FlatPart) and tuple(live.shape) == entry.shape):
        return None
    if isinstance(live, FlatPart):
        return _runs(name, live)
    if not is_sharded(live):
        return [ArrayRegion(name, Box.whole(entry.shape), live.detach())]
    return [ArrayRegion(name, _box(name, live), local(live).detach())]


def _runs(name: str, live: FlatPart) -> list[ArrayRegion]:
    """The boxes that a run of elements is, one behind another in its tensor."""
    (first,), (count,) = live.box.offsets, live.box.shape
    found, at, flat = [], 0, live.part.detach()
    for box in runs(live.shape, first, first + count):
        found.append(ArrayRegion(name, box, flat[at : at + box.count].view(box.shape)))
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


def copy_into(loaded: Any, into: Any) -> Any:
    """`loaded`, with every tensor replaced by the live tensor of `into` at the same place, which now has its values.

    Raises:
        MismatchError: the structures differ; names the path.
    """
    with torch.no_grad():
        return _copy_into(loaded, into, ())


def _copy_into(loaded: Any, into: Any, path: TreePath) -> Any:
    if into is None and len(path) == 1:
        return loaded
    if isinstance(loaded, Wrapped):
        loaded.fill(into)
        return into
    where = "/".join(map(str, path)) or "(root)"
    if isinstance(into, FlatPart):
        if isinstance(loaded, torch.Tensor) and tuple(loaded.shape) == into.shape:
            (first,), (count,) = into.box.offsets, into.box.shape
            into.part.copy_(loaded.reshape(-1)[first : first + count])
        elif loaded is not into:
            raise MismatchError(f"{where} is not a tensor of shape {list(into.shape)} in the snapshot, as in `into`")
        return into
    if isinstance(loaded, torch.Tensor):
        if not isinstance(into, torch.Tensor) or into.shape != loaded.shape:
            raise MismatchError(f"{where} is a tensor of shape {list(loaded.shape)} in the snapshot, not so in `into`")
        if not is_sharded(loaded):  # else all live tensors of that entry are filled
            if is_sharded(into):
                local(into).copy_(loaded[_box(where, into).slices(Box.whole(loaded.shape))])
            elif into.data_ptr() != loaded.data_ptr() or into.stride() != loaded.stride():
                into.copy_(loaded)
        return into
    if isinstance(loaded, dict) and isinstance(into, Mapping):
        for key, value in loaded.items():
            loaded[key] = _copy_into(value, into[key], (*path, key)) if key in into else value
        return loaded
    if isinstance(loaded, list | tuple) and isinstance(into, list | tuple) and len(loaded) == len(into):
        items = [_copy_into(a, b, (*path, i)) for i, (a, b) in enumerate(zip(loaded, into, strict=True))]
        if isinstance(loaded, list):
            return items
        return type(loaded)(items) if type(loaded) in (tuple, torch.Size) else tuple.__new__(type(loaded), items)
    return loaded
