"""The tree in a manifest, whose grammar is checked before anything follows it (docs/format.md, "Tree").

Components of very many small arrays are packed: by dtype into few entries, their structure in an entry of its own. That
is written once: as long as it stays the same later snapshots refer to its bytes, as to all that does not change.

Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from math import isfinite, prod
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ckpt_engine.errors import CorruptError, MismatchError
from ckpt_engine.observe.number_types import Size
from ckpt_engine.store.container import DTYPES, item_bytes
from ckpt_engine.store.decode import Decoder
from ckpt_engine.store.json_checks import are_sizes, is_shape, reading, require
from ckpt_engine.store.manifest import PACKED, Entry, Manifest

TreePath = tuple[Any, ...]
"""The keys from the top of a state to one of its nodes."""

MAX_DEPTH = 210
"""Nodes inside each other. Writers stop at 200, and the trees of ranks lie two deeper."""
REPEATED, FREE_BYTES = 64, 64 << 20
"""A view is written out where that takes at most so many times its bytes, and so many more."""
PAIRS = frozenset({"dict", "odict", "defaultdict", "counter", "mapping"})
"""Kinds whose items are pairs of a key and a value."""
_ABSENT = object()
_TEXT, _LIST, _MAP, _ITEMS = (str,), (list,), (dict,), {"items": (list,)}
_NODE = (dict, list, str, int, float, bool, type(None))
_V = {"v": _TEXT}
_FIELDS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "tensor": {"entry": _TEXT},
    "sharded": {"entry": _TEXT, "blocks": _LIST},
    "ndarray": {"entry": _TEXT, "dtype": _TEXT, "shape": _LIST},
    "pickle": {"b64": _TEXT},
    "dict": _ITEMS,
    "odict": _ITEMS,
    "defaultdict": {**_ITEMS, "factory": (str, type(None))},
    "counter": _ITEMS,
    "mapping": {**_ITEMS, "type": _TEXT},
    "tuple": _ITEMS,
    "torch.Size": _ITEMS,
    "namedtuple": {**_ITEMS, "type": _TEXT, "fields": _LIST},
    "set": _ITEMS,
    "frozenset": _ITEMS,
    "deque": {**_ITEMS, "maxlen": (int, type(None))},
    "namespace": {"fields": _MAP},
    "simplenamespace": {"fields": _MAP},
    "dataclass": {"type": _TEXT, "fields": _MAP},
    "wrapper": {
        "type": _TEXT,
        "fields": _MAP,
        "size": _LIST,
        "stride": _LIST,
        "parameter": (bool,),
        "requires_grad": (bool,),
    },
    "enum": {"type": _TEXT, "name": (str, type(None))},
    "omegaconf": {"container": _NODE, "flags": _MAP},
    "subclass": {"type": _TEXT, "v": _NODE},
    "float": _V,
    "complex": {"re": _NODE, "im": _NODE},
    "npscalar": {"dtype": _TEXT, "hex": _TEXT},
    "np.dtype": _V,
    "path": {"v": _TEXT, "pure": (bool,)},
    "datetime": {"v": _TEXT, "fold": (int,)},
    "date": _V,
    "time": _V,
    "timedelta": {"v": _LIST},
    "uuid": _V,
    "decimal": _V,
    "fraction": _V,
    "range": {"v": _LIST},
    "slice": {"v": _LIST},
    "torch.dtype": _V,
    "torch.memory_format": _V,
    "torch.layout": _V,
    "torch.device": _V,
    "torch.Generator": {"device": _TEXT, "state": (dict, int)},
    "np.Generator": {"state": _NODE},
    "np.RandomState": {"state": _NODE},
    "random.Random": {"state": _NODE},
    PACKED: {"entry": _TEXT, "entries": _LIST, "values": _LIST},
    "v": {"i": (int,)},
}
"""What each kind has at least, and of which types."""
_NODES = frozenset({"items", "fields", "state", "container", "metadata"})
"""Keys of nodes that have a kind under which there are nodes."""


def check(tree: Mapping[str, Any], entries: Mapping[str, Entry] | None) -> None:
    """Whether everything that follows a tree can do so without looking again.

    Args:
        entries: of the manifest; None: some of those that the tree refers to are elsewhere.

    Raises:
        CorruptError: a node lacks what its kind has, or has it of another type or out of range; names its path.
    """
    # Without recursion: how deep it is nested is what has to be found out.
    left: list[tuple[Any, Any, int]] = [(tree, (), 0)]
    while left:
        node, where, depth = left.pop()
        if depth > MAX_DEPTH:
            raise CorruptError(f"the state is nested deeper than {MAX_DEPTH} levels at {_show(where)}")
        children: Iterable[tuple[Any, Any]]
        if type(node) is list:
            children = enumerate(node)
        elif "$" not in node or not depth:
            children = node.items()
        else:
            if (problem := _problem(node, node["$"], entries)) is not None:
                raise CorruptError(f"malformed {str(node['$'])[:40]!r} node at {_show(where)}: {problem}")
            children = _children(node)
        for key, child in children:
            kind = type(child)
            if kind is dict or kind is list:
                left.append((child, (key, where), depth + 1))
            elif kind is float and not isfinite(child):
                raise CorruptError(f"a number at {_show((key, where))} is not finite")


def keyed(node: Any) -> Iterable[tuple[Any, Any]]:
    """What is right below the node of a container, each by the key that the container has for it; keys that are nodes
    themselves are left out, and so are sets, which have none."""
    if isinstance(node, list):
        return enumerate(node)
    if not isinstance(node, dict):
        return ()
    kind, fields = node.get("$"), node.get("fields")
    if kind is None:
        return node.items()
    if isinstance(fields, dict):
        return fields.items()
    if kind in PAIRS:
        return [(key, child) for key, child in node["items"] if not isinstance(key, dict | list)]
    return enumerate(node["items"]) if kind in ("tuple", "namedtuple", "deque") else ()


def entries_in(tree: Any) -> Iterator[str]:
    """The entries that a tree refers to, in its order; one that several leaves share as often."""
    for node in _kinds_in(tree):
        if isinstance(node.get("entry"), str):
            yield node["entry"]
            if node["$"] == PACKED:
                yield from node["entries"]


def _kinds_in(tree: Any) -> Iterator[Mapping[str, Any]]:
    """The nodes of a tree that have a kind, in its order; of one that is packed there are none below."""
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, Mapping):
            kind = node.get("$")
            if kind is not None:
                yield node
            if kind != PACKED:
                left += reversed(list(node.values()))
        elif isinstance(node, list | tuple):
            left += reversed(node)


def require_written_out(tree: Any, entries: Mapping[str, Entry]) -> None:
    """Refuse views that repeat their elements so often that writing them out takes far more than they have.

    Raises:
        MismatchError: names the entry.
    """
    for node in _kinds_in(tree):
        view = node.get("view") if node["$"] == "tensor" else None
        if view:
            written = prod(view["shape"]) * (item_bytes(view["dtype"]) or 1)
            nbytes = entries[node["entry"]].nbytes
            if written > REPEATED * nbytes + FREE_BYTES:
                raise MismatchError(
                    f"a view of {node['entry']!r} repeats {nbytes:,} bytes until they are {written:,}",
                    hint="`ckpt export --to torch` writes it as what it is",
                )


def _children(node: Any) -> Iterator[tuple[Any, Any]]:
    """What is right below a node that has a kind, each with a key; scalars may be left out."""
    pairs = node.get("$") in PAIRS
    for key, value in node.items():
        if key == "items" and isinstance(value, list):
            yield from enumerate(chain.from_iterable(value) if pairs else value)
        elif key == "fields" and isinstance(value, dict):
            yield from value.items()
        elif isinstance(value, dict | list):
            yield key, value


def _problem(node: Mapping[str, Any], kind: Any, entries: Mapping[str, Entry] | None) -> str | None:
    """What is wrong with a node itself; of a kind that is not known here only what all kinds have in common."""
    if not isinstance(kind, str):
        return "its kind is no text"
    for key, types in _FIELDS.get(kind, {}).items():
        if type(node.get(key, _ABSENT)) not in types:
            return f"{key!r} is missing or of another type"
    items, fields = node.get("items"), node.get("fields")
    if "items" in node and not isinstance(items, list):
        return "'items' is no list"
    if isinstance(items, list) and kind in PAIRS and not all(type(one) is list and len(one) == 2 for one in items):
        return "'items' are no pairs"
    if "fields" in node and not isinstance(fields, dict):
        if not isinstance(fields, list) or not isinstance(items, list) or len(fields) != len(items):
            return "'fields' do not fit 'items'"
        if not all(isinstance(one, str) for one in fields):
            return "'fields' are no names"
    if "entry" in node:
        if not isinstance(node["entry"], str):
            return "'entry' is no text"
        if entries is not None:
            entry = entries.get(node["entry"])
            if entry is None:
                return f"there is no entry {node['entry'][:200]!r}"
            if kind == PACKED:
                return _problem_of_packed(node, entry, entries)
            return _problem_of_array(node, kind, entry)
    elif kind in ("bytes", "bytearray") and not isinstance(node.get("b64"), str):
        return "it has no bytes"
    return None


def _problem_of_packed(node: Mapping[str, Any], schema: Entry, entries: Mapping[str, Entry]) -> str | None:
    if schema.dtype != "uint8":
        return "its schema is no text"
    if not all(type(name) is str and name in entries for name in node["entries"]):
        return "it has entries that are not there"
    return None


def _problem_of_array(node: Mapping[str, Any], kind: str, entry: Entry) -> str | None:
    if kind == "ndarray" and not is_shape(node["shape"]):
        return "its shape is none"
    if kind not in ("tensor", "sharded"):
        return None
    parameter, view, stride = node.get("parameter"), node.get("view"), node.get("stride")
    if parameter is not None and (type(parameter) is not dict or type(parameter.get("requires_grad")) is not bool):
        return "'parameter' does not say whether it requires a gradient"
    if "view" in node:
        if type(view) is not dict or "stride" in node or kind != "tensor":
            return "'view' is none"
        return _problem_of_view(view, entry.nbytes)
    if "stride" in node and not (isinstance(stride, list) and are_sizes(stride) and is_dense(entry.shape, stride)):
        return "'stride' is not that of a dense array of its shape"
    return None


def _problem_of_view(view: Any, nbytes: int) -> str | None:
    """Whether a view lies in its memory: what follows it does not look again."""
    dtype, shape, stride, offset = (view.get(key) for key in ("dtype", "shape", "stride", "byte_offset"))
    if type(dtype) is not str or not is_shape(shape) or not are_sizes(stride) or not are_sizes([offset]):
        return "'view' lacks something, or has it out of range"
    if len(shape) != len(stride):
        return "'view' has a stride of another number of dimensions"
    size = item_bytes(dtype) or 1  # of a dtype that only a newer torch knows, which looks itself
    reach = sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1 if prod(shape) else 0
    if offset % size or offset + reach * size > nbytes:
        return f"'view' reaches beyond the {nbytes} bytes of its entry"
    return None


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether strides are a permutation of those of an array in C order."""
    if len(shape) != len(stride):
        return False
    if not prod(shape):
        return True
    expected = 1
    for step, n in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= n
    return True


