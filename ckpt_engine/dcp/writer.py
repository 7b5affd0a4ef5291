"""The writer for `dcp.save` and `dcp.async_save`: DCP plans who stores what, the coordinator commits it as one put."""

from __future__ import annotations

import dataclasses
import io
import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckpt_engine.dcp.assemble import Stored, entry_name, manifest_of
from ckpt_engine.dcp.container import Array, Block, Container, Item, host
from ckpt_engine.dcp.naming import Root, config_of, names_step, step_of
from ckpt_engine.dcp.saves import Save
from ckpt_engine.errors import ConfigError, StateError
from ckpt_engine.persist.skeleton import Skeleton
from ckpt_engine.snapshot.flatten import Flattener
from ckpt_engine.store import layout
from ckpt_engine.store.manifest import DataFile
from ckpt_engine.store.retention import KeepAll, RetentionPolicy, policy_from
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.open import open_storage
from ckpt_engine.store.tree import TreePath


@dataclass(frozen=True, slots=True)
class _Task:
    """What the coordinator tells a rank with its plan."""

    snapshot: str
    rank: int


_written: set[_Task] = set()
"""What this process has written: a planner that caches its plans hands out old ones again."""


class CkptWriter(StorageWriter):
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

    Example:
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
        """Raises ConfigError without collectives: then nobody would know when all ranks have written."""
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
        return [dataclasses.replace(plan, storage_data=_Task(snapshot, n)) for n, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Make this rank's part durable.

        Raises:
            UnstorableLeafError: a value cannot be stored without pickle, or a tensor has no plain bytes; names it.
            StorageError: it is not.
        """
        task = _fresh(plan.storage_data)
        paths = plan.planner_data or {}
        flattener = Flattener(self._config.pickle)
        arrays: list[Array] = []
        values: dict[str, Any] = {}
        for item in plan.items:
            path = paths.get(item.index.fqn, (item.index.fqn,))
            if item.type is WriteItemType.BYTE_IO:
                node, found = _value(planner.resolve_data(item), path, flattener)
                values[item.index.fqn] = node
                arrays += found
            else:
                arrays.append(_array(item, planner.resolve_data(item), path))
        results = self._write(task, plan, paths, arrays, values)
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
            stored = [Stored(one.index.fqn, one.storage_data) for of_rank in results for one in of_rank]
            manifest = manifest_of(save.id, save.run, len(results), stored, metadata.planner_data or {})
            save.commit(manifest, self._policy())
        finally:
            self._end()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a step."""
        return names_step(checkpoint_id)

    def _write(
        self, task: _Task, plan: SavePlan, paths: dict[str, TreePath], arrays: list[Array], values: dict[str, Any]
    ) -> list[WriteResult]:
        file: DataFile | None = None
        blocks: dict[str, list[Block]] = {}
        if arrays:
            container = Container(arrays)
            for block in container.blocks():
                blocks.setdefault(block.name, []).append(block)
            file = DataFile(layout.data_name(task.snapshot, task.rank), container.nbytes)
            self._storage().put(file.name, container.contents())
        results = []
        for item in plan.items:
            name = item.index.fqn
            if name in values:
                mine = tuple(block for entry in Skeleton(values[name]).entries for block in blocks[entry])
                found = Item(mine, values[name], file)
            else:
                assert item.tensor_data is not None
                wanted = tuple(item.tensor_data.chunk.offsets)
                entry = entry_name(paths.get(name, (name,)))
                mine = tuple(block for block in blocks[entry] if block.offsets == wanted)
                found = Item(mine, {"$": "tensor", "entry": entry}, file)
            nbytes = sum(size for block in found.blocks for _, size, _ in block.pieces)
            results.append(
                WriteResult(item.index, nbytes, found if found.blocks else dataclasses.replace(found, file=None))
            )
        return results

    def _storage(self) -> Storage:
        tier = self._config.tiers[0]
        return open_storage(tier.url, tier.for_storage())

    def _policy(self) -> RetentionPolicy:
        chosen = "keep" in self._config.model_fields_set or self._config.tiers[0].keep is not None
        return policy_from(self._config.root_keep_rules()) if chosen else KeepAll()

    def _end(self) -> None:
        if self._save is not None:
            self._save.end()
            self._save = None


def _fresh(task: object) -> _Task:
    """The task, or one of the same rank under a new name where its file has been written for an earlier snapshot."""
    assert isinstance(task, _Task)
    if task in _written:
        parsed = layout.parse_id(task.snapshot)
        assert parsed is not None
        task = _Task(layout.snapshot_id(parsed.seq, parsed.step), task.rank)
    _written.add(task)
    return task


def _array(item: WriteItem, data: torch.Tensor | io.BytesIO, path: TreePath) -> Array:
    assert isinstance(data, torch.Tensor)
    assert item.tensor_data is not None
    name, described = entry_name(path), item.tensor_data
    if tuple(data.shape) != tuple(described.chunk.sizes):
        raise StateError(f"the plan has {tuple(described.chunk.sizes)} of {name!r}, and the state {tuple(data.shape)}")
    return Array(name, host(data, name), tuple(described.size), tuple(described.chunk.offsets))


def _value(data: torch.Tensor | io.BytesIO, path: TreePath, flattener: Flattener) -> tuple[Any, list[Array]]:
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
        arrays.append(Array(name, host(tensor, name), tuple(tensor.shape), (0,) * tensor.dim()))
    return Skeleton(skeleton.tree).fill(scan.values), arrays
