"""Snapshots through `torch.distributed.checkpoint`.

`CkptWriter` is for `dcp.save` and `dcp.async_save`, `CkptReader` for `dcp.load`. DCP plans who stores what, the
coordinator commits it with one put. Each rank writes what the plan gives it as one data file
(`interop.dcp_container.Container`) with a digest of every piece. `manifest_of` makes the manifest of the snapshot from
what all ranks have stored.
"""

from __future__ import annotations

import io
import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckpt_engine.copy.job import KeySkeleton
from ckpt_engine.errors import ConfigError, SnapshotFailedError, StateError
from ckpt_engine.grouping import grouped
from ckpt_engine.interop.dcp_container import Block, Container, DcpArray, DcpItem, host, put_at
from ckpt_engine.interop.dcp_reader import CkptReader, NamedByStep, Root, Save, config_of, parsed_of, step_of
from ckpt_engine.ranks.boxes import Grid, tiles
from ckpt_engine.snapshot.save_request import software
from ckpt_engine.state.entries import entry_name
from ckpt_engine.state.flatten import Flattener
from ckpt_engine.store import names
from ckpt_engine.store.manifest import DataFile, Entry, Manifest, SnapshotInfo
from ckpt_engine.store.retention_rules import KeepAll, RetentionPolicy, policy_from
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.tree import TreePath

__all__ = ["CkptReader", "CkptWriter"]
_written: set[_Task] = set()
"""What this process has written: a planner that caches its plans hands out old ones again."""


@dataclass(frozen=True, slots=True)
class _Task:
    """What the coordinator tells a rank with its plan."""

    snapshot: str
    rank: int


