"""Compares what a snapshot has with the objects that take it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_engine.errors import MismatchError, ResumeError
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.tree import TreePath, keyed

TensorShapes = Mapping[str, tuple[int, ...]]

_SHOWN = 8
_SAME = "use the model this run was started with, or another folder for the new model"
_PRUNED = (
    "pruning has renamed its weights, and a pruned run is not resumed: start in another folder, from `ckpt export`"
)
ANY_SHAPE = (-1,)
"""Of a lazy weight (its first forward would make it, or loading does) and of a pickled one. It may be missing."""


def tensor_shapes(manifest: Manifest, root: TreePath = ()) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensor leaves below `root`, by their "/"-joined path relative to it."""
    entries = manifest.entries
    return {
        "/".join(map(str, path[len(root) :])): tuple(node.get("view", {}).get("shape", entries[node["entry"]].shape))
        for path, node in tensor_nodes(manifest)
        if path[: len(root)] == root
    }


def require_match(expected: TensorShapes, found: TensorShapes, *, what: str, snapshot: str, hint: str = _SAME) -> None:
    """Raise if tensors are missing, unexpected or of another shape.

    Args:
        what: whose tensors these are ("model", "state"), for the message.
        snapshot: id, for the message.
        hint: what to do about it.

    Raises:
        MismatchError: names the keys, and near misses.
    """
    missing = [k for k in expected if k not in found and expected[k] != ANY_SHAPE]
    unexpected = [k for k in found if k not in expected]
    reshaped = [k for k in expected if k in found and tuple(expected[k]) not in (tuple(found[k]), ANY_SHAPE)]
    if not (missing or unexpected or reshaped):
        return
    lines = [f"snapshot {snapshot} does not fit this {what}:"]
    lines += _section("missing in the snapshot", [_near(k, unexpected) for k in missing])
    lines += _section(f"not in this {what}", unexpected)
    lines += _section("other shape", [f"{k}: {list(found[k])} saved, {list(expected[k])} here" for k in reshaped])
    if any(name.endswith("_orig") and name.removesuffix("_orig") in missing for name in unexpected):
        hint = _PRUNED
    raise MismatchError(*lines, "", hint=hint)


def _near(key: str, others: list[str]) -> str:
    close = difflib.get_close_matches(key, others, 1, cutoff=0.8)
    return f"{key} (similar: {close[0]})" if close else key


def _section(title: str, keys: list[str]) -> list[str]:
    if not keys:
        return []
    more = [f"    … and {len(keys) - _SHOWN} more"] if len(keys) > _SHOWN else []
    return [f"  {title} ({len(keys)}):", *(f"    {k}" for k in keys[:_SHOWN]), *more]


def tensor_nodes(manifest: Manifest) -> Iterator[tuple[TreePath, Mapping[str, Any]]]:
    """The nodes of all tensors, each with its path in the state."""
    tree = manifest.tree
    roots = [((), tree[""])] if list(tree) == [""] else [((key,), node) for key, node in tree.items()]
    for path, node in roots:
        yield from _walk(node, path)


def _walk(node: Any, path: TreePath) -> Iterator[tuple[TreePath, Mapping[str, Any]]]:
    if isinstance(node, dict) and node.get("$") in ("tensor", "sharded"):
        yield path, node
    for key, child in keyed(node):
        yield from _walk(child, (*path, key))


def require_size(manifest: Manifest, size: int) -> None:
    """Raise where an exact resume is impossible because another number of ranks has taken the snapshot.

    Raises:
        ResumeError: says both numbers.
    """
    if manifest.world_size != size:
        raise ResumeError(
            f"{manifest.world_size} ranks took snapshot {manifest.info.id}, and this run has {size}",
            hint=f"start it with {manifest.world_size} ranks, or with rng: derive, which lets any number resume",
        )


def require_fit(into: Any, shapes: TensorShapes, saved: TensorShapes, snapshot: str) -> None:
    """Raises where a snapshot has others than `into`, but for components that are None there.

    Args:
        shapes, saved: those of `into`, and of the snapshot.
        snapshot: its id.

    Raises:
        MismatchError: names them.
    """
    # Deeper down a None may be what a fresh optimizer has, and what the snapshot has must not get lost.
    made = {str(key) for key, value in into.items() if value is None} if isinstance(into, Mapping) else set()
    found = {path: shape for path, shape in saved.items() if path.split("/")[0] not in made}
    hint = "use the state this run was started with; None takes a component as it is read: into={..., 'rng': None}"
    require_match(shapes, found, what="state", snapshot=snapshot, hint=hint)
