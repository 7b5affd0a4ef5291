"""Makes a state again from the typed JSON of a manifest: with the classes of its objects, or plain containers where a
class is missing.

No code from the snapshot runs, nor any that it names: see `json_types`. A class that is not there, or not of the kind
that the node says, comes back as a plain equivalent, and `Rebuilder.notes` says so.

Blocks: arrays that are stored as the boxes of several ranks one behind another (docs/format.md, "Tree").
"""

from __future__ import annotations

import argparse
import base64
import collections
import copy
import datetime
import decimal
import enum
import fnmatch
import fractions
import pathlib
import pickle
import random
import re
import sys
import types
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import xxhash

from ckpt_engine.errors import CkptError, FormatError, NewerFormatError
from ckpt_engine.ranks.boxes import Box, boxes_of
from ckpt_engine.state import json_types
from ckpt_engine.state.flatten import show_path
from ckpt_engine.state.json_types import CONTEXT, FACTORIES
from ckpt_engine.state.wrapped import Wrapped
from ckpt_engine.store.manifest import PACKED
from ckpt_engine.store.tree import Pack, Schema, TreePath, at, key_of

_NONSENSE = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
"""What the constructors of Python, numpy and torch raise for values that they cannot take, endless nesting included."""
_FRACTION = re.compile(r"-?[0-9]+(/[0-9]+)?")
_FLOATS = {text: float(text) for text in ("nan", "-nan", "inf", "-inf")}
_GENERATORS = re.compile(r"(cpu|cuda|mps|xpu)(:[0-9]{1,4})?")
_MOST_WORDS = 624
"""Of a Mersenne Twister: a draw from one that stands beyond its end reads other memory."""

_COPIED_BYTES = 2 << 10
"""Of smaller arrays one call that copies all takes less time than a call for each that does not."""
_TORCH_NAMES = {"torch.dtype": torch.dtype, "torch.memory_format": torch.memory_format, "torch.layout": torch.layout}
_BIT_GENERATORS: dict[str, Any] = {
    one.__name__: one
    for one in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}


@dataclass(frozen=True, slots=True)
class PickledLeaf:
    """A value that was stored with pickle, as its bytes."""

    data: bytes

    def __repr__(self) -> str:
        return f"pickled {len(self.data):,} bytes {xxhash.xxh3_64_hexdigest(self.data)}"


