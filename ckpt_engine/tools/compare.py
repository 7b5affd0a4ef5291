"""Finds where two snapshots differ, leaf by leaf.

What is stored under equal digests is not read.
"""

from __future__ import annotations

import json
import math
import re
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ckpt_engine.loop.capture import unpack
from ckpt_engine.observe import units
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.restore.choose import Candidate
from ckpt_engine.restore.read import read_entries
from ckpt_engine.state.json_types import open_generator
from ckpt_engine.state.rebuild import Rebuilder
from ckpt_engine.store.manifest import Entry
from ckpt_engine.store.tree import TreePath, entries_in, require_written_out
from ckpt_engine.tools.outline import children

PACKED = ("ckpt_engine", "packed")
"""The end of the path at which adapters, and each rank, keep what they need besides the state; compared by content."""
_AS_TEXT = ("ckpt_engine", "surroundings", "state")
"""The end of the path at which the counters of a transformers `Trainer` are, as one text of JSON."""
_ABSENT = "absent"
_ARRAYS = (torch.Tensor, np.ndarray)
_SEQUENCES = (list, tuple, deque)
_CONTAINERS = (Mapping, *_SEQUENCES, SimpleNamespace, Namespace)
_LOGGED_TIME = re.compile(r"ckpt_engine/(metrics|surroundings/state/log_history/\d+)/\w+_(runtime|per_second)$")


class DifferenceKind(StrEnum):
    """What differs."""

    TENSOR = "tensor"
    FORM = "form"
    VALUE = "value"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class LeafDifference:
    """One leaf that differs.

    Args:
        path: its keys joined by "/".
        a, b: what it is in each snapshot, for people; of a tensor the first elements that differ.
        differing, elements: of a tensor.
        index: of the first element that differs.
        max_abs: largest absolute difference of a tensor's numbers; None where they are no numbers, or not finite.
        relative: norm of the difference against that of the first tensor; None as above, and where the first is zero.
        nan, inf: how many elements are so in each snapshot; None where no number can be.
        stored: bytes that the tensor takes in each snapshot's files, and in those that it refers to; bases left out.
        nbytes: bytes of the tensor itself.
    """

    path: str
    kind: DifferenceKind
    a: str
    b: str
    differing: int | None = None
    elements: int | None = None
    index: tuple[int, ...] | None = None
    max_abs: float | None = None
    relative: float | None = None
    nan: tuple[int, int] | None = None
    inf: tuple[int, int] | None = None
    stored: tuple[int, int] | None = None
    nbytes: int | None = None

    @property
    def measured(self) -> bool:
        """Whether it is what a process measures: times, which no two runs share, and the order in which DDP sums, which
        it finds out after its first steps."""
        return _LOGGED_TIME.search(self.path) is not None or any(
            f"/ckpt_engine/{name}/" in f"/{self.path}/" for name in ("cadence", "gradient_order")
        )

    def __str__(self) -> str:
        if self.kind is DifferenceKind.TENSOR:
            most = "" if self.max_abs is None else f", largest difference {self.max_abs:.4g}"
            most += "" if self.relative is None else f" ({self.relative:.2g} of its norm)"
            return (
                f"{self.path}: {self.differing:,} of {self.elements:,} elements differ, "
                f"the first at {list(self.index or ())}: {self.a} and {self.b}{most}"
                f"{_not_finite('NaN', self.nan)}{_not_finite('Inf', self.inf)}{self._as_stored()}"
            )
        sides = {self.a, self.b} - {_ABSENT} if self.kind is DifferenceKind.MISSING else (self.a, self.b)
        return f"{self.path}: {' and '.join(sides)}"

    def _as_stored(self) -> str:
        if self.stored is None or not self.nbytes or self.stored[1] >= self.nbytes:
            return ""
        return f", stored as {units.size(self.stored[1])} of {units.size(self.nbytes)}"


