"""The arrays of a snapshot that a file of safetensors gets.

Tied tensors are stored once, as `safetensors.torch.save_model` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckpt_engine.errors import MismatchError
from ckpt_engine.grouping import grouped
from ckpt_engine.ranks.boxes import Box, boxes_of
from ckpt_engine.store import container
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.tree import require_written_out
from ckpt_engine.tools.float_formats import is_wider
from ckpt_engine.tools.outline import array_leaves, leaves

_ARRAY_KINDS = ("tensor", "sharded", "ndarray")
_METADATA = "__metadata__"
"""What a file of safetensors has besides arrays."""


@dataclass(frozen=True, slots=True)
class ExportedArray:
    """One array to write: its name in the file and where its bytes come from; `boxes`: where it is not in C order.

    Args:
        dtype: in the file.
        view: the part of the entry that it is, as its node says.
        stored: in the snapshot, if that is another one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    entry: str
    view: Mapping[str, Any] | None
    boxes: tuple[Box, ...] = ()
    stored: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Selection:
    """What goes into the file.

    Args:
        tied: other names → the stored name of the same array.
        left_out: values of the selected part that are no arrays.
    """

    arrays: tuple[ExportedArray, ...]
    tied: Mapping[str, str]
    left_out: int

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def opaque(self) -> tuple[str, ...]:
        """Arrays whose dtype safetensors lacks; they are stored as bytes."""
        return tuple(array.name for array in self.arrays if array.dtype not in container.DTYPES)

    def named(self, names: Mapping[str, str]) -> Selection:
        """Some of its arrays, each by a name in the file and its name here.

        Raises:
            KeyError: it lacks one of them.
        """
        known = {array.name: array for array in self.arrays}
        found = [replace(known[self.tied.get(name, name)], name=new) for new, name in names.items()]
        return Selection(_aligned(found), {}, 0)


def as_dtype(selection: Selection, target: str) -> Selection:
    """The selection with its wider floating-point numbers in the format `target`."""
    arrays = [
        replace(array, dtype=target, stored=array.dtype) if is_wider(array.dtype, target) else array
        for array in selection.arrays
    ]
    return replace(selection, arrays=_aligned(arrays))


def item_bytes(dtype: str) -> int:
    """Bytes per element of a torch dtype."""
    return container.item_bytes(dtype) or 1


def select(manifest: Manifest, component: str | None = None) -> Selection:
    """The arrays of one component, named by their keys below it, joined by "."; or all, by their paths, joined by "/".

    Raises:
        MismatchError: there is no such component, it has no arrays, or two arrays would get the same name.
    """
    if component is not None and component not in manifest.tree:
        raise MismatchError(
            f"{manifest.info.id} has no component {component!r}; it has: "
            f"{', '.join(name or '(the whole state)' for name in manifest.tree)}",
            hint="name one with --only, or take everything with --only '*'",
        )
    node, joint = (dict(manifest.tree), "/") if component is None else (manifest.tree[component], ".")
    require_written_out(node, manifest.entries)
    arrays = [
        _array(manifest, leaf, joint.join(path)) for path, leaf in array_leaves(node) if leaf["$"] in _ARRAY_KINDS
    ]
    if not arrays:
        raise MismatchError(f"there are no tensors in this part of {manifest.info.id}")
    name, many = Counter([_METADATA, *(array.name for array in arrays)]).most_common(1)[0]
    if many > 1:
        raise MismatchError(f"two arrays of {manifest.info.id} would be called {name!r} in the file")
    stored = grouped(((array.entry, repr(array.view)), array) for array in arrays).values()
    tied = {other.name: first.name for first, *others in stored for other in others}
    values = [one for one in leaves(node) if not isinstance(one, dict) or one.get("$") not in _ARRAY_KINDS]
    return Selection(_aligned(first for first, *_ in stored), tied, len(values))


def _aligned(arrays: Iterable[ExportedArray]) -> tuple[ExportedArray, ...]:
    """Large items first: every array is then aligned without holes, which the format forbids."""
    return tuple(sorted(arrays, key=lambda array: -item_bytes(array.dtype)))


def _array(manifest: Manifest, leaf: Mapping[str, Any], name: str) -> ExportedArray:
    entry = manifest.entries[leaf["entry"]]
    if (view := leaf.get("view")) is None:
        boxes = boxes_of(leaf, entry.shape)
        return ExportedArray(name, entry.dtype, entry.shape, leaf["entry"], None, boxes if len(boxes) > 1 else ())
    return ExportedArray(name, view["dtype"], tuple(view["shape"]), leaf["entry"], view)
