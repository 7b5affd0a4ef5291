"""From what all ranks have stored to the manifest of the one snapshot that it is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ckpt_engine.dcp.container import Block, Item
from ckpt_engine.errors import SnapshotFailedError
from ckpt_engine.persist.skeleton import Skeleton
from ckpt_engine.snapshot.software import software
from ckpt_engine.store import layout
from ckpt_engine.store.manifest import DataFile, Entry, Manifest, Piece, SnapshotInfo
from ckpt_engine.store.tree import TreePath


@dataclass(frozen=True, slots=True)
class Stored:
    """An item of the plan by its name in torch.distributed.checkpoint: a shard of a tensor, or a value."""

    name: str
    item: Item


def entry_name(path: TreePath) -> str:
    """The name of the array at a path of the state."""
    return "/".join(str(part).replace("~", "~0").replace("/", "~1") for part in path)


def manifest_of(
    snapshot: str, run: str, size: int, stored: Sequence[Stored], paths: Mapping[str, TreePath]
) -> Manifest:
    """The manifest.

    Args:
        size: ranks that have written.
        stored: of all ranks, in their order.
        paths: by name, the way to it through the state; what is not there is a key of the state itself.

    Raises:
        SnapshotFailedError: shards of a tensor are missing, or do not fit together.
    """
    files: dict[str, DataFile] = {}
    blocks: dict[str, list[tuple[Block, str]]] = {}
    nodes: dict[str, Any] = {}
    for one in stored:
        if one.item.file is not None:
            files[one.item.file.name] = one.item.file
        for block in one.item.blocks:
            assert one.item.file is not None
            blocks.setdefault(block.name, []).append((block, one.item.file.name))
        nodes[one.name] = one.item.node
    index = {name: number for number, name in enumerate(files)}
    entries: dict[str, Entry] = {}
    grids: dict[str, list[Any]] = {}
    for name, found in blocks.items():
        entries[name], grid = _entry(name, found, index)
        if grid is not None:
            grids[name] = grid
    tree: dict[str, Any] = {}
    for name, node in nodes.items():
        if isinstance(node, dict) and node.get("$") == "tensor" and node["entry"] in grids:
            node = {**node, "$": "sharded", "blocks": grids[node["entry"]]}
        _put(tree, paths.get(name, (name,)), node)
    whole = {key: _plain(node) for key, node in tree.items()}
    sizes = {name: sum(piece.nbytes for piece in entry.pieces) for name, entry in entries.items()}
    parsed = layout.parse_id(snapshot)
    assert parsed is not None
    info = SnapshotInfo(
        id=snapshot,
        seq=parsed.seq,
        step=parsed.step,
        epoch=None,
        reason="manual",
        created=time.time(),
        nbytes=sum(sizes.values()),
        components={key: sum(sizes[name] for name in Skeleton(node).entries) for key, node in whole.items()},
    )
    return Manifest(info, run, {"size": size}, software(), tuple(files.values()), entries, whole)


def _entry(name: str, found: Iterable[tuple[Block, str]], files: Mapping[str, int]) -> tuple[Entry, list[Any] | None]:
    """The entry that blocks make one behind another, and their boxes where that is not the array in C order."""
    ordered = sorted(found, key=lambda one: one[0].offsets)
    first = ordered[0][0]
    whole, at, in_order = first.whole, 0, True
    for block, _ in ordered:
        if (block.dtype, block.whole) != (first.dtype, whole):
            raise SnapshotFailedError(f"ranks have different shapes or dtypes of {name!r}: {whole} and {block.whole}")
        in_order = in_order and (block.shape == whole or _is_run(whole, block, at))
        at += prod(block.shape)
    if at != prod(whole):
        raise SnapshotFailedError(f"{at} of the {prod(whole)} elements of {name!r} were stored")
    pieces = tuple(
        Piece(files[file], offset, nbytes, digest, nbytes)
        for block, file in ordered
        for offset, nbytes, digest in block.pieces
    )
    grid = None if in_order else [[list(block.offsets), list(block.shape)] for block, _ in ordered if prod(block.shape)]
    return Entry(first.dtype, whole, pieces, first.container_dtype), grid


def _is_run(whole: tuple[int, ...], block: Block, at: int) -> bool:
    """Whether a box is a run of consecutive elements that begins with element `at`."""
    if not prod(block.shape):
        return True
    cut = next((d for d, n in enumerate(block.shape) if n != 1), len(whole))
    if block.shape[cut + 1 :] != whole[cut + 1 :]:
        return False
    start = 0
    for offset, n in zip(block.offsets, whole, strict=True):
        start = start * n + offset
    return start == at


def _put(root: dict[Any, Any], path: TreePath, node: Any) -> None:
    for key in path[:-1]:
        root = root.setdefault(key, _Inner())
    root[path[-1]] = node


class _Inner(dict[Any, Any]):
    """A part of the state on the way to its leaves, other than a leaf's node."""


def _plain(node: Any) -> Any:
    """Whole numbers as keys were places of a list; a key "$" needs a node of its own."""
    if not isinstance(node, _Inner):
        return node
    if all(isinstance(key, int) for key in node):
        return [_plain(node[key]) for key in sorted(node)]
    plain = {str(key): _plain(child) for key, child in node.items()}
    return {"$": "dict", "items": [list(pair) for pair in plain.items()]} if "$" in plain else plain
