"""The state tree of a manifest as tools walk it.

It consists of containers, leaves and arrays (docs/format.md, "Tree").
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from ckpt_engine.store.container import item_bytes
from ckpt_engine.store.tree import PAIRS, TreePath


def own_nbytes(node: dict[str, Any]) -> int:
    """The bytes of an array, where it is one of many in a pack; else 0: its entry has them."""
    view = node.get("view") or {}
    return prod(view["shape"]) * (item_bytes(view["dtype"]) or 1) if view.get("own") else 0


def children(node: Any) -> list[tuple[str, Any]] | None:
    """The keys and children of a container node; None for a leaf."""
    if isinstance(node, list):
        return [(str(index), child) for index, child in enumerate(node)]
    if not isinstance(node, dict):
        return None
    if "$" not in node:
        return list(node.items())
    items, fields = node.get("items"), node.get("fields")
    if isinstance(fields, dict):
        return list(fields.items())
    if not isinstance(items, list):
        return None
    if isinstance(fields, list):
        return list(zip(map(str, fields), items, strict=True))
    if node["$"] in PAIRS:
        return [(_key(key), child) for key, child in items]
    return [(str(index), child) for index, child in enumerate(items)]


def leaves(node: Any) -> Iterator[Any]:
    """Every node at or below `node` that is no container."""
    if (below := children(node)) is None:
        yield node
    for _, child in below or ():
        yield from leaves(child)


def array_leaves(node: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, dict[str, Any]]]:
    """Every array at or below `node`, also inside nodes of kinds unknown here: its path, and the node that names its
    entry."""
    if isinstance(node, dict) and "$" in node and "entry" in node:
        yield path, node
        return
    if (found := children(node)) is None and isinstance(node, dict):
        found = [(key, child) for key, child in node.items() if isinstance(child, dict | list)]
    for key, child in found or ():
        yield from array_leaves(child, (*path, key))


def _key(key: Any) -> str:
    return str(key.get("v", key.get("name", key.get("items", key)))) if isinstance(key, dict) else str(key)