def _show(where: Any) -> str:
    keys = []
    while where:
        key, where = where
        keys.append(str(key))
    shown = "/".join(reversed(keys))
    return shown if len(shown) <= 200 else f"{shown[:200]}…"


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
    shapes: Sequence[Sequence[Size]]
    arrays: Annotated[Sequence[Size], Meta(min_length=1)]

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


def encode_schema(schema: Schema) -> bytes:
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
    return json.dumps(
        {"packs": rows, "tree": schema.tree}, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def decode_schema(data: bytes, entries: Mapping[str, Entry]) -> Schema:
    """The inverse of `encode_schema`; every field is checked before anything uses it.

    Args:
        entries: of the manifest.

    Raises:
        CorruptError: it is no schema, or does not fit the entries.
    """
    with reading("a schema contradicts the format"):
        schema = msgspec.json.decode(data, type=Schema)
        for pack in schema.packs:
            _check_pack(pack, entries)
        check({"": schema.tree}, entries)
    return schema


def _check_pack(pack: Pack, entries: Mapping[str, Entry]) -> None:
    entry = entries[pack.entry]
    require(pack.dtype in DTYPES and entry.dtype == pack.dtype, f"a pack has {pack.dtype!r:.40} in {entry.dtype}")
    parameter = pack.node.get("parameter", {"requires_grad": False})
    require(type(parameter["requires_grad"]) is bool, "a pack has no node")
    require({"$", "entry", "view", "stride", "blocks"}.isdisjoint(pack.node), "a pack has another kind of node")
    require(all(map(is_shape, pack.shapes)), "a pack has no shapes")
    import numpy as np  # a writer starts without it

    numbers = np.array(pack.arrays)
    require(int(numbers.max()) < len(pack.shapes), "a pack has arrays without a shape")
    counts = np.array([prod(shape) for shape in pack.shapes])
    require(int(counts.min()) > 0 and int(counts.max()) <= prod(entry.shape), "a pack has arrays of another size")
    total = int(counts[numbers].sum())
    require(entry.shape == (total,), f"a pack has {total} elements in an entry of shape {entry.shape}")


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
    packed = filter(is_packed, manifest.tree.values())
    return {node["entry"]: decode_schema(read(node["entry"]), manifest.entries) for node in packed}


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
        elif key == "items" and kind in PAIRS:
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
