"""Components of very many small arrays: packed by dtype into few entries, their structure in one of its own. No torch.

The structure is written once: as long as it stays the same later snapshots refer to its bytes, as to all that does not
change (docs/format.md, "Packed components").
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from ckpt_engine.errors import CorruptError
from ckpt_engine.store import tree
from ckpt_engine.store.container import DTYPES, MALFORMED, is_object, is_shape, loads, require
from ckpt_engine.store.decode import Decoder
from ckpt_engine.store.manifest import PACKED, Entry, Manifest


@dataclass(frozen=True, slots=True)
class Pack:
    """Arrays of one dtype back to back in one entry.

    Args:
        node: what the tree's node of each of them has beside `entry`.
        shapes: those that there are.
        arrays: of each array the number of its shape.
    """

    entry: str
    dtype: str
    node: Mapping[str, Any]
    shapes: Sequence[Sequence[int]]
    arrays: Sequence[int]

    def lengths(self) -> list[int]:
        """Of each array the number of its elements."""
        counts = [prod(shape) for shape in self.shapes]
        return [counts[number] for number in self.arrays]


@dataclass(frozen=True, slots=True)
class Schema:
    """The structure of one component.

    Args:
        tree: its node. A whole number in the place of a node stands for that array of all `packs` together, and
            `{"$": "v", "i": n}` for value n of the snapshot.
    """

    tree: Any
    packs: tuple[Pack, ...]


def encode(schema: Schema) -> bytes:
    """The bytes of a schema."""
    rows = [
        {
            "entry": pack.entry,
            "dtype": pack.dtype,
            "node": pack.node,
            "shapes": list(map(list, pack.shapes)),
            "arrays": list(pack.arrays),
        }
        for pack in schema.packs
    ]
    document = {"packs": rows, "tree": schema.tree}
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def decode(data: bytes, entries: Mapping[str, Entry]) -> Schema:
    """The inverse of `encode`; every field is checked before anything uses it.

    Args:
        entries: of the manifest.

    Raises:
        CorruptError: it is no schema, or does not fit the entries.
    """
    try:
        document = loads(data)
        packs = tuple([_pack(row, entries) for row in document["packs"]])
        tree.check({"": document["tree"]}, entries)
    except MALFORMED as err:
        raise CorruptError(f"a schema contradicts the format: {type(err).__name__}: {err}") from err
    return Schema(document["tree"], packs)


def _pack(row: Mapping[str, Any], entries: Mapping[str, Entry]) -> Pack:
    pack = Pack(row["entry"], row["dtype"], row["node"], row["shapes"], row["arrays"])
    entry = entries[pack.entry]
    require(pack.dtype in DTYPES and entry.dtype == pack.dtype, f"a pack has {pack.dtype!r:.40} in {entry.dtype}")
    parameter = pack.node.get("parameter", {"requires_grad": False})
    require(is_object(pack.node) and type(parameter["requires_grad"]) is bool, "a pack has no node")
    require({"$", "entry", "view", "stride", "blocks"}.isdisjoint(pack.node), "a pack has another kind of node")
    require(type(pack.shapes) is list and all(map(is_shape, pack.shapes)), "a pack has no shapes")
    require(type(pack.arrays) is list and len(pack.arrays) > 0, "a pack has no arrays")
    numbers = np.array(pack.arrays)
    require(numbers.dtype.kind == "i" and numbers.ndim == 1, "a pack has arrays without a number")
    require(0 <= int(numbers.min()) <= int(numbers.max()) < len(pack.shapes), "a pack has arrays without a shape")
    counts = np.array([prod(shape) for shape in pack.shapes])
    require(int(counts.min()) > 0 and int(counts.max()) <= prod(entry.shape), "a pack has arrays of another size")
    total = int(counts[numbers].sum())
    require(entry.shape == (total,), f"a pack has {total} elements in an entry of shape {entry.shape}")
    return pack


def is_packed(node: Any) -> bool:
    """Whether a component of a tree is packed."""
    return type(node) is dict and node.get("$") == PACKED


def schemas_of(manifest: Manifest, read: Callable[[str], bytes]) -> dict[str, Schema]:
    """The schemas of all packed components by their entry, verified.

    Args:
        read: the bytes of an entry.

    Raises:
        CorruptError: one is damaged.
        CkptError: whatever reading raises.
    """
    names = [node["entry"] for node in manifest.tree.values() if is_packed(node)]
    return {name: decode(read(name), manifest.entries) for name in names}


def reader_of(manifest: Manifest, decoder: Decoder) -> Callable[[str], bytes]:
    """Reads the bytes of an entry."""

    def read(name: str) -> bytes:
        data = bytearray(manifest.entries[name].nbytes)
        for at, piece in manifest.entries[name].placed():
            decoder.read(name, at, piece, memoryview(data)[at : at + piece.raw_nbytes])
        return bytes(data)

    return read


def unpacked(manifest: Manifest, decoder: Callable[[Manifest], Decoder]) -> Manifest:
    """The manifest with a node for each leaf: that of an array in a pack is a `view` of it, which has its `own` memory.

    For what looks at the leaves one by one. It is never written.

    Args:
        decoder: reads entries of a manifest.

    Raises:
        CorruptError: a schema is damaged.
        CkptError: whatever reading raises.
    """
    if not any(map(is_packed, manifest.tree.values())):
        return manifest
    schemas = schemas_of(manifest, reader_of(manifest, decoder(manifest)))

    def component(node: Any) -> Any:
        if not is_packed(node):
            return node
        schema = schemas[node["entry"]]
        leaves = [leaf for pack in schema.packs for leaf in _leaves(pack)]
        return _filled(schema.tree, leaves, node["values"])

    return replace(manifest, tree={key: component(node) for key, node in manifest.tree.items()})


def _leaves(pack: Pack) -> Iterator[dict[str, Any]]:
    strides = [list(accumulate(reversed(shape[1:]), int.__mul__, initial=1))[::-1] for shape in pack.shapes]
    size = DTYPES[pack.dtype][1]
    starts = accumulate([size * length for length in pack.lengths()], initial=0)
    for start, number in zip(starts, pack.arrays):  # noqa: B905 - the last start is where the next array would be
        shape = pack.shapes[number]
        stride = strides[number] if shape else []
        view = {"dtype": pack.dtype, "shape": shape, "stride": stride, "byte_offset": start, "own": True}
        yield {"$": "tensor", **pack.node, "entry": pack.entry, "view": view}


_NODES = frozenset({"items", "fields", "state", "container", "metadata"})
"""Keys of nodes that have a kind under which there are nodes."""


def _filled(node: Any, leaves: Sequence[Any], values: Sequence[Any]) -> Any:
    """A node of a schema, with those of its arrays and values in it."""
    if type(node) is int:
        return at(node, leaves)
    if isinstance(node, list):
        return [_filled(child, leaves, values) for child in node]
    if not isinstance(node, dict):
        return node
    kind = node.get("$")
    if kind is None:
        return {key: _filled(child, leaves, values) for key, child in node.items()}
    if kind == "v":
        return at(node["i"], values)
    found = dict(node)
    for key in _NODES & node.keys():
        if key == "fields" and isinstance(node[key], dict):
            found[key] = {name: _filled(child, leaves, values) for name, child in node[key].items()}
        elif key == "items" and kind in tree.PAIRS:
            found[key] = [[key_of(name, values), _filled(child, leaves, values)] for name, child in node[key]]
        else:
            found[key] = _filled(node[key], leaves, values)
    return found


def key_of(node: Any, values: Sequence[Any]) -> Any:
    """A node of a schema in the place of a key, where whole numbers are themselves, with the values in it."""
    if isinstance(node, list):
        return [key_of(child, values) for child in node]
    if not isinstance(node, dict):
        return node
    return at(node["i"], values) if node.get("$") == "v" else {key: key_of(one, values) for key, one in node.items()}


def at(number: Any, there: Sequence[Any]) -> Any:
    """The element of that number. Raises CorruptError if there is none."""
    if type(number) is not int or not 0 <= number < len(there):
        raise CorruptError(f"a schema refers to number {number!r:.40} of {len(there)}")
    return there[number]
