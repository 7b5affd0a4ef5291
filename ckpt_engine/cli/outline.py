"""Walks the typed JSON tree of a manifest (docs/format.md, "Tree") without torch: leaves, and a short outline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckpt_engine.store.manifest import Entry, Manifest
from ckpt_engine.store.tree import TreePath

MAX_DEPTH = 2
MAX_CHILDREN = 8


@dataclass(frozen=True, slots=True)
class OutlineBranch:
    """One line of an outline.

    Args:
        kind: of the container, "" for a leaf of an array.
        arrays: array leaves at or below; tied ones count each time.
        nbytes: of those, shared bytes once.
        values: other leaves at or below.
        hidden: this line stands for that many children that are not shown.
    """

    depth: int
    key: str
    kind: str = ""
    arrays: int = 0
    nbytes: int = 0
    values: int = 0
    hidden: int = 0


@dataclass(frozen=True, slots=True)
class OutlineLeaf:
    """An array in the state: its path and its node, which names the entry."""

    path: TreePath
    node: dict[str, Any]

    @property
    def entry(self) -> str:
        """The entry that has its bytes."""
        return str(self.node["entry"])


def entry_nbytes(entry: Entry) -> int:
    """Logical bytes of an entry."""
    return sum(piece.raw_nbytes for piece in entry.pieces)


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
    if node["$"] in ("dict", "odict", "defaultdict", "counter", "mapping"):
        return [(_key(key), child) for key, child in items]
    return [(str(index), child) for index, child in enumerate(items)]


def array_leaves(node: Any, path: TreePath = ()) -> Iterator[OutlineLeaf]:
    """Every array at or below `node`, also inside nodes of kinds unknown here."""
    if isinstance(node, dict) and "$" in node and "entry" in node:
        yield OutlineLeaf(path, node)
        return
    found = children(node)
    if found is None and isinstance(node, dict):
        found = [(key, child) for key, child in node.items() if isinstance(child, dict | list)]
    for key, child in found or ():
        yield from array_leaves(child, (*path, key))


def outline(manifest: Manifest) -> Iterator[OutlineBranch]:
    """The first levels of the tree, long ones cut."""
    for key, node in manifest.tree.items():
        yield from _outline(manifest, key or "(state)", node, 0)


def _outline(manifest: Manifest, key: str, node: Any, depth: int) -> Iterator[OutlineBranch]:
    below = children(node)
    leaves = list(array_leaves(node))
    # Of a snapshot of some ranks only the tree is whole.
    there = (manifest.entries.get(name) for name in {leaf.entry for leaf in leaves})
    nbytes = sum(entry_nbytes(entry) for entry in there if entry is not None)
    yield OutlineBranch(depth, key, _kind(node), len(leaves), nbytes, _values(node))
    if below is None or depth == MAX_DEPTH or not any(children(child) for _, child in below):
        return
    for child_key, child in below[:MAX_CHILDREN]:
        yield from _outline(manifest, child_key, child, depth + 1)
    if len(below) > MAX_CHILDREN:
        yield OutlineBranch(depth + 1, "", hidden=len(below) - MAX_CHILDREN)


def _kind(node: Any) -> str:
    below = children(node)
    if isinstance(node, dict) and "$" in node:
        name = str(node.get("type", node["$"])).rpartition(":")[2]
    else:
        name = type(node).__name__
    return name if below is None else f"{name} of {len(below)}"


def _values(node: Any) -> int:
    below = children(node)
    if below is not None:
        return sum(_values(child) for _, child in below)
    return 0 if any(True for _ in array_leaves(node)) else 1


def _key(key: Any) -> str:
    if isinstance(key, dict):
        return str(key.get("v", key.get("name", key.get("items", key))))
    return str(key)
