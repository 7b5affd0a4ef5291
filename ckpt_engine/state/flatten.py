"""Walks a state: arrays, values, and a skeleton of what each container is and has beside its items; the skeleton is
used again while the structure stays the same.

Two passes share one traversal order. `scan` is the fast one, run at every snapshot: it collects the live arrays, the
encoded values of the other leaves, and a signature of the structure. Only when the signature differs from the cached
one does `describe` run: it builds the typed JSON skeleton with a path for every array.
"""

from __future__ import annotations

import fnmatch
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

from ckpt_engine.errors import StateError, UnstorableLeafError
from ckpt_engine.observe.events import LOG
from ckpt_engine.state import sharding
from ckpt_engine.state.json_types import encode_bytes, encode_float, encode_scalar, open_container, problem_of
from ckpt_engine.store.json_checks import is_shallow
from ckpt_engine.store.tree import TreePath

try:
    from torch._C._dynamo.guards import TensorGuards  # not public: what it tells is probed, see `_are_told`
except ImportError:
    TensorGuards = None  # type: ignore[assignment, misc]

T = TypeVar("T")

INLINE_BYTES = 64
"""Bytes objects up to this size live in the manifest, longer ones in the container."""

MAX_DEPTH = 200
_MAX_NESTING = 300
"""Of the JSON, where some kinds take three levels: what is nested deeper cannot be written by a recursive encoder."""
_SHORT = 1 << 63
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
_VALUE = object()
_TOGETHER = 512
LazyPredicate = Callable[[TreePath], bool]
"""True for array leaves that do not change before the next fence."""


@dataclass(frozen=True, slots=True)
class Scan:
    """One component of live state, flattened.

    Args:
        signature: equal for equal structure (types, keys, lengths; not tensor shapes).
        arrays: live tensors in traversal order (numpy arrays and bytes as tensors over the same memory; of a DTensor
            what this rank has).
        values: JSON nodes of the other leaves in traversal order.
        copied: indices of arrays that are private copies, made by this scan.
    """

    signature: list[Any]
    arrays: list[torch.Tensor]
    values: list[Any]
    copied: list[int]


class Forms:
    """Of all arrays of a state: class, dtype, device, layout, shape, strides, gradient, and whether a view negates.

    Compared in one call, which takes a tenth of the time that the questions take one by one. Where torch does not give
    that call, or it misses something, no arrays have them: then each snapshot is planned, which is slower, and said.
    """

    def __init__(self, arrays: Sequence[torch.Tensor]) -> None:
        objects = list(map(id, arrays))
        self._same = first_of(objects) if len(set(objects)) < len(objects) else None
        distinct = list(dict(zip(objects, arrays, strict=True)).values())
        self._count = len(distinct)
        starts = range(0, len(distinct), _TOGETHER)
        self._guards = [_guards(distinct[at : at + _TOGETHER]) for at in starts] if _are_told() else None

    def addresses(self, arrays: Sequence[torch.Tensor]) -> list[int] | None:
        """Those of these arrays, if they have these forms in their order."""
        objects, distinct = list[int](), arrays
        if self._same is not None:  # the call refuses an object that comes twice
            objects = list(map(id, arrays))
            if first_of(objects) != self._same:
                return None
            distinct = list(dict(zip(objects, arrays, strict=True)).values())
        if self._guards is None or len(distinct) != self._count:
            return None
        found: list[int] = []
        with _any_mode():
            # Few at once, so that the processor still has them at hand when they are asked for their addresses.
            for at, guards in zip(range(0, self._count, _TOGETHER), self._guards, strict=True):
                part = distinct[at : at + _TOGETHER]
                if not guards.check(*part):
                    return None
                found += map(torch.Tensor.data_ptr, part)
        if self._same is None:
            return found
        by_object = dict(zip(map(id, distinct), found, strict=True))
        return [by_object[one] for one in objects]