class Comparison:
    """Two snapshots, compared when iterated over.

    Args:
        a, b: the snapshots.

    Attributes:
        compared: leaves seen, arrays and values.
    """

    def __init__(self, a: Candidate, b: Candidate) -> None:
        self._sides = (_Side(a), _Side(b))
        self.compared = 0

    def __iter__(self) -> Iterator[LeafDifference]:
        """The differences in the order of the state.

        Raises:
            CorruptError, FormatError, StorageError: one of them cannot be read.
        """
        yield from self._nodes(self._sides[0].tree, self._sides[1].tree, ())

    def _nodes(self, a: Any, b: Any, path: TreePath) -> Iterator[LeafDifference]:
        below_a, below_b = children(a), children(b)
        if below_a is None or below_b is None or _kind(a) != _kind(b):
            yield from self._leaves(a, b, path)
            return
        yield from self._keyed(dict(below_a), dict(below_b), path, self._nodes)

    def _leaves(self, a: Any, b: Any, path: TreePath) -> Iterator[LeafDifference]:
        if self._same(a, b):
            self.compared += 1
            return
        one, other = (side.rebuilt(node) for side, node in zip(self._sides, (a, b), strict=True))
        if path[-2:] == PACKED and isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            yield from self._objects(unpack(one)[0], unpack(other)[0], path[:-1])
        else:
            stored = self._sides[0].stored(a), self._sides[1].stored(b)
            for found in self._objects(one, other, path):
                yield replace(found, stored=stored) if found.kind is DifferenceKind.TENSOR else found

    def _same(self, a: Any, b: Any) -> bool:
        """Whether two leaf nodes are equal for sure, as far as manifests tell."""
        names_a, names_b = list(entries_in(a)), list(entries_in(b))
        if not names_a and not names_b:
            return bool(a == b) and type(a) is type(b)
        forms = (_without_entry(a), _without_entry(b))
        entries = (self._sides[0].entries(names_a), self._sides[1].entries(names_b))
        return bool(forms[0] == forms[1]) and [_stored(e) for e in entries[0]] == [_stored(e) for e in entries[1]]

    def _objects(self, a: Any, b: Any, path: TreePath) -> Iterator[LeafDifference]:
        if _opens(a, b):
            yield from self._keyed(_children(a), _children(b), path, self._objects)
        elif type(a) is type(b) and (first := open_generator(a)) and (second := open_generator(b)):
            (state_a,), (state_b,), key = first[0], second[0], first[1]
            yield from self._objects(state_a, state_b, (*path, *key))
        elif path[-3:] == _AS_TEXT and isinstance(a, str) and isinstance(b, str):
            yield from self._objects(json.loads(a), json.loads(b), path)
        else:
            self.compared += 1
            if (found := _difference("/".join(path) or "(root)", a, b)) is not None:
                yield found

    def _keyed(
        self, a: Mapping[str, Any], b: Mapping[str, Any], path: TreePath, go_on: Any
    ) -> Iterator[LeafDifference]:
        for key in dict.fromkeys((*a, *b)):
            if key in a and key in b:
                yield from go_on(a[key], b[key], (*path, key))
            else:
                sides = ("only in the first", _ABSENT) if key in a else (_ABSENT, "only in the second")
                yield LeafDifference("/".join((*path, key)), DifferenceKind.MISSING, *sides)


class _Side:
    """One of the two snapshots."""

    def __init__(self, snapshot: Candidate) -> None:
        self._manifest = snapshot.manifest
        self._sources = Sources([place.storage for place in snapshot.sources])
        self._views: dict[str, torch.Tensor] = {}
        tree = snapshot.manifest.tree
        self.tree: Any = tree[""] if list(tree) == [""] else tree

    def entries(self, names: Sequence[str]) -> list[Entry]:
        """What the manifest says of these entries."""
        return [self._manifest.entries[name] for name in names]

    def stored(self, node: Any) -> int:
        """Bytes that the entries of a node take."""
        return sum(piece.nbytes for entry in self.entries(list(set(entries_in(node)))) for piece in entry.pieces)

    def rebuilt(self, node: Any) -> Any:
        """The objects of one node."""
        require_written_out(node, self._manifest.entries)
        names = list(dict.fromkeys(entries_in(node)))
        if not (entries := self._views).keys() >= set(names):
            entries = read_entries(self._sources, self._manifest, names)
            if isinstance(node, dict) and "view" in node:
                self._views |= entries  # thousands of leaves may lie in it
        return Rebuilder(entries, plain=True).node(node, ())