class Rebuilder:
    """Turns JSON nodes back into objects.

    Args:
        entries: contiguous tensors by container name, as read.
        pickle_paths: glob patterns of paths that may be unpickled; anything else pickled is refused.
        finished: entries that are the very tensors that the tree shall have.
        plain: take no class from this process: what would be of one comes back as a plain equivalent, and what is
            pickled as a `PickledLeaf`.
        schemas: of the packed components, by entry.
    """

    def __init__(
        self,
        entries: Mapping[str, torch.Tensor],
        pickle_paths: Sequence[str] = (),
        finished: Collection[str] = (),
        *,
        plain: bool = False,
        schemas: Mapping[str, Schema] = MappingProxyType({}),
    ) -> None:
        self._entries = entries
        self._schemas = schemas
        self._arrays: Mapping[int, torch.Tensor] = {}
        self._values: Sequence[Any] = ()
        self._outside: Rebuilder | None = None
        self._plain = plain
        self._finished = frozenset(finished)
        self._pickle_paths = tuple(pickle_paths)
        self._tied: dict[tuple[Any, ...], torch.Tensor] = {}
        self._copied: set[str] = set()
        self._raw_bytes: dict[tuple[str, str], bytes | bytearray] = {}
        self.notes: list[str] = []
        self.wrapped: list[Wrapped] = []

    def state(self, tree: Mapping[str, Any]) -> Any:
        """The whole state from `Manifest.tree`."""
        if list(tree) == [""]:
            return self.node(tree[""], ())
        return {key: self.node(node, (key,)) for key, node in tree.items()}

    def node(self, node: Any, path: TreePath) -> Any:
        """One node with everything below it.

        Raises:
            NewerFormatError: a kind this version does not know.
            FormatError: a pickled leaf that was not opted in, or a malformed node.
        """
        arrays = self._arrays
        if isinstance(node, list):
            return [self.node(child, (*path, i)) for i, child in enumerate(node)]
        if not isinstance(node, dict):
            return arrays[node] if arrays and type(node) is int else node
        kind = node.get("$")
        if kind is None:
            return {
                key: arrays[child] if arrays and type(child) is int else self.node(child, (*path, key))
                for key, child in node.items()
            }
        if kind == "v" and self._outside is not None:
            return self._outside.node(at(node.get("i"), self._values), path)
        build = _KINDS.get(kind)
        if build is None:
            raise NewerFormatError(
                f"unknown node kind {kind!r} at {show_path(path)}", hint="read it with a newer ckpt-engine"
            )
        try:
            return build(self, node, path)
        except CkptError:
            raise
        except _NONSENSE as err:  # the one place where values of a snapshot meet constructors of others
            raise FormatError(f"malformed {kind!r} node at {show_path(path)}: {type(err).__name__}: {err}") from err

    def items(self, node: Mapping[str, Any], path: TreePath) -> list[Any]:
        return [self.node(child, (*path, i)) for i, child in enumerate(node["items"])]

    def pairs(self, node: Mapping[str, Any], path: TreePath) -> list[tuple[Any, Any]]:
        out = []
        outside = self._outside
        for raw_key, raw_value in node["items"]:
            # A schema's numbers are arrays in the place of values only.
            key = self.node(raw_key, path) if outside is None else outside.node(key_of(raw_key, self._values), path)
            out.append((key, self.node(raw_value, (*path, key))))
        return out

    def made(self, name: Any, make: Callable[[type], Any], path: TreePath, plain: Any = None) -> Any:
        """What `make` makes of the class of this name; `plain`, with a note: it is not here, is of another kind, or
        would run code."""
        found = None if self._plain or not isinstance(name, str) else json_types.find_class(name)
        made = None if found is None else make(found)
        if made is not None:
            return made
        self.notes.append(
            f"{show_path(path)}: class {name} is not imported here, or runs code of its own when an object is made; "
            "restored as a plain equivalent"
        )
        return plain

    def entry(self, node: Mapping[str, Any], path: TreePath) -> torch.Tensor:
        try:
            return self._entries[node["entry"]]
        except KeyError as err:
            raise FormatError(f"{show_path(path)} refers to entry {node['entry']!r}, which the manifest lacks") from err

    def tensor(self, node: Mapping[str, Any], path: TreePath) -> torch.Tensor:
        """Leaves that shared memory when saved share it again."""
        if node["entry"] in self._finished:
            return self.entry(node, path)
        view, stride = node.get("view"), node.get("stride")
        memory = (node["entry"], repr(view), tuple(stride or ()), repr(node.get("blocks")))
        if memory not in self._tied:
            raw = self.entry(node, path)
            # Copies are made once for each entry, whatever a tree says: the number of leaves costs no memory.
            if stride is not None or "blocks" in node:
                if node["entry"] in self._copied:
                    raise FormatError(f"{show_path(path)} has {node['entry']!r} in another form than a leaf before it")
                self._copied.add(node["entry"])
            if "blocks" in node:
                raw = put_together(raw, boxes_of(node, raw.shape))
            self._tied[memory] = raw if view is None and stride is None else _new_tensor(raw, view, stride)
        parameter = node.get("parameter")
        if not parameter and node.get("requires_grad") is True:
            return self._tied.setdefault((*memory, "trained"), self._tied[memory].detach().requires_grad_())
        if not parameter:
            return self._tied[memory]
        key = (*memory, parameter["requires_grad"] is True)
        if key not in self._tied:
            self._tied[key] = torch.nn.Parameter(self._tied[memory], requires_grad=parameter["requires_grad"] is True)
        return self._tied[key]

    def packed(self, node: Mapping[str, Any], path: TreePath) -> Any:
        """A component by its schema. Each array has its own storage."""
        schema = self._schemas[node["entry"]]
        arrays = chain.from_iterable(map(self._unpack, schema.packs))
        inside = copy.copy(self)
        inside._arrays, inside._values, inside._outside = dict(enumerate(arrays)), node["values"], self
        return inside.node(schema.tree, path)

    def _unpack(self, pack: Pack) -> list[torch.Tensor]:
        flat, lengths = self._entries[pack.entry].view(-1), pack.lengths()
        if flat.nbytes < _COPIED_BYTES * len(lengths):
            copies: Any = torch.split_with_sizes_copy  # torch types it as if it always filled given tensors
            made = copies(flat, lengths)
        else:
            buffer, size = flat_bytes(flat), flat.element_size()
            starts = accumulate([size * length for length in lengths], initial=0)
            places = zip(lengths, starts)  # noqa: B905 - the last start is where the next array would be
            made = [torch.frombuffer(buffer, dtype=flat.dtype, count=count, offset=start) for count, start in places]
        shapes = [None if len(shape) == 1 else shape for shape in pack.shapes]
        wanted = map(shapes.__getitem__, pack.arrays)
        found = [one if shape is None else one.view(shape) for one, shape in zip(made, wanted, strict=True)]
        parameter = pack.node.get("parameter")
        if not parameter:
            return [one.requires_grad_() for one in found] if pack.node.get("requires_grad") is True else found
        return [torch.nn.Parameter(one, requires_grad=parameter["requires_grad"]) for one in found]

    def raw_bytes(self, node: Mapping[str, Any], path: TreePath) -> bytes | bytearray:
        """What is in an entry as bytes, once for all leaves that refer to it."""
        key = (node["$"], node["entry"])
        if key not in self._raw_bytes:
            data = flat_bytes(self.entry(node, path)).data
            self._raw_bytes[key] = bytes(data) if node["$"] == "bytes" else bytearray(data)
        return self._raw_bytes[key]

    def unpickle(self, node: Mapping[str, Any], path: TreePath) -> Any:
        if self._plain:
            return PickledLeaf(base64.b64decode(node["b64"]))
        joined = "/".join(map(str, path))
        if not any(fnmatch.fnmatchcase(joined, pattern) for pattern in self._pickle_paths):
            raise FormatError(
                f"{joined} was stored with pickle, which can run code",
                hint=f"if you trust this snapshot, opt in with pickle: ['{joined}']",
            )
        try:
            return pickle.loads(base64.b64decode(node["b64"]))  # noqa: S301 - explicit opt-in for this path
        except (ImportError, pickle.UnpicklingError, *_NONSENSE) as err:
            raise FormatError(
                f"{joined} was stored with pickle and cannot be made again: {type(err).__name__}: {err}",
                hint="import its class under the name that it had when it was saved",
            ) from err