def first_of(numbers: Sequence[int]) -> list[int]:
    """For each the index of the first one that is equal; of zeros their own."""
    first: dict[int, int] = {}
    return [first.setdefault(number, i) if number else i for i, number in enumerate(numbers)]


@contextmanager
def _any_mode() -> Iterator[None]:
    """Inside, what is asked of tensors has one answer, whatever mode the caller computes in."""
    with torch.inference_mode(False), torch._C._DisableAutocast():
        yield


@_any_mode()
def _guards(arrays: Iterable[torch.Tensor]) -> TensorGuards:
    return TensorGuards(*arrays, dynamic_dims_sizes=None, dynamic_dims_strides=None)


@cache
def _are_told() -> bool:
    """Whether torch tells of each way in which the form of a tensor can differ."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            one = torch.zeros(2, 2)
            others = [
                torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False),
                torch.zeros(2, 2, dtype=torch.int32),
                torch.zeros(2, 2, device="meta"),
                torch.zeros(2, 2).to_sparse(),
                torch.zeros(2, 3),
                torch.zeros(2, 2).t(),
                torch.zeros(2, 2).requires_grad_(),
                torch._neg_view(torch.zeros(2, 2)),
            ]
            guards = _guards([one, one.clone()])
            with _any_mode():
                told = guards.check(one.clone(), one) and not any(guards.check(one, other) for other in others)
    except Exception:  # noqa: BLE001 - whatever another version does with a name that is not public
        told = False
    if not told:
        LOG.info("this torch does not compare the forms of tensors in one call: each snapshot is planned")
    return told


@dataclass(frozen=True, slots=True)
class ArrayLeaf:
    """Where an array of a `Scan` sits in the tree, and its skeleton node (filled with `entry` by the planner).

    `shard` tells of a DTensor how it is divided over the ranks.
    """

    path: TreePath
    node: dict[str, Any]
    shard: sharding.Shard | None = None


@dataclass(frozen=True, slots=True)
class ComponentSkeleton:
    """The typed JSON of one component with `{"$":"v","i":n}` for value n, and its array leaves in scan order."""

    tree: Any
    leaves: tuple[ArrayLeaf, ...]


@torch.inference_mode(False)
def bytes_tensor(data: bytes | bytearray) -> torch.Tensor:
    """A uint8 tensor over a private copy of `data`."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@torch.inference_mode(False)
def array_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor with the array's elements; a uint8 tensor of its bytes where torch has no such dtype or byte order."""
    contiguous = np.array(array, order="C", copy=True)
    try:
        return torch.from_numpy(contiguous)
    except (TypeError, ValueError):
        return bytes_tensor(contiguous.tobytes())