class CkptWriter(NamedByStep, StorageWriter):
    """Writes what `torch.distributed.checkpoint` plans as a snapshot of a run: all of it, or nothing.

    One rank, the coordinator, holds the run's lease while a save is under way. The data of a save that failed is
    removed by the next one.

    Args:
        root: folder or URL of the run, a YAML file, or a mapping of options; the same on all ranks.
        step: of training. `checkpoint_id` of the save counts before it, by the number at its end; with neither it is
            one more than that of the newest snapshot.
        options: see docs/configuration.md; of them `keep` (default here: everything) and `pickle` are used, and a
            single tier.

    Raises:
        ConfigError: an option is unknown, impossible or has no meaning here.

    Examples:
        >>> dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=CkptWriter("s3://bucket/run"))
    """

    def __init__(self, root: Root, *, step: int | None = None, **options: Any) -> None:
        super().__init__()
        self._config = config_of(root, options)
        if len(self._config.tiers) > 1:
            raise ConfigError(
                "torch.distributed.checkpoint writes to one tier", hint="name one folder or bucket; `ckpt cp` copies"
            )
        self._step = step
        self._save: Save | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs, that `async_save` may run the save in; a save under way stays here."""
        return {"_config": self._config, "_step": self._step, "_save": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins, of the step that `checkpoint_id` names."""
        self._end()
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Raises ConfigError without collectives: then it would not be known when all ranks have written."""
        if not kwargs.get("use_collectives", True):
            raise ConfigError("use_collectives=False cannot make one snapshot of several ranks", hint="leave it out")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: begin the snapshot, and tell every rank which one it is.

        Raises:
            CkptError: as `Save`.
        """
        self._end()
        self._save = Save(self._storage(), self._step)
        # A save that fails on another rank never comes back here: then the lease goes with this object.
        weakref.finalize(self, self._save.end)
        snapshot = self._save.id
        return [replace(plan, storage_data=_Task(snapshot, n)) for n, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Make this rank's part durable.

        Raises:
            UnstorableLeafError: a value cannot be stored without pickle, or a tensor has no plain bytes; names it.
            StorageError: it is not.
        """
        task = _fresh(plan.storage_data)
        paths = plan.planner_data or {}
        flattener = Flattener(self._config.pickle)
        made: list[tuple[WriteItem, Any, list[DcpArray]]] = []
        for item in plan.items:
            path = paths.get(item.index.fqn, (item.index.fqn,))
            data = planner.resolve_data(item)
            if item.type is WriteItemType.BYTE_IO:
                made.append((item, *_value(data, path, flattener)))
            else:
                array = _array(item, data, path)
                made.append((item, {"$": "tensor", "entry": array.name}, [array]))
        file, blocks = self._write(task, [one for _, _, arrays in made for one in arrays])
        results = []
        for item, node, arrays in made:
            mine = tuple(blocks[one.name, one.offsets] for one in arrays)
            nbytes = sum(block.entry.nbytes for block in mine)
            results.append(WriteResult(item.index, nbytes, DcpItem(mine, node, file if mine else None)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when the parts of all ranks are durable: commit the snapshot, then apply retention.

        Raises:
            SnapshotFailedError: the parts do not fit together.
            LeaseHeldError, StorageError: as `Save.commit`.
        """
        save = self._save
        assert save is not None
        try:
            stored = [(one.index.fqn, one.storage_data) for of_rank in results for one in of_rank]
            manifest = manifest_of(save.id, save.run, len(results), stored, metadata.planner_data or {})
            save.commit(manifest, self._policy())
        finally:
            self._end()

    def _write(
        self, task: _Task, arrays: list[DcpArray]
    ) -> tuple[DataFile | None, dict[tuple[str, tuple[int, ...]], Block]]:
        """The file that this rank has made durable, and its blocks by the names and offsets of the arrays."""
        if not arrays:
            return None, {}
        container = Container(arrays)
        file = DataFile(names.data_name(task.snapshot, task.rank), container.nbytes)
        blocks = {(block.name, block.box.offsets): block for block in container.blocks()}
        self._storage().put(file.name, container.contents())
        return file, blocks

    def _storage(self) -> Storage:
        tier = self._config.tiers[0]
        return open_storage(tier.url, tier.for_storage())

    def _policy(self) -> RetentionPolicy:
        chosen = "keep" in self._config.model_fields_set or self._config.tiers[0].keep is not None
        return policy_from(self._config.keep_rules(self._config.tiers[0])) if chosen else KeepAll()

    def _end(self) -> None:
        if self._save is not None:
            self._save.end()
            self._save = None


def _fresh(task: _Task) -> _Task:
    """The task, or one of the same rank under a new name where its file has been written for an earlier snapshot."""
    if task in _written:
        parsed = parsed_of(task.snapshot)
        task = _Task(names.snapshot_id(parsed.seq, parsed.step), task.rank)
    _written.add(task)
    return task


def _array(item: WriteItem, data: torch.Tensor | io.BytesIO, path: TreePath) -> DcpArray:
    assert isinstance(data, torch.Tensor)
    assert item.tensor_data is not None
    name, described = entry_name(path), item.tensor_data
    if tuple(data.shape) != tuple(described.chunk.sizes):
        raise StateError(f"the plan has {tuple(described.chunk.sizes)} of {name!r}, and the state {tuple(data.shape)}")
    return DcpArray(name, host(data, name), tuple(described.size), tuple(described.chunk.offsets))


def _value(data: torch.Tensor | io.BytesIO, path: TreePath, flattener: Flattener) -> tuple[Any, list[DcpArray]]:
    """The node of a value that is no tensor, and the arrays in it."""
    assert isinstance(data, io.BytesIO)
    data.seek(0)
    # This process has made these bytes of its own state a moment ago: nothing foreign is unpickled.
    value = torch.load(data, weights_only=False)
    scan = flattener.scan(value, path)
    skeleton = flattener.describe(value, path)
    arrays = []
    for leaf, tensor in zip(skeleton.leaves, scan.arrays, strict=True):
        name = leaf.node["entry"] = entry_name(leaf.path)
        arrays.append(DcpArray(name, host(tensor, name), tuple(tensor.shape), (0,) * tensor.dim()))
    return KeySkeleton(skeleton.tree).fill(scan.values), arrays


def manifest_of(
    snapshot: str, run: str, size: int, stored: Sequence[tuple[str, DcpItem]], paths: Mapping[str, TreePath]
) -> Manifest:
    """The manifest.

    Args:
        size: ranks that have written.
        stored: items of the plan, shards of tensors or values, of all ranks in their order, each with its name.
        paths: by name, the way to it through the state; what is not there is a key of the state itself.

    Raises:
        SnapshotFailedError: shards of a tensor are missing, or do not fit together.
    """
    nodes = {name: item.node for name, item in stored}
    written = [(item.file, item.blocks) for _, item in stored if item.file is not None]
    files = {file.name: file for file, _ in written}
    blocks = grouped((block.name, (block, file.name)) for file, found in written for block in found)
    index = {name: number for number, name in enumerate(files)}
    made = {name: _entry(name, found, index) for name, found in blocks.items()}
    entries = {name: entry for name, (entry, _) in made.items()}
    tree: dict[str, Any] = {}
    for name, node in nodes.items():
        if isinstance(node, dict) and node.get("$") == "tensor" and (grid := made[node["entry"]][1]) is not None:
            node = {**node, "$": "sharded", "blocks": grid}
        put_at(tree, paths.get(name, (name,)), node, _Inner)
    whole = {key: _plain(node) for key, node in tree.items()}
    sizes = {name: entry.nbytes for name, entry in entries.items()}
    parsed = parsed_of(snapshot)
    info = SnapshotInfo(
        id=snapshot,
        seq=parsed.seq,
        step=parsed.step,
        epoch=None,
        reason="manual",
        created=time.time(),
        nbytes=sum(sizes.values()),
        components={key: sum(sizes[name] for name in KeySkeleton(node).entries) for key, node in whole.items()},
    )
    return Manifest(info, run, {"size": size}, software(), tuple(files.values()), entries, whole)


def _entry(name: str, found: Iterable[tuple[Block, str]], files: Mapping[str, int]) -> tuple[Entry, list[Any] | None]:
    """The entry that blocks make one behind another, and their boxes where that is not the array in C order."""
    ordered = sorted(found, key=lambda one: one[0].box.offsets)
    first = ordered[0][0]
    whole = first.whole
    for block, _ in ordered:
        if (block.entry.dtype, block.whole) != (first.entry.dtype, whole):
            raise SnapshotFailedError(f"ranks have different shapes or dtypes of {name!r}: {whole} and {block.whole}")
    boxes = tuple(block.box for block, _ in ordered if block.box.count)
    if (there := sum(box.count for box in boxes)) != prod(whole) or (boxes and not tiles(whole, boxes)):
        raise SnapshotFailedError(
            f"the shards of {name!r} overlap or are incomplete: they have {there} of its {prod(whole)} elements"
        )
    pieces = tuple(replace(piece, file=files[file]) for block, file in ordered for piece in block.entry.pieces)
    grid = None if Grid(whole, boxes, ()).is_rows else [[list(box.offsets), list(box.shape)] for box in boxes]
    return replace(first.entry, shape=whole, pieces=pieces), grid


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
