"""A snapshot's state with outlines in place of its tensors: what torch.distributed.checkpoint plans a load with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_engine.errors import FormatError
from ckpt_engine.ranks.boxes import Box, boxes_of
from ckpt_engine.restore.named import dtype_of
from ckpt_engine.restore.read import read_entries
from ckpt_engine.restore.rebuild import Rebuilder
from ckpt_engine.restore.sources import Sources
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.tree import TreePath

_OPEN = frozenset({"dict", "odict", "mapping", "defaultdict", "counter"})
"""Kinds that DCP looks into; all others are values to it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a snapshot.

    Args:
        entry: its entry, in which the boxes lie one behind another, each in C order.
        shape: of the tensor.
    """

    entry: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Outline:
    """What a load is planned with.

    Args:
        metadata: as DCP would have it.
        tensors: by name in DCP.
        values: all that is no tensor, by name.
    """

    metadata: Metadata
    tensors: Mapping[str, Stored]
    values: Mapping[str, Any]


def outline_of(sources: Sources, manifest: Manifest, pickle_paths: Sequence[str] = ()) -> Outline:
    """The outline of a snapshot. Tensors are not read, except those inside of what DCP takes for one value.

    Raises:
        CkptError: as `Rebuilder.state` and `read_entries`.
    """
    drawer = _Drawer(sources, manifest, pickle_paths)
    state = drawer.state(manifest.tree)
    flat, paths = flatten_state_dict(state if isinstance(state, dict) else {"": state})
    metadata = Metadata({}, planner_data=paths)
    tensors: dict[str, Stored] = {}
    values: dict[str, Any] = {}
    for name, found in flat.items():
        stored = drawer.drawn.get(id(found))
        if stored is None:
            metadata.state_dict_metadata[name] = BytesStorageMetadata()
            values[name] = found
            continue
        assert isinstance(found, torch.Tensor)
        chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.shape)) for box in stored.boxes]
        properties = TensorProperties(dtype=stored.dtype)
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, found.size(), chunks)
        tensors[name] = stored
    return Outline(metadata, tensors, values)


class _Drawer(Rebuilder):
    """Rebuilds a tree with tensors on the meta device; `drawn` tells by their address what they stand for."""

    def __init__(self, sources: Sources, manifest: Manifest, pickle_paths: Sequence[str]) -> None:
        super().__init__({}, pickle_paths)
        self._sources = sources
        self._manifest = manifest
        self._closed = 0
        self._read: dict[str, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []
        self.drawn: dict[int, Stored] = {}

    def node(self, node: Any, path: TreePath) -> Any:
        kind = node.get("$") if isinstance(node, dict) else None
        if kind is None or kind in _OPEN:
            return super().node(node, path)
        if self._closed == 0 and kind in ("tensor", "sharded") and "view" not in node:
            return self._draw(node, path)
        self._closed += 1
        try:
            return super().node(node, path)
        finally:
            self._closed -= 1

    def entry(self, node: Mapping[str, Any], path: TreePath) -> torch.Tensor:
        """Of a value: read now."""
        name = node["entry"]
        if name not in self._read:
            self._require(name, path)
            self._read[name] = read_entries(self._sources, self._manifest, [name])[name]
        return self._read[name]

    def _draw(self, node: Mapping[str, Any], path: TreePath) -> torch.Tensor:
        self._require(node["entry"], path)
        entry = self._manifest.entries[node["entry"]]
        dtype = dtype_of(entry.dtype)
        boxes = boxes_of(node, entry.shape)
        outline = torch.empty(entry.shape, dtype=dtype, device="meta")
        self._kept.append(outline)  # addresses must not be used again
        self.drawn[id(outline)] = Stored(node["entry"], dtype, entry.shape, boxes)
        return outline

    def _require(self, name: str, path: TreePath) -> None:
        if name not in self._manifest.entries:
            raise FormatError(f"{'/'.join(map(str, path))} refers to entry {name!r}, which the manifest lacks")