@dataclass(eq=False)
class Flattener:
    """Flattens components of one run.

    Args:
        _pickle_paths: glob patterns over "/"-joined paths whose unknown objects are pickled (explicit opt-in).

    Not thread safe: used on the training thread only.
    """

    _pickle_paths: Sequence[str] = ()

    def scan(self, node: Any, root: TreePath) -> Scan:
        """Flatten `node`.

        Raises:
            UnstorableLeafError: names the leaf that would need pickle.
            StateError: the tree contains itself.
        """
        out = Scan([], [], [], [])
        try:
            self._scan(node, out)
        except Exception as err:
            self.describe(node, root)  # raises with the path
            raise UnstorableLeafError(f"cannot store {show_path(root)}: {type(err).__name__}: {err}") from err
        return out

    def _scan(self, node: Any, out: Scan) -> None:
        kind = type(node)
        if kind in _TENSOR_TYPES:
            out.signature.append(kind)
            out.arrays.append(node)
        elif kind is dict:
            out.signature.extend((dict, len(node)))
            out.signature.extend(node)
            if "$" in node or not set(map(type, node)) <= {str}:
                out.signature.extend(map(type, node))
                _require_keys(node)
            self._scan_all(node.values(), out)
        elif kind is str or kind is int:
            plain = node.isascii() if kind is str else -_SHORT < node < _SHORT
            if not plain and problem_of(node) is not None:
                raise _UnknownLeafError
            out.signature.append(_VALUE)
            out.values.append(node)
        elif kind is bool or node is None:
            out.signature.append(_VALUE)
            out.values.append(node)
        elif kind is float:
            out.signature.append(_VALUE)
            out.values.append(node if math.isfinite(node) else encode_float(node))
        elif kind is list or kind is tuple:
            out.signature.extend((kind, len(node)))
            for child in node:
                self._scan(child, out)
        elif kind is OrderedDict:
            metadata = getattr(node, "_metadata", None)  # torch's state_dict versions ride on an attribute
            out.signature.extend((OrderedDict, len(node), metadata is None))
            out.signature.extend(node)
            _require_keys(node)
            self._scan_all(node.values(), out)
            if metadata is not None:
                self._scan(metadata, out)
        else:
            self._scan_other(node, out)

    def _scan_all(self, children: Collection[Any], out: Scan) -> None:
        kinds = list(map(type, children))
        if set(kinds).issubset(_TENSOR_TYPES):
            out.signature.extend(kinds)
            out.arrays.extend(children)
            return
        for child in children:
            self._scan(child, out)

    def _scan_other(self, node: Any, out: Scan) -> None:
        if sharding.is_sharded(node):
            out.signature.extend(sharding.signature(node))
            out.arrays.append(sharding.local(node))
            return
        array = _as_array(node)
        if array is not None:
            out.signature.extend((type(node), getattr(node, "dtype", None), getattr(node, "shape", None)))
            out.copied.append(len(out.arrays))
            out.arrays.append(array)
            return
        opened = open_container(node)
        if opened is not None:
            children, keys, wrap = opened
            out.signature.extend((type(node), len(children), repr(wrap([None] * len(children))), *map(str, keys)))
            for child in children:
                self._scan(child, out)
            return
        encoded = encode_scalar(node)
        if encoded is None:
            if not self._pickle_paths:
                raise _UnknownLeafError
            # Whether this leaf may be pickled depends on its path, which only `describe` knows.
            encoded = _pickled(node)
            out.signature.append("pickle")
        elif problem_of(encoded) is not None:
            raise _UnknownLeafError
        out.signature.append(_VALUE)
        out.values.append(encoded)

    def describe(self, node: Any, root: TreePath) -> ComponentSkeleton:
        """The skeleton of `node`; leaves and values are numbered in the order of `scan`.

        Raises:
            UnstorableLeafError, StateError: as `scan`, with the path of the leaf.
        """
        leaves: list[ArrayLeaf] = []
        counter = [0]
        for key in root:
            _require_plain(key, root)

        def visit(item: Any, path: TreePath) -> Any:
            if len(path) > MAX_DEPTH:
                where = show_path(path[:8])
                raise UnstorableLeafError(
                    f"state is nested deeper than {MAX_DEPTH} levels at {where}/… (does it contain itself?)"
                )
            kind = type(item)
            if kind in _TENSOR_TYPES:
                return _tensor_leaf(item, path, leaves)
            if sharding.is_sharded(item):
                return _sharded_leaf(item, path, leaves)
            if kind is dict and "$" not in item and all(type(k) is str for k in item):
                return {_key(k, path): visit(v, (*path, k)) for k, v in item.items()}
            if kind is dict:
                return {"$": "dict", "items": [[_key(k, path), visit(v, (*path, k))] for k, v in item.items()]}
            if kind is OrderedDict:
                items = [[_key(k, path), visit(v, (*path, k))] for k, v in item.items()]
                metadata = getattr(item, "_metadata", None)
                extra = {} if metadata is None else {"metadata": visit(metadata, (*path, "_metadata"))}
                return {"$": "odict", "items": items, **extra}
            if kind is list:
                return [visit(v, (*path, i)) for i, v in enumerate(item)]
            if kind is tuple:
                return {"$": "tuple", "items": [visit(v, (*path, i)) for i, v in enumerate(item)]}
            if kind not in (int, str, bool, float) and item is not None:
                if _naming(path, _as_array, item) is not None:
                    return _array_leaf(item, path, leaves)
                opened = _naming(path, open_container, item)
                if opened is not None:
                    children, keys, wrap = opened
                    _require_plain(wrap([None] * len(children)), path)
                    return wrap([visit(c, (*path, k)) for c, k in zip(children, keys, strict=True)])
            self._require_storable(item, path)
            index = counter[0]
            counter[0] += 1
            return {"$": "v", "i": index}

        tree = visit(node, root)
        if not is_shallow(tree, _MAX_NESTING + 1):
            raise UnstorableLeafError(
                f"the state at {show_path(root)} is nested too deeply: more than {_MAX_NESTING} levels of JSON, where "
                "tuples take two, and dicts with keys that are no texts three"
            )
        return ComponentSkeleton(tree, tuple(leaves))

    def _require_storable(self, item: Any, path: TreePath) -> None:
        """Raises UnstorableLeafError unless the leaf has a JSON node."""
        encoded = _naming(path, encode_scalar, item)
        if encoded is not None:
            _require_plain(encoded, path)
        elif item is not None:
            joined = show_path(path)
            if not any(fnmatch.fnmatchcase(joined, pattern) for pattern in self._pickle_paths):
                raise _unstorable(item, path)
            _naming(path, _pickled, item)


