"""Rebuild a state tree from a manifest's typed JSON (docs/format.md, "Tree"); the inverse of `snapshot.flatten`.

No code from the snapshot runs: classes are only looked up in modules that are already imported, and only if they are
of the kind the node says. What cannot be found comes back as a plain equivalent, and `Rebuilder.notes` says so.
"""

from __future__ import annotations

import argparse
import base64
import collections
import dataclasses
import datetime
import decimal
import enum
import fnmatch
import fractions
import pathlib
import pickle
import random
import sys
import types
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ckpt_engine.errors import FormatError, NewerFormatError
from ckpt_engine.ranks.boxes import boxes_of
from ckpt_engine.restore.blocks import put_together
from ckpt_engine.snapshot.kinds import FACTORIES

Path = tuple[Any, ...]


class Rebuilder:
    """Turns JSON nodes back into objects.

    Args:
        entries: contiguous tensors by container name, as read.
        pickle_paths: glob patterns of paths that may be unpickled; anything else pickled is refused.
        finished: entries that are the very tensors that the tree shall have.
    """

    def __init__(
        self,
        entries: Mapping[str, torch.Tensor],
        pickle_paths: Sequence[str] = (),
        finished: Collection[str] = (),
    ) -> None:
        self._entries = entries
        self._finished = frozenset(finished)
        self._pickle_paths = tuple(pickle_paths)
        self._tied: dict[tuple[Any, ...], torch.Tensor] = {}
        self.notes: list[str] = []

    def state(self, tree: Mapping[str, Any]) -> Any:
        """The whole state from `Manifest.tree`."""
        if list(tree) == [""]:
            return self.node(tree[""], ())
        return {key: self.node(node, (key,)) for key, node in tree.items()}

    def node(self, node: Any, path: Path) -> Any:
        """One node with everything below it.

        Raises:
            NewerFormatError: a kind this version does not know.
            FormatError: a pickled leaf that was not opted in, or a malformed node.
        """
        if isinstance(node, list):
            return [self.node(child, (*path, i)) for i, child in enumerate(node)]
        if not isinstance(node, dict):
            return node
        kind = node.get("$")
        if kind is None:
            return {key: self.node(child, (*path, key)) for key, child in node.items()}
        build = _KINDS.get(kind)
        if build is None:
            raise NewerFormatError(
                f"unknown node kind {kind!r} at {_show(path)}", hint="read it with a newer ckpt-engine"
            )
        try:
            return build(self, node, path)
        except (KeyError, TypeError, ValueError) as err:
            raise FormatError(f"malformed {kind!r} node at {_show(path)}: {err}") from err

    def items(self, node: Mapping[str, Any], path: Path) -> list[Any]:
        return [self.node(child, (*path, i)) for i, child in enumerate(node["items"])]

    def pairs(self, node: Mapping[str, Any], path: Path) -> list[tuple[Any, Any]]:
        out = []
        for raw_key, raw_value in node["items"]:
            key = self.node(raw_key, path)
            out.append((key, self.node(raw_value, (*path, key))))
        return out

    def find_class(self, name: str, fits: Callable[[type], bool], path: Path) -> type | None:
        """The class if its module is already imported and it is of the right kind; else None, with a note."""
        module_name, _, qualname = name.partition(":")
        found: Any = sys.modules.get(module_name)
        for part in qualname.split("."):
            found = getattr(found, part, None)
        if isinstance(found, type) and fits(found):
            return found
        self.notes.append(f"{_show(path)}: class {name} is not imported here, restored as a plain equivalent")
        return None

    def entry(self, node: Mapping[str, Any], path: Path) -> torch.Tensor:
        try:
            return self._entries[node["entry"]]
        except KeyError as err:
            raise FormatError(f"{_show(path)} refers to entry {node['entry']!r}, which the manifest lacks") from err

    def tensor(self, node: Mapping[str, Any], path: Path) -> torch.Tensor:
        """Leaves that shared memory when saved share it again."""
        if node["entry"] in self._finished:
            return self.entry(node, path)
        view, stride = node.get("view"), node.get("stride")
        key = (
            node["entry"],
            repr(view),
            tuple(stride or ()),
            repr(node.get("parameter")),
        )
        if key not in self._tied:
            raw = self.entry(node, path)
            if "blocks" in node:
                raw = put_together(raw, boxes_of(node, raw.shape))
            self._tied[key] = self._new_tensor(raw, view, stride, node.get("parameter"))
        return self._tied[key]

    def _new_tensor(
        self, raw: torch.Tensor, view: Mapping[str, Any] | None, stride: Sequence[int] | None, parameter: Any
    ) -> torch.Tensor:
        out = raw
        if view is not None:
            dtype = getattr(torch, view["dtype"])
            offset = raw.storage_offset() * raw.element_size() + view["byte_offset"]
            out = torch.empty(0, dtype=dtype)
            out.set_(raw.untyped_storage(), offset // dtype.itemsize, tuple(view["shape"]), tuple(view["stride"]))
        elif stride is not None:
            out = torch.empty_strided(raw.shape, tuple(stride), dtype=raw.dtype)
            out.copy_(raw)
        return torch.nn.Parameter(out, requires_grad=parameter["requires_grad"]) if parameter else out

    def unpickle(self, node: Mapping[str, Any], path: Path) -> Any:
        joined = "/".join(map(str, path))
        if not any(fnmatch.fnmatchcase(joined, pattern) for pattern in self._pickle_paths):
            raise FormatError(
                f"{joined} was stored with pickle, which can run code",
                hint=f"if you trust this snapshot, opt in with pickle: ['{joined}']",
            )
        return pickle.loads(base64.b64decode(node["b64"]))  # noqa: S301 - explicit opt-in for this path


def _show(path: Path) -> str:
    return "/".join(map(str, path)) or "(root)"


def _ndarray(r: Rebuilder, node: Mapping[str, Any], path: Path) -> np.ndarray[Any, Any]:
    raw = r.entry(node, path).contiguous().view(-1)
    flat = raw.view(torch.uint8).numpy() if raw.numel() else np.empty(0, dtype=np.uint8)
    array: np.ndarray[Any, Any] = flat.view(np.dtype(node["dtype"])).reshape(node["shape"])
    return array


def _bytes(r: Rebuilder, node: Mapping[str, Any], path: Path) -> bytes | bytearray:
    kind = bytes if node["$"] == "bytes" else bytearray
    return kind(base64.b64decode(node["b64"])) if "b64" in node else kind(r.entry(node, path).numpy().tobytes())


def _odict(r: Rebuilder, node: Mapping[str, Any], path: Path) -> collections.OrderedDict[Any, Any]:
    out = collections.OrderedDict(r.pairs(node, path))
    if "metadata" in node:
        out._metadata = r.node(node["metadata"], (*path, "_metadata"))  # type: ignore[attr-defined]
    return out


def _mapping(r: Rebuilder, node: Mapping[str, Any], path: Path) -> dict[Any, Any]:
    cls: Any = r.find_class(node["type"], lambda c: issubclass(c, dict), path)
    out: dict[Any, Any] = {} if cls is None else cls.__new__(cls)
    dict.update(out, r.pairs(node, path))
    return out


def _defaultdict(r: Rebuilder, node: Mapping[str, Any], path: Path) -> Any:
    factory = None if node["factory"] is None else FACTORIES[node["factory"]]
    return collections.defaultdict(factory, r.pairs(node, path))


def _namedtuple(r: Rebuilder, node: Mapping[str, Any], path: Path) -> Any:
    fields = tuple(node["fields"])
    cls = r.find_class(
        node["type"], lambda c: issubclass(c, tuple) and getattr(c, "_fields", None) == fields, path
    ) or collections.namedtuple(node["type"].rpartition(":")[2].rpartition(".")[2], fields)
    return tuple.__new__(cls, r.items(node, path))


def _fields(r: Rebuilder, node: Mapping[str, Any], path: Path) -> dict[str, Any]:
    return {name: r.node(child, (*path, name)) for name, child in node["fields"].items()}


def _dataclass(r: Rebuilder, node: Mapping[str, Any], path: Path) -> Any:
    values = _fields(r, node, path)
    cls: Any = r.find_class(node["type"], dataclasses.is_dataclass, path)
    if cls is None:
        return types.SimpleNamespace(**values)
    out = cls.__new__(cls)  # no __init__: nothing of the user's runs while loading
    for name, value in values.items():
        object.__setattr__(out, name, value)
    return out


def _enum(r: Rebuilder, node: Mapping[str, Any], path: Path) -> Any:
    cls: Any = r.find_class(node["type"], lambda c: issubclass(c, enum.Enum) and node["name"] in c.__members__, path)
    return node["name"] if cls is None else cls[node["name"]]


def _npscalar(_: Rebuilder, node: Mapping[str, Any], __: Path) -> Any:
    return np.frombuffer(bytes.fromhex(node["hex"]), dtype=np.dtype(node["dtype"]))[0]


def _torch_generator(r: Rebuilder, node: Mapping[str, Any], path: Path) -> torch.Generator:
    out = torch.Generator(node["device"])
    out.set_state(r.node(node["state"], (*path, "state")).clone())
    return out


def _np_generator(r: Rebuilder, node: Mapping[str, Any], path: Path) -> Any:
    state = r.node(node["state"], (*path, "state"))
    name = state["bit_generator"]
    if node["$"] == "np.RandomState":
        legacy = np.random.RandomState()
        legacy.set_state(state)
        return legacy
    if name not in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"):
        raise ValueError(f"unknown bit generator {name!r}")
    bits = getattr(np.random, name)()
    bits.state = state
    return np.random.Generator(bits)


def _python_random(r: Rebuilder, node: Mapping[str, Any], path: Path) -> random.Random:
    out = random.Random()
    out.setstate(r.node(node["state"], (*path, "state")))
    return out


def _omegaconf(r: Rebuilder, node: Mapping[str, Any], path: Path) -> Any:
    plain = r.node(node["container"], path)
    try:
        from omegaconf import OmegaConf
    except ImportError:
        r.notes.append(f"{_show(path)}: omegaconf is not installed, restored as plain containers")
        return plain
    out = OmegaConf.create(plain)
    OmegaConf.set_struct(out, node["flags"]["struct"] or None)
    OmegaConf.set_readonly(out, node["flags"]["readonly"] or None)
    return out


def _torch_name(_: Rebuilder, node: Mapping[str, Any], __: Path) -> Any:
    kind = getattr(torch, node["$"].removeprefix("torch."))
    found = getattr(torch, node["v"])
    if not isinstance(found, kind):
        raise ValueError(f"torch.{node['v']} is not a {node['$']}")
    return found


_KINDS: dict[str, Callable[[Rebuilder, Mapping[str, Any], Path], Any]] = {
    "tensor": Rebuilder.tensor,
    "sharded": Rebuilder.tensor,
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
    "namespace": lambda r, n, p: argparse.Namespace(**_fields(r, n, p)),
    "simplenamespace": lambda r, n, p: types.SimpleNamespace(**_fields(r, n, p)),
    "dataclass": _dataclass,
    "enum": _enum,
    "omegaconf": _omegaconf,
    "float": lambda _, n, __: float(n["v"]),
    "complex": lambda r, n, p: complex(r.node(n["re"], p), r.node(n["im"], p)),
    "npscalar": _npscalar,
    "np.dtype": lambda _, n, __: np.dtype(n["v"]),
    "path": lambda _, n, __: (pathlib.PurePath if n["pure"] else pathlib.Path)(n["v"]),
    "datetime": lambda _, n, __: datetime.datetime.fromisoformat(n["v"]).replace(fold=n["fold"]),
    "date": lambda _, n, __: datetime.date.fromisoformat(n["v"]),
    "time": lambda _, n, __: datetime.time.fromisoformat(n["v"]),
    "timedelta": lambda _, n, __: datetime.timedelta(*n["v"]),
    "uuid": lambda _, n, __: uuid.UUID(n["v"]),
    "decimal": lambda _, n, __: decimal.Decimal(n["v"]),
    "fraction": lambda _, n, __: fractions.Fraction(n["v"]),
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
