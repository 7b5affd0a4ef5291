"""The reader for `dcp.load`: any snapshot of a run, by name and shard, into whatever layout DCP has planned.

DCP plans a load with an `Outline`: the state of a snapshot with a stand-in for each tensor. `step_of` reads the step
in a `checkpoint_id`. `Save` is one snapshot that this process writes for DCP; the run's lease lasts as long as one is
open.
"""

from __future__ import annotations

import io
import os
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckpt_engine.config import Config, load_config
from ckpt_engine.copy.make_room import collect, prune
from ckpt_engine.errors import CkptError, ConfigError, FormatError, RanksError, StorageMissingError
from ckpt_engine.observe.events import LOG
from ckpt_engine.ranks.boxes import Box, boxes_of
from ckpt_engine.restore.array_regions import ArrayRegion, read_regions
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.restore.choose import choose
from ckpt_engine.restore.device_copies import fill
from ckpt_engine.restore.read import read_entries
from ckpt_engine.state.json_types import dtype_of
from ckpt_engine.state.rebuild import Rebuilder
from ckpt_engine.store import names
from ckpt_engine.store.branches import continued
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.lease_holder import Lease
from ckpt_engine.store.manifest import Line, Manifest, SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import KeepAll, RetentionPolicy
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.tree import TreePath
from ckpt_engine.undo import on_failure

_OPEN = frozenset({"dict", "odict", "mapping", "defaultdict", "counter"})
"""Kinds that DCP looks into; all others are values to it."""
Root = str | os.PathLike[str] | Mapping[str, Any] | Config
_NUMBER = re.compile(r"(?:.*[^0-9])?([0-9]+)/?")
LEASE_WAIT_SECONDS = 60.0
"""A process that was killed may still be finishing, or its lease on an object store has to run out."""
_runs: dict[str, _Run] = {}
_lines: dict[str, Line] = {}
"""By the URL of a run: the line of history of what this process saves there."""
_lock = threading.RLock()
"""The collector of garbage may end a save that was not ended, at any instant of the thread that holds this."""


class NamedByStep:
    """A reader or writer of which a `checkpoint_id` names a step."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a step."""
        return _NUMBER.fullmatch(os.fspath(checkpoint_id)) is not None