class _UnknownLeafError(Exception):
    """Raised by the fast pass, which knows no paths."""


def _pickled(item: Any) -> Any:
    return encode_bytes("pickle", pickle.dumps(item))


def _naming(path: TreePath, encode: Callable[[Any], T], item: Any) -> T:
    """What `encode` makes of `item`; an exception of a user's class gets the path."""
    try:
        return encode(item)
    except Exception as err:
        kind = f"{type(item).__module__}.{type(item).__qualname__}"
        what = f"{type(err).__name__}: {err}"
        raise UnstorableLeafError(f"cannot store object of type {kind} at {show_path(path)}: {what}") from err


def _require_plain(encoded: Any, path: TreePath) -> None:
    """Raises UnstorableLeafError if the encoded leaf could not be written."""
    problem = problem_of(encoded)
    if problem is not None:
        raise UnstorableLeafError(f"cannot store what is at {show_path(path)}: {problem}")


def _as_array(node: Any) -> torch.Tensor | None:
    if isinstance(node, np.ndarray) and type(node) not in (np.ndarray, np.memmap):
        return None  # as an array it would lose its mask, its unit, or what its operators mean
    if isinstance(node, np.ndarray):
        return None if node.dtype.hasobject or node.dtype.names else array_tensor(node)
    if isinstance(node, bytes | bytearray) and len(node) > INLINE_BYTES:
        return bytes_tensor(node)
    return None


def _tensor_leaf(
    tensor: torch.Tensor, path: TreePath, leaves: list[ArrayLeaf], shard: sharding.Shard | None = None
) -> dict[str, Any]:
    problem = tensor_problem(tensor)
    if problem:
        raise UnstorableLeafError(
            f"cannot store tensor at {show_path(path)}: {problem}",
            hint="convert it to a dense tensor in the state you save",
        )
    node: dict[str, Any] = {"$": "tensor"}
    if isinstance(tensor, torch.nn.Parameter):
        node["parameter"] = {"requires_grad": tensor.requires_grad}
    elif tensor.requires_grad and tensor.is_leaf:
        node["requires_grad"] = True
    if tensor.device.type != "cpu":
        node["device"] = str(tensor.device)
    leaves.append(ArrayLeaf(path, node, shard))
    return node


def _sharded_leaf(tensor: Any, path: TreePath, leaves: list[ArrayLeaf]) -> dict[str, Any]:
    problem = sharding.problem(tensor)
    if problem:
        raise UnstorableLeafError(
            f"cannot store DTensor at {show_path(path)}: {problem}", hint="save tensor.full_tensor() in its place"
        )
    live = tensor if isinstance(tensor, torch.Tensor) else sharding.local(tensor)
    return _tensor_leaf(live, path, leaves, sharding.shard_of(tensor))


