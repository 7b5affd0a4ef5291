"""Fill a skeleton: put the values of one snapshot into the JSON tree that stays the same between snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt_engine.errors import WriterError


class Skeleton:
    """The typed JSON tree of one top-level key, in which `{"$": "v", "i": n}` stands for value n.

    `entries` names the arrays the tree refers to (`{"$": ..., "entry": name}`), without repetition.

    Raises:
        WriterError: a placeholder without a whole number.
    """

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._changing: set[int] = set()
        self._values = 0
        entries: dict[str, None] = {}
        self._study(tree, entries)
        self.entries = tuple(entries)

    def _study(self, node: Any, entries: dict[str, None]) -> bool:
        """Collect entries; whether `node` contains a placeholder. Parts that do not are shared, never copied."""
        if isinstance(node, dict):
            kind = node.get("$")
            if kind == "v":
                index = node.get("i")
                if not isinstance(index, int) or index < 0:
                    raise WriterError(f"a placeholder of a skeleton has no value number: {node}")
                self._values = max(self._values, index + 1)
                self._changing.add(id(node))
                return True
            if kind is not None and isinstance(node.get("entry"), str):
                entries[node["entry"]] = None
            children = list(node.values())
        elif isinstance(node, list):
            children = node
        else:
            return False
        changing = False
        for child in children:
            changing |= self._study(child, entries)
        if changing:
            self._changing.add(id(node))
        return changing

    def fill(self, values: Sequence[Any]) -> Any:
        """The tree with `values` in place of its placeholders. Values are inserted as they are.

        Raises:
            WriterError: fewer or more values than placeholders.
        """
        if len(values) != self._values:
            raise WriterError(f"a skeleton with {self._values} placeholders was given {len(values)} values")
        return self._fill(self._tree, values)

    def _fill(self, node: Any, values: Sequence[Any]) -> Any:
        if id(node) not in self._changing:
            return node
        if isinstance(node, list):
            return [self._fill(child, values) for child in node]
        if node.get("$") == "v":
            return values[node["i"]]
        return {key: self._fill(child, values) for key, child in node.items()}
