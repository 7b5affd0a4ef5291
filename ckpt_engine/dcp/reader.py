"""The reader for `dcp.load`: any snapshot of a run, by name and shard, into whatever layout DCP has planned."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckpt_engine.dcp.naming import Root, config_of, names_step, step_of
from ckpt_engine.dcp.outline import Outline, Stored, outline_of
from ckpt_engine.dcp.saves import go_on
from ckpt_engine.errors import CkptError, RanksError, StorageMissingError
from ckpt_engine.ranks.boxes import Box
from ckpt_engine.restore.landing import fill
from ckpt_engine.restore.load import choose
from ckpt_engine.restore.regions import Region, read_regions
from ckpt_engine.restore.sources import Sources
from ckpt_engine.store.manifest import Manifest, SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.open import open_storage


class CkptReader(StorageReader):
    """Reads a snapshot that `CkptWriter` or a `Checkpointer` has taken: the newest that is whole, or that of a step.

    Nothing that was stored is unpickled, unless `pickle` names its path.

    Args:
        root: folder or URL of the run, a YAML file, or a mapping of options; of several tiers the nearest that has the
            snapshot whole serves.
        step: of training; a `checkpoint_id` of the load counts before it, by the number at its end.
        options: see docs/configuration.md; of them `pickle` is used.

    Raises:
        ConfigError: an option is unknown, impossible or has no meaning here.

    Example:
        >>> dcp.load(state, storage_reader=CkptReader("s3://bucket/run"))
    """

    def __init__(self, root: Root, *, step: int | None = None, **options: Any) -> None:
        super().__init__()
        self._config = config_of(root, options)
        self._step = step
        self._outline: Outline | None = None
        self._manifest: Manifest | None = None
        self._sources: Sources | None = None
        self.unverified_bytes = 0
        """Bytes that the last load has read of pieces without the rest of them, which no digest covers."""

    @property
    def snapshot(self) -> SnapshotInfo | None:
        """What the last load has read, or None."""
        return self._manifest.info if self._manifest is not None else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins, of the step that `checkpoint_id` names."""
        self._outline = self._manifest = self._sources = None
        self.unverified_bytes = 0
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """What the snapshot holds, made of its manifest.

        Raises:
            StorageMissingError: there is no snapshot.
            NoUsableSnapshotError, ResumeError: as `Checkpointer.choose`.
        """
        where = [Repository(open_storage(tier.url, tier.for_storage())) for tier in self._config.tiers]
        found = choose(where, self._step)
        if found is None:
            raise StorageMissingError(f"no snapshot at {self._config.root_url}", hint="check the path")
        with suppress(CkptError):  # without it the next save begins a line of its own, and removes nothing of this one
            go_on(where[0], found.info)
        self._manifest = found.manifest
        self._sources = Sources([place.storage for place in found.sources])
        self._outline = outline_of(self._sources, found.manifest, self._config.pickle)
        return self._outline.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """There is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Says which snapshot this rank has found."""
        assert self._manifest is not None
        plan.storage_data = self._manifest.info.id
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raises RanksError if the ranks do not all see the same snapshot."""
        found = {plan.storage_data for plan in plans}
        if len(found) > 1:
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
        outline, manifest, sources = self._outline, self._manifest, self._sources
        assert outline is not None
        assert manifest is not None
        assert sources is not None
        whole: dict[str, torch.Tensor] = {}
        parts: list[Region] = []
        boxes: dict[str, Sequence[Box]] = {}
        tensors: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, _saved(outline.values[name]))
                continue
            target = planner.resolve_tensor(item)
            tensors.append((item, target))
            stored = outline.tensors[name]
            one = Region(stored.entry, _box(stored, item), target.detach())
            if _fits(stored, one) and stored.entry not in whole:
                whole[stored.entry] = one.tensor
            else:
                parts.append(one)
                boxes[stored.entry] = stored.boxes
        fill(sources, manifest, whole)
        self.unverified_bytes = read_regions(sources, manifest, parts, boxes).unverified_bytes
        for item, target in tensors:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a step."""
        return names_step(checkpoint_id)


def _box(stored: Stored, item: ReadItem) -> Box:
    """What an item of a plan wants of a tensor: its offsets are in one of the stored boxes."""
    at = item.storage_index.offset
    inside = next(box for box in stored.boxes if at is None or box.offsets == tuple(at))
    offsets = tuple(a + b for a, b in zip(inside.offsets, item.storage_offsets, strict=True))
    return Box(offsets, tuple(item.lengths))


def _fits(stored: Stored, one: Region) -> bool:
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
