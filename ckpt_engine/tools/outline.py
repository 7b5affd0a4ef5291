"""The state tree of a manifest as tools walk it.

It consists of containers, leaves and arrays (docs/format.md, "Tree").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from ckpt_engine.store.container import item_bytes
from ckpt_engine.store.tree import PAIRS, TreePath


@dataclass(frozen=True, slots=True)
class OutlineLeaf:
    """An array in the state: its path and its node, which names the entry."""

    path: TreePath
    node: dict[str, Any]

    @property
    def entry(self) -> str:
        """The entry that has its bytes."""
        return str(self.node["entry"])

    @property
    def own_nbytes(self) -> int:
        """Its bytes, where it is one of many in a pack; else 0: its entry has them."""
        view = self.node.get("view") or {}
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


def array_leaves(node: Any, path: TreePath = ()) -> Iterator[OutlineLeaf]:
    """Every array at or below `node`, also inside nodes of kinds unknown here."""
    if isinstance(node, dict) and "$" in node and "entry" in node:
        yield OutlineLeaf(path, node)
        return
    if (found := children(node)) is None and isinstance(node, dict):
        found = [(key, child) for key, child in node.items() if isinstance(child, dict | list)]
    for key, child in found or ():
        yield from array_leaves(child, (*path, key))


def _key(key: Any) -> str:
    return str(key.get("v", key.get("name", key.get("items", key)))) if isinstance(key, dict) else str(key)