class CkptReader(NamedByStep, StorageReader):
    """Reads a snapshot that `CkptWriter` or a `Checkpointer` has taken: the newest that is whole, or that of a step.

    Nothing that was stored is unpickled, unless `pickle` names its path.

    Args:
        root: folder or URL of the run, a YAML file, or a mapping of options; of several tiers the nearest that has the
            snapshot whole serves.
        step: of training; a `checkpoint_id` of the load counts before it, by the number at its end.
        options: see docs/configuration.md; of them `pickle` is used.

    Raises:
        ConfigError: an option is unknown, impossible or has no meaning here.

    Examples:
        >>> dcp.load(state, storage_reader=CkptReader("s3://bucket/run"))
    """

    def __init__(self, root: Root, *, step: int | None = None, **options: Any) -> None:
        super().__init__()
        self._config = config_of(root, options)
        self._step = step
        self._outline: Outline | None = None
        self.unverified_bytes = 0
        """Bytes that the last load has read of pieces without the rest of them, which no digest covers."""

    @property
    def snapshot(self) -> SnapshotInfo | None:
        """What the last load has read, or None."""
        return self._outline.manifest.info if self._outline is not None else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins, of the step that `checkpoint_id` names."""
        self._outline = None
        self.unverified_bytes = 0
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """What the snapshot holds, made of its manifest.

        Raises:
            StorageMissingError: there is no snapshot.
            NoUsableSnapshotError, ResumeError: as `Engine.choose`.
        """
        where = [Repository(open_storage(tier.url, tier.for_storage())) for tier in self._config.tiers]
        if (found := choose(where, self._step)) is None:
            raise StorageMissingError(f"no snapshot at {self._config.root_url}", hint="check the path")
        with suppress(CkptError):  # without it the next save begins a line of its own, and removes nothing of this one
            go_on(where[0], found.info)
        found = found.unpacked()
        sources = Sources([place.storage for place in found.sources])
        self._outline = outline_of(sources, found.manifest, self._config.pickle)
        return self._outline.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """There is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Says which snapshot this rank has found."""
        assert self._outline is not None
        plan.storage_data = self._outline.manifest.info.id
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raises RanksError if the ranks do not all see the same snapshot."""
        if len(found := {plan.storage_data for plan in plans}) > 1:
            raise RanksError(
                f"the ranks have found different snapshots: {', '.join(sorted(map(str, found)))}",
                hint="name the step with checkpoint_id; all ranks need the same folder or bucket",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for.

        Raises:
            CorruptError: stored bytes differ from their digest, at all tiers; names the entry.
            NewerFormatError, StorageError
        """
        outline = self._outline
        assert outline is not None
        whole: dict[str, torch.Tensor] = {}
        parts: list[ArrayRegion] = []
        tensors: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, _saved(outline.values[name]))
                continue
            target = planner.resolve_tensor(item)
            tensors.append((item, target))
            stored = outline.tensors[name]
            one = ArrayRegion(stored.entry, _box(stored, item), target.detach())
            if _fits(stored, one) and stored.entry not in whole:
                whole[stored.entry] = one.tensor
            else:
                parts.append(one)
        boxes = {one.entry: one.boxes for one in outline.tensors.values()}
        fill(outline.sources, outline.manifest, whole)
        self.unverified_bytes = read_regions(outline.sources, outline.manifest, parts, boxes)
        for item, target in tensors:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _box(stored: StoredTensor, item: ReadItem) -> Box:
    """What an item of a plan wants of a tensor: its offsets are in one of the stored boxes."""
    at = item.storage_index.offset
    inside = next(box for box in stored.boxes if at is None or box.offsets == tuple(at))
    return Box(tuple(a + b for a, b in zip(inside.offsets, item.storage_offsets, strict=True)), tuple(item.lengths))


def _fits(stored: StoredTensor, one: ArrayRegion) -> bool:
    """Whether it is all of a tensor, and its bytes can be taken as they are."""
    return (
        len(stored.boxes) == 1
        and one.box == Box.whole(stored.shape)
        and one.tensor.dtype == stored.dtype
        and one.tensor.is_contiguous()
    )


def _saved(value: Any) -> io.BytesIO:
    """A value as DCP takes it: the bytes are ours, of a value that was rebuilt without running anything."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


@dataclass(frozen=True, slots=True)
class StoredTensor:
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
        manifest, sources: of the snapshot, and where its data comes from.
    """

    metadata: Metadata
    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Any]
    manifest: Manifest
    sources: Sources


def outline_of(sources: Sources, manifest: Manifest, pickle_paths: Sequence[str] = ()) -> Outline:
    """The outline of a snapshot. Tensors are not read, except those inside of what DCP takes for one value.

    Raises:
        CkptError: as `Rebuilder.state` and `read_entries`.
    """
    drawer = _Drawer(sources, manifest, pickle_paths)
    state = drawer.state(manifest.tree)
    flat, paths = flatten_state_dict(state if isinstance(state, dict) else {"": state})
    metadata = Metadata({}, planner_data=paths)
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, Any] = {}
    for name, found in flat.items():
        if (stored := drawer.drawn.get(id(found))) is None:
            metadata.state_dict_metadata[name] = BytesStorageMetadata()
            values[name] = found
        else:
            chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.shape)) for box in stored.boxes]
            properties = TensorProperties(dtype=stored.dtype)
            metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, found.size(), chunks)
            tensors[name] = stored
    return Outline(metadata, tensors, values, manifest, sources)


class _Drawer(Rebuilder):
    """Rebuilds a tree with tensors on the meta device; `drawn` tells by their address what they stand for."""

    def __init__(self, sources: Sources, manifest: Manifest, pickle_paths: Sequence[str]) -> None:
        super().__init__({}, pickle_paths)
        self._sources = sources
        self._manifest = manifest
        self._closed = 0
        self._read: dict[str, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []
        self.drawn: dict[int, StoredTensor] = {}

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
        if (name := node["entry"]) not in self._read:
            self._require(name, path)
            self._read[name] = read_entries(self._sources, self._manifest, [name])[name]
        return self._read[name]

    def _draw(self, node: Mapping[str, Any], path: TreePath) -> torch.Tensor:
        self._require(node["entry"], path)
        entry = self._manifest.entries[node["entry"]]
        dtype, boxes = dtype_of(entry.dtype), boxes_of(node, entry.shape)
        outline = torch.empty(entry.shape, dtype=dtype, device="meta")
        self._kept.append(outline)  # addresses must not be used again
        self.drawn[id(outline)] = StoredTensor(node["entry"], dtype, entry.shape, boxes)
        return outline

    def _require(self, name: str, path: TreePath) -> None:
        if name not in self._manifest.entries:
            raise FormatError(f"{'/'.join(map(str, path))} refers to entry {name!r}, which the manifest lacks")


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """The step that a `checkpoint_id` names: the number it ends with, as in `step-1200`.

    Raises:
        ConfigError: it ends with none.
    """
    text = os.fspath(checkpoint_id)
    if (found := _NUMBER.fullmatch(text)) is None:
        raise ConfigError(
            f"checkpoint_id {text!r} does not end with the number of a step",
            hint="give checkpoint_id=f'step-{step}'; the folder or bucket is what the writer or reader was made with",
        )
    return int(found[1])


def config_of(root: Root, options: Mapping[str, Any]) -> Config:
    """The validated options of a writer or a reader.

    Raises:
        ConfigError: an option that is wrong, or without a meaning here.
    """
    if (config := load_config(root, **options)).memory is not None:
        raise ConfigError("torch.distributed.checkpoint has no memory tier", hint="name folders and buckets only")
    return config


@dataclass(slots=True)
class _Run:
    repository: Repository
    lease: Lease
    under_way: set[Save] = field(default_factory=set)


class Save:
    """One snapshot that this process coordinates: from its number to its manifest. Thread safe.

    Args:
        storage: where the run is.
        step: of training; None: one more than the newest snapshot's.

    Raises:
        LeaseHeldError: another process writes the run; names it.
        ForeignError, CorruptError, NewerFormatError, StorageError: as `Repository.create_if_absent`.
    """

    def __init__(self, storage: Storage, step: int | None) -> None:
        self._url = storage.url
        with _lock:
            run = self._run = _runs.get(self._url) or _open(storage)
            _runs[self._url] = run
            run.under_way.add(self)
            with on_failure(self.end):
                newest = max(run.repository.ids(), key=lambda parsed: parsed.seq, default=None)
                if step is None:
                    step = newest.step + 1 if newest is not None else 0
                seq = max(run.repository.next_seq(), *(names.seq_of(one.id) + 1 for one in run.under_way - {self}), 0)
                self.id: str = names.snapshot_id(seq, step)
                self.run = run.repository.run_id

    def commit(self, manifest: Manifest, policy: RetentionPolicy) -> None:
        """Make the snapshot exist, then let go of what `policy` does not keep. All its data MUST be durable.

        `end` MUST follow.

        Raises:
            LeaseHeldError: the lease was lost; the snapshot does not exist.
            StorageError: it does not exist. What goes wrong after that is only logged.
        """
        repository, lease = self._run.repository, self._run.lease
        line = _lines.setdefault(self._url, Line(os.urandom(8).hex()))
        lease.check()
        repository.commit(replace(manifest, info=replace(manifest.info, line=line)))
        with _lock:
            try:
                if isinstance(policy, KeepAll):
                    repository.write_catalog_if_due()
                else:
                    others = {one.id for one in self._run.under_way} - {self.id}
                    prune(repository, lease, policy, line=line, verified=(self.id,), in_flight=others)
            except CkptError as err:
                LOG.warning("snapshot %s is there, but retention failed: %s", self.id, err)

    def end(self) -> None:
        """Nothing more will be written for it. Data without a manifest goes with the next save. Twice is fine."""
        with _lock:
            self._run.under_way.discard(self)
            if not self._run.under_way and _runs.get(self._url) is self._run:
                del _runs[self._url]
                self._run.lease.release()


def go_on(repository: Repository, info: SnapshotInfo) -> None:
    """A load of this process has read that snapshot: what it saves there comes after it.

    Raises:
        StorageError: nothing is known of what is newer.
    """
    if (url := repository.storage.url) not in _lines or info.line.attempt != _lines[url].attempt:
        newer = [one for one in repository.list() if one.seq > info.seq]
        _lines[url] = Line(os.urandom(8).hex(), continued(info, newer, ()))


def _open(storage: Storage) -> _Run:
    lease = acquire(storage, wait_seconds=LEASE_WAIT_SECONDS)
    with on_failure(lease.release):
        repository = Repository(storage)
        repository.create_if_absent()
        collect(repository, lease)  # what saves that died have left
    return _Run(repository, lease)


def parsed_of(snapshot: str) -> names.ParsedId:
    """What the id of a snapshot says that this process, or another rank, has begun."""
    parsed = names.parse_id(snapshot)
    assert parsed is not None
    return parsed