def _kind(node: Any) -> Any:
    return node.get("$", "dict") if isinstance(node, dict) else type(node)


def _without_entry(node: Any) -> Any:
    """A leaf's node without the name of its entry, which may be another one for the same bytes."""
    return {key: value for key, value in node.items() if key != "entry"} if isinstance(node, dict) else node


def _stored(entry: Entry) -> tuple[Any, ...]:
    return entry.dtype, entry.shape, tuple((p.content_digest or p, p.raw_nbytes) for p in entry.pieces)


def _opens(a: Any, b: Any) -> bool:
    """Whether two values are compared child by child: sequences of plain values are compared as one value."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return True
    if type(a) is not type(b) or not isinstance(a, _CONTAINERS):
        return False
    return not isinstance(a, _SEQUENCES) or any(isinstance(child, (*_CONTAINERS, *_ARRAYS)) for child in (*a, *b))


def _children(value: Any) -> dict[str, Any]:
    found = value if isinstance(value, Mapping) else dict(enumerate(value)) if isinstance(value, _SEQUENCES) else None
    return {str(key): child for key, child in (vars(value) if found is None else found).items()}


def _difference(path: str, a: Any, b: Any) -> LeafDifference | None:
    one, other = _as_tensor(a), _as_tensor(b)
    if one is not None and other is not None and type(a) is type(b):
        return _arrays(path, one, other)
    if type(a) is type(b) and (np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b or repr(a) == repr(b)):
        return None
    return LeafDifference(path, DifferenceKind.VALUE, _shown(a), _shown(b))


def _arrays(path: str, a: torch.Tensor, b: torch.Tensor) -> LeafDifference | None:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return LeafDifference(path, DifferenceKind.FORM, _form(a), _form(b))
    flat_a, flat_b = a.detach().contiguous().view(-1), b.detach().contiguous().view(-1)
    size = flat_a.element_size()
    unequal = (flat_a.view(torch.uint8) != flat_b.view(torch.uint8)).view(len(flat_a), size).any(1)
    if not (count := int(unequal.sum())):
        return None
    first = int(unequal.nonzero()[0])
    index = tuple(int(i) for i in np.unravel_index(first, a.shape)) if a.dim() else ()
    return LeafDifference(
        path,
        DifferenceKind.TENSOR,
        _element(flat_a[first]),
        _element(flat_b[first]),
        count,
        flat_a.numel(),
        index,
        nbytes=flat_a.nbytes,
        **_numbers(flat_a, flat_b, unequal),
    )


def _numbers(a: torch.Tensor, b: torch.Tensor, unequal: torch.Tensor) -> dict[str, Any]:
    """What the numbers of two tensors of one form say, by the names of `LeafDifference`."""
    found: dict[str, Any] = {}
    if a.dtype.is_floating_point and a.element_size() == 1:
        a, b = a.float(), b.float()  # not every kernel knows the small types
    if a.dtype.is_floating_point or a.dtype.is_complex:
        found = {
            name: (int(of(a).sum()), int(of(b).sum())) for name, of in (("nan", torch.isnan), ("inf", torch.isinf))
        }
    if a.dtype.is_complex or a.dtype is torch.bool:
        return found
    apart = a[unequal].to(torch.float64) - b[unequal].to(torch.float64)
    whole = a if a.dtype.is_floating_point else a.to(torch.float64)
    norm = float(torch.linalg.vector_norm(whole, dtype=torch.float64))
    found["max_abs"] = float(apart.abs().max())
    found["relative"] = float(torch.linalg.vector_norm(apart)) / norm if norm else math.nan
    return {name: one for name, one in found.items() if isinstance(one, tuple) or math.isfinite(one)}


def _not_finite(what: str, counts: tuple[int, int] | None) -> str:
    return f", {counts[0]:,} and {counts[1]:,} {what}" if counts is not None and any(counts) else ""


def _as_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, bytes | bytearray):
        return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value)) if value.dtype.kind in "biufc" else None
    return None


def _element(value: torch.Tensor) -> str:
    found = value.item()
    return f"{found:.9g}" if isinstance(found, float) else str(found)


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _shown(value: Any) -> str:
    tensor = _as_tensor(value)
    text = _form(tensor) if tensor is not None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