def _array_leaf(item: Any, path: TreePath, leaves: list[ArrayLeaf]) -> dict[str, Any]:
    node: dict[str, Any] = {"$": type(item).__name__}
    if isinstance(item, np.ndarray):
        node = {"$": "ndarray", "dtype": item.dtype.str, "shape": list(item.shape)}
    leaves.append(ArrayLeaf(path, node))
    return node


def _require_keys(node: Mapping[Any, Any]) -> None:
    for key in node:
        if type(key) is not str and type(key) is not int:
            _key(key, ())


def _key(key: Any, path: TreePath) -> Any:
    if type(key) is tuple:
        return {"$": "tuple", "items": [_key(k, path) for k in key]}
    encoded = key if key is None or type(key) in (int, str, bool) else _naming(path, encode_scalar, key)
    _require_plain(encoded, (*path, key))
    if encoded is None and key is not None:
        raise UnstorableLeafError(
            f"cannot store a dict key of type {type(key).__name__} at {show_path(path)}",
            hint="use str, int, tuple or enum keys",
        )
    return encoded


def tensor_problem(tensor: torch.Tensor) -> str | None:
    """Why a tensor has no plain dense bytes, or None."""
    if tensor.layout is not torch.strided:
        return f"layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_nested:
        return "nested layout"
    if tensor.is_quantized:
        return f"quantized dtype {tensor.dtype}"
    if tensor.device.type == "meta":
        return "meta device, it has no data"
    return None


def _unstorable(item: Any, path: TreePath) -> UnstorableLeafError:
    kind = f"{type(item).__module__}.{type(item).__qualname__}"
    what = f"object of type {kind}"
    if isinstance(item, torch.Tensor):
        what, hint = f"tensor subclass {kind}", "opt in with pickle: [that path], or save its plain tensors"
    elif callable(getattr(owner := getattr(item, "__self__", item), "state_dict", None)):
        hint = f"save its state: the result of state_dict() of the {type(owner).__name__}"
    else:
        hint = "store plain data instead (numbers, strings, tensors, dataclasses), or opt in with pickle: [that path]"
    return UnstorableLeafError(f"cannot store {what} at {show_path(path)} without pickle", hint=hint)


def show_path(path: TreePath) -> str:
    """The path as people read it: keys joined by "/"."""
    return "/".join(map(_shown, path)) or "(root)"


def _shown(key: Any) -> str:
    """A key as text that can be printed, whatever it is."""
    if type(key) is str and key.isascii():
        return key
    try:
        return str(key).encode(errors="backslashreplace").decode()
    except Exception:  # noqa: BLE001 - of a class of the user's, or a number of too many digits
        return f"({type(key).__name__})"


def problems(node: Any, root: TreePath, flattener: Flattener | None = None) -> str | None:
    """Why `node` cannot be stored, or None. For adapters that may leave optional parts out."""
    try:
        (flattener or Flattener()).describe(node, root)
    except StateError as err:
        return err.message
    return None


def shapes_of(node: Any, path: TreePath = ()) -> dict[str, tuple[int, ...]]:
    """Shapes of the live tensors of a state, by "/"-joined path.

    Raises:
        StateError: it is nested deeper than any state that can be saved.
    """
    if len(path) > MAX_DEPTH:
        raise StateError(f"`into` is nested too deeply at {show_path(path[:8])}/… (does it contain itself?)")
    if sharding.is_wrapper(node):
        node = {name: getattr(node, name) for name in node.__tensor_flatten__()[0]}
    if isinstance(node, torch.Tensor | sharding.FlatPart):
        return {show_path(path) if path else "": tuple(node.shape)}
    rows: Iterable[Any] = node.items() if isinstance(node, Mapping) else ()
    rows = enumerate(node) if isinstance(node, list | tuple) else rows
    return {where: shape for key, child in rows for where, shape in shapes_of(child, (*path, key)).items()}
