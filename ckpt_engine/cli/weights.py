"""Copies arrays of a snapshot into one safetensors file, verified on the way. No torch.

Tied tensors are stored once, as `safetensors.torch.save_model` does: the metadata maps each other name to the stored
one, and `safetensors.torch.load_model` ties them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, BinaryIO

import numpy as np

from ckpt_engine.cli.downcast import Loss, is_wider, narrow
from ckpt_engine.cli.tree import ArrayLeaf, array_leaves, children
from ckpt_engine.errors import CorruptError, MismatchError
from ckpt_engine.ranks.boxes import Box, boxes_of
from ckpt_engine.restore.sources import Sources
from ckpt_engine.store import container
from ckpt_engine.store.manifest import Entry, Manifest
from ckpt_engine.store.tree import require_written_out

_BLOCK_BYTES = 4 << 20
_ARRAY_KINDS = ("tensor", "sharded", "ndarray")


@dataclass(frozen=True, slots=True)
class View:
    """A part of an entry's bytes: strides in elements, like torch."""

    byte_offset: int
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Array:
    """One array to write: its name in the file and where its bytes come from; `boxes`: where it is not in C order.

    Args:
        dtype: in the file.
        stored: in the snapshot, if that is another one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    entry: Entry
    entry_name: str
    view: View | None
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

    arrays: tuple[Array, ...]
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


def select_component(manifest: Manifest, component: str) -> Selection:
    """The arrays of one component, named by their keys below it, joined by ".".

    Raises:
        MismatchError: there is no such component, it has no arrays, or two arrays would get the same name.
    """
    if component not in manifest.tree:
        names = ", ".join(name or "(the whole state)" for name in manifest.tree)
        raise MismatchError(
            f"{manifest.info.id} has no component {component!r}; it has: {names}",
            hint="name one with --component, or take everything with --all",
        )
    return _select(manifest, manifest.tree[component], lambda leaf: ".".join(leaf.path))


def select_all(manifest: Manifest) -> Selection:
    """Every array of the state, named by its path, joined by "/".

    Raises:
        MismatchError: as `select_component`.
    """
    return _select(manifest, dict(manifest.tree), lambda leaf: "/".join(leaf.path))


def write(
    sources: Sources, manifest: Manifest, selection: Selection, out: BinaryIO, advance: Callable[[int], object]
) -> Loss:
    """Write the file; `advance` is told the bytes written. What conversion has lost.

    Raises:
        CorruptError: the snapshot is damaged in all sources; names the entry.
        NewerFormatError: it is encoded in a way this version does not know.
    """
    rows = [(a.name, *container.container_form(a.dtype, a.shape, a.nbytes), a.nbytes) for a in selection.arrays]
    metadata = {"format": "pt", **selection.tied}
    metadata |= {
        f"ckpt-engine.{a.name}": f"{a.dtype} {list(a.shape)}" for a in selection.arrays if a.name in selection.opaque
    }
    out.write(container.build_header(rows, metadata))
    loss = Loss()
    for array in selection.arrays:
        blocks = _blocks(sources, manifest, array)
        for stored in _in_order(array, blocks):
            block = stored if array.stored is None else narrow(stored, array.stored, array.dtype, loss)
            out.write(block)
            advance(len(block))
    return loss


def _select(manifest: Manifest, node: Any, name_of: Callable[[ArrayLeaf], str]) -> Selection:
    require_written_out(node, manifest.entries)
    stored: dict[tuple[str, str], Array] = {}
    tied: dict[str, str] = {}
    taken: set[str] = set()
    for leaf in array_leaves(node):
        if leaf.node["$"] not in _ARRAY_KINDS:
            continue
        array = _array(manifest, leaf, name_of(leaf))
        if array.name in taken or array.name == "__metadata__":
            raise MismatchError(f"two arrays of {manifest.info.id} would be called {array.name!r} in the file")
        taken.add(array.name)
        same = stored.setdefault((array.entry_name, repr(leaf.node.get("view"))), array)
        if same is not array:
            tied[array.name] = same.name
    if not stored:
        raise MismatchError(f"there are no tensors in this part of {manifest.info.id}")
    return Selection(_aligned(stored.values()), tied, _others(node))


def _aligned(arrays: Iterable[Array]) -> tuple[Array, ...]:
    """Large items first: every array is then aligned without holes, which the format forbids."""
    return tuple(sorted(arrays, key=lambda array: -item_bytes(array.dtype)))


def _array(manifest: Manifest, leaf: ArrayLeaf, name: str) -> Array:
    entry = manifest.entries[leaf.entry]
    view = leaf.node.get("view")
    if view is None:
        boxes = boxes_of(leaf.node, entry.shape)
        return Array(name, entry.dtype, entry.shape, entry, leaf.entry, None, boxes if len(boxes) > 1 else ())
    part = View(view["byte_offset"], tuple(view["stride"]))
    return Array(name, view["dtype"], tuple(view["shape"]), entry, leaf.entry, part)


def _others(node: Any) -> int:
    """Leaves that are no arrays."""
    below = children(node)
    if below is not None:
        return sum(_others(child) for _, child in below)
    return 0 if isinstance(node, dict) and node.get("$") in _ARRAY_KINDS else 1


def _blocks(sources: Sources, manifest: Manifest, array: Array) -> Iterator[bytearray]:
    """The entry's bytes, piece by piece, each verified."""
    decoder = sources.decoder(manifest)
    start = 0
    for piece in array.entry.pieces:
        block = bytearray(piece.raw_nbytes)
        try:
            decoder.read(array.entry_name, start, piece, memoryview(block))
        except CorruptError as err:
            file = manifest.files[piece.file].name
            hint = "`ckpt verify` shows which snapshots are whole"
            raise CorruptError(f"{array.entry_name!r} in {file} is not what was written", hint=hint) from err
        yield block
        start += piece.raw_nbytes


def _in_order(array: Array, blocks: Iterator[bytearray]) -> Iterator[bytes | bytearray]:
    """The bytes of an array in C order."""
    if array.view is not None:
        yield from _cut_view(array, array.view, b"".join(blocks))
    elif array.boxes:
        yield _put_together(array, b"".join(blocks))
    else:
        yield from blocks


def _put_together(array: Array, stored: bytes) -> bytes:
    """The bytes of an array whose boxes lie one behind another."""
    size = item_bytes(array.stored or array.dtype)
    out = np.empty((*array.shape, size), np.uint8)
    whole, at = Box.whole(array.shape), 0
    for box in array.boxes:
        end = at + box.count * size
        out[box.slices(whole)] = np.frombuffer(stored[at:end], np.uint8).reshape(*box.shape, size)
        at = end
    return out.tobytes()


def _cut_view(array: Array, view: View, whole: bytes) -> Iterator[bytes]:
    """The bytes of a view in C order; a few at a time, as it may repeat what it has."""
    size = item_bytes(array.stored or array.dtype)
    strides = (*(step * size for step in view.stride), 1)
    raw = np.frombuffer(whole, np.uint8, offset=view.byte_offset)
    yield from _in_blocks(np.lib.stride_tricks.as_strided(raw, (*array.shape, size), strides, writeable=False))


def _in_blocks(rows: Any) -> Iterator[bytes]:
    if rows.nbytes <= _BLOCK_BYTES:
        yield rows.tobytes()
        return
    step = _BLOCK_BYTES // rows[0].nbytes
    for start in range(0, len(rows), step or 1):
        yield from (rows[start : start + step].tobytes(),) if step else _in_blocks(rows[start])