def _new_tensor(raw: torch.Tensor, view: Mapping[str, Any] | None, stride: Sequence[int] | None) -> torch.Tensor:
    if view is not None:
        dtype = json_types.dtype_of(view["dtype"])
        if view.get("own"):
            flat, count = flat_bytes(raw), prod(view["shape"])
            return torch.frombuffer(flat, dtype=dtype, count=count, offset=view["byte_offset"]).view(view["shape"])
        offset = raw.storage_offset() * raw.element_size() + view["byte_offset"]
        if offset % dtype.itemsize:
            raise ValueError(f"{view['dtype']} at byte {offset} of its memory")
        return torch.empty(0, dtype=dtype).set_(
            raw.untyped_storage(), offset // dtype.itemsize, tuple(view["shape"]), tuple(view["stride"])
        )
    return torch.empty_strided(raw.shape, tuple(stride or ()), dtype=raw.dtype).copy_(raw)


def flat_bytes(raw: torch.Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor in C order."""
    return raw.contiguous().view(-1).view(torch.uint8).numpy() if raw.numel() else np.empty(0, dtype=np.uint8)


def _ndarray(r: Rebuilder, node: Mapping[str, Any], path: TreePath) -> Any:
    flat = flat_bytes(r.entry(node, path))
    return flat.view(json_types.numpy_dtype(node["dtype"])).reshape(node["shape"])


def _bytes(r: Rebuilder, node: Mapping[str, Any], path: TreePath) -> bytes | bytearray:
    if "b64" not in node:
        return r.raw_bytes(node, path)
    return (bytes if node["$"] == "bytes" else bytearray)(base64.b64decode(node["b64"]))


def _odict(r: Rebuilder, node: Mapping[str, Any], path: TreePath) -> collections.OrderedDict[Any, Any]:
    out = collections.OrderedDict(r.pairs(node, path))
    if "metadata" in node:
        out._metadata = r.node(node["metadata"], (*path, "_metadata"))  # type: ignore[attr-defined]
    return out


def _mapping(r: Rebuilder, node: Mapping[str, Any], path: TreePath) -> Any:
    pairs = r.pairs(node, path)
    made = r.made(node["type"], lambda cls: json_types.mapping(cls, pairs), path)
    return dict(pairs) if made is None else made


def _defaultdict(r: Rebuilder, node: Mapping[str, Any], path: TreePath) -> Any:
    factory = None if node["factory"] is None else FACTORIES[node["factory"]]
    return collections.defaultdict(factory, r.pairs(node, path))


def _namedtuple(r: Rebuilder, node: Mapping[str, Any], path: TreePath) -> Any:
    fields = tuple(node["fields"])
    if not all(isinstance(one, str) for one in fields):
        raise ValueError("names of fields are text")
    cls = r.made(node["type"], lambda cls: cls if json_types.is_namedtuple(cls, fields) else None, path)
    return tuple.__new__(cls or json_types.plain_namedtuple(str(node["type"]), fields), r.items(node, path))


def _fields(r: Rebuilder, node: Mapping[str, Any], path: TreePath) -> dict[str, Any]:
    return {name: r.node(child, (*path, name)) for name, child in node["fields"].items()}


def _namespace(r: Rebuilder, node: Mapping[str, Any], path: TreePath) -> Any:
    out = types.SimpleNamespace() if node["$"] == "simplenamespace" else argparse.Namespace()
    vars(out).update(_fields(r, node, path))  # not as arguments: one may be called self
    return out


def _dataclass(r: Rebuilder, node: Mapping[str, Any], path: TreePath) -> Any:
    values = _fields(r, node, path)
    return r.made(node["type"], lambda cls: json_types.dataclass(cls, values), path, types.SimpleNamespace(**values))


def _wrapper(r: Rebuilder, node: Mapping[str, Any], path: TreePath) -> Wrapped:
    tensors = _fields(r, node, path)
    r.wrapped.append(Wrapped(path, node, tensors.pop(CONTEXT), tensors))
    if not all(isinstance(one, torch.Tensor | Wrapped) for one in tensors.values()):
        raise ValueError("a part of a tensor is none")
    return r.wrapped[-1]


def _enum(r: Rebuilder, node: Mapping[str, Any], path: TreePath) -> Any:
    name = node["name"]
    return r.made(node["type"], lambda cls: json_types.member(cls, name), path, name)


def _subclass(r: Rebuilder, node: Mapping[str, Any], path: TreePath) -> Any:
    value = r.node(node["v"], path)
    return r.made(node["type"], lambda cls: json_types.of_subclass(cls, value), path, value)


def _fraction(_: Rebuilder, node: Mapping[str, Any], __: TreePath) -> fractions.Fraction:
    if _FRACTION.fullmatch(node["v"]) is None:  # Python takes exponents, and computes their powers of ten
        raise ValueError("not a fraction of two whole numbers")
    return fractions.Fraction(node["v"])


def _torch_generator(r: Rebuilder, node: Mapping[str, Any], path: TreePath) -> torch.Generator:
    if _GENERATORS.fullmatch(node["device"]) is None:
        raise ValueError(f"no random generator is on {str(node['device'])[:40]!r}")
    out = torch.Generator(node["device"])
    out.set_state(r.node(node["state"], (*path, "state")).clone())
    return out


def _np_generator(r: Rebuilder, node: Mapping[str, Any], path: TreePath) -> Any:
    state = r.node(node["state"], (*path, "state"))
    name = state["bit_generator"]
    if name not in _BIT_GENERATORS:
        raise ValueError(f"unknown bit generator {str(name)[:40]!r}")
    if (name == "MT19937" and not 0 <= state["state"]["pos"] <= _MOST_WORDS) or (
        name == "Philox" and not 0 <= state["buffer_pos"] <= len(state["buffer"])
    ):
        raise ValueError("a generator that stands beyond its end")
    if node["$"] == "np.RandomState":
        legacy = np.random.RandomState(_BIT_GENERATORS[name]())
        legacy.set_state(state)
        return legacy
    bits = _BIT_GENERATORS[name]()
    bits.state = state
    return np.random.Generator(bits)


def _python_random(r: Rebuilder, node: Mapping[str, Any], path: TreePath) -> random.Random:
    out = random.Random()
    out.setstate(r.node(node["state"], (*path, "state")))
    return out


def _omegaconf(r: Rebuilder, node: Mapping[str, Any], path: TreePath) -> Any:
    plain = r.node(node["container"], path)
    omegaconf = sys.modules.get("omegaconf")  # what is not imported is not imported for a snapshot
    # It reads a text at the top as YAML.
    if omegaconf is None or type(plain) not in (dict, list) or not _is_plain(plain):
        r.notes.append(
            f"{show_path(path)}: omegaconf is not imported here, or cannot hold this; restored as plain containers"
        )
        return plain
    try:
        out = omegaconf.OmegaConf.create(plain)
        omegaconf.OmegaConf.set_struct(out, node["flags"]["struct"] or None)
        omegaconf.OmegaConf.set_readonly(out, node["flags"]["readonly"] or None)
    except omegaconf.errors.OmegaConfBaseException as err:
        raise ValueError(str(err)) from err
    return out


def _is_plain(value: Any) -> bool:
    """Whether omegaconf looks into nothing of it: it looks into objects by getattr."""
    if type(value) is dict:
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | bytes | pathlib.Path | enum.Enum)


def _path_class(node: Mapping[str, Any]) -> type[pathlib.PurePath]:
    if node.get("windows") is True:
        return pathlib.PureWindowsPath
    return pathlib.PurePath if node["pure"] else pathlib.Path


def _torch_name(_: Rebuilder, node: Mapping[str, Any], __: TreePath) -> Any:
    return json_types.torch_value(node["v"], _TORCH_NAMES[node["$"]])


def put_together(stored: torch.Tensor, boxes: Sequence[Box]) -> torch.Tensor:
    """The array whose boxes `stored` has one behind another."""
    out, whole = torch.empty_like(stored), Box.whole(stored.shape)
    for box, part in zip(boxes, torch.split(stored.view(-1), [box.count for box in boxes]), strict=True):
        out[box.slices(whole)] = part.view(box.shape)
    return out


_KINDS: dict[str, Callable[[Rebuilder, Mapping[str, Any], TreePath], Any]] = {
    "tensor": Rebuilder.tensor,
    "sharded": Rebuilder.tensor,
    PACKED: Rebuilder.packed,
    "ndarray": _ndarray,
    "bytes": _bytes,
    "bytearray": _bytes,
    "pickle": Rebuilder.unpickle,
    "dict": lambda r, n, p: dict(r.pairs(n, p)),
    "odict": _odict,
    "defaultdict": _defaultdict,
    "counter": lambda r, n, p: collections.Counter(dict(r.pairs(n, p))),
    "mapping": _mapping,
    "tuple": lambda r, n, p: tuple(r.items(n, p)),
    "torch.Size": lambda r, n, p: torch.Size(r.items(n, p)),
    "namedtuple": _namedtuple,
    "set": lambda r, n, p: set(r.items(n, p)),
    "frozenset": lambda r, n, p: frozenset(r.items(n, p)),
    "deque": lambda r, n, p: collections.deque(r.items(n, p), n["maxlen"]),
    "namespace": _namespace,
    "simplenamespace": _namespace,
    "dataclass": _dataclass,
    "wrapper": _wrapper,
    "enum": _enum,
    "omegaconf": _omegaconf,
    "subclass": _subclass,
    "float": lambda _, n, __: _FLOATS[n["v"]],
    "complex": lambda r, n, p: complex(r.node(n["re"], p), r.node(n["im"], p)),
    "npscalar": lambda _, n, __: np.frombuffer(bytes.fromhex(n["hex"]), json_types.numpy_dtype(n["dtype"]))[0],
    "np.dtype": lambda _, n, __: json_types.numpy_dtype(n["v"]),
    "path": lambda _, n, __: _path_class(n)(n["v"]),
    "datetime": lambda _, n, __: datetime.datetime.fromisoformat(n["v"]).replace(fold=n["fold"]),
    "date": lambda _, n, __: datetime.date.fromisoformat(n["v"]),
    "time": lambda _, n, __: datetime.time.fromisoformat(n["v"]),
    "timedelta": lambda _, n, __: datetime.timedelta(*n["v"]),
    "uuid": lambda _, n, __: uuid.UUID(n["v"]),
    "decimal": lambda _, n, __: decimal.Decimal(n["v"]),
    "fraction": _fraction,
    "range": lambda _, n, __: range(*n["v"]),
    "slice": lambda _, n, __: slice(*n["v"]),
    "torch.dtype": _torch_name,
    "torch.memory_format": _torch_name,
    "torch.layout": _torch_name,
    "torch.device": lambda _, n, __: torch.device(n["v"]),
    "torch.Generator": _torch_generator,
    "np.Generator": _np_generator,
    "np.RandomState": _np_generator,
    "random.Random": _python_random,
}
