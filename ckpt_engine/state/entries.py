"""Arrays of a state on their way into the container, and which of them one of several ranks writes.

What of a state one of several ranks writes: its own arrays, and its share of what several ranks have alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ckpt_engine.errors import StateError
from ckpt_engine.ranks.boxes import Grid, PlacedArray, Slice, divide, leading
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.state.flatten import ArrayLeaf, LazyPredicate, show_path, tensor_problem
from ckpt_engine.state.sharding import Shard
from ckpt_engine.store.container import digest
from ckpt_engine.store.manifest import RANKS
from ckpt_engine.store.tree import TreePath, is_dense

LAZY_ON = "cuda"
"""Kinds of devices whose tensors may be copied behind training."""
WITHOUT_COPY = frozenset(
    getattr(torch, f"{sign}{bits}") for sign in ("int", "uint") for bits in range(1, 8) if hasattr(torch, f"int{bits}")
)
"""Dtypes torch has no copy kernel for; they are copied as bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class PackMembers:
    """The arrays of a pack, which lie in it one behind another: index among those of a snapshot, and bytes, of each."""

    arrays: np.ndarray[Any, np.dtype[np.int64]]
    nbytes: np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True, slots=True)
class EntrySource:
    """What is in one entry, and where its bytes come from.

    Args:
        array: index into the arrays of a snapshot, in scan order; of a pack that of the first one.
        storage_bytes: None for the array itself; (start, nbytes) of its storage when several views overlap in it.
        lazy: may be copied until the next fence.
        leaves: those that use it.
        rows: (dimension, first, count) of the rows that this rank writes; None: all.
        whole, start_bytes: where only some rows are written: shape of the array, and where they start in it.
        grid: of a DTensor: how it is divided over the ranks. `shape` and `nbytes` are of what this rank has.
        members: of a pack.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    array: int
    storage_bytes: tuple[int, int] | None
    lazy: bool
    leaves: list[ArrayLeaf]
    device: torch.device
    rows: tuple[int, int, int] | None = None
    whole: tuple[int, ...] | None = None
    start_bytes: int = 0
    grid: Grid | None = None
    members: PackMembers | None = None

    @property
    def path(self) -> TreePath:
        """Of the first leaf that uses it."""
        return self.leaves[0].path

    def tensors(self, arrays: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The live tensors whose bytes lie in the entry one behind another."""
        return [self.tensor(arrays)] if self.members is None else [arrays[index] for index in self.members.arrays]

    def tensor(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        """The live tensor to copy; of a pack a new one with all of it."""
        found = arrays[self.array]
        if self.members is not None:
            return torch.cat([arrays[index].detach().view(-1) for index in self.members.arrays])
        if self.storage_bytes is None:
            if self.rows is not None:
                found = found.detach().narrow(*self.rows)
            return found.view(torch.uint8) if found.dtype in WITHOUT_COPY else found
        start, nbytes = self.storage_bytes
        if self.rows is not None:
            _, first, nbytes = self.rows
            start += first
        return torch.empty(0, dtype=torch.uint8, device=found.device).set_(
            found.untyped_storage(), start, (nbytes,), (1,)
        )


def dtype_name(dtype: torch.dtype) -> str:
    """As manifests name it."""
    return str(dtype).removeprefix("torch.")


def device_of(array: torch.Tensor) -> torch.device:
    """Where it is. Tests put others in its place."""
    return array.device


def clusters_of(leaves: Sequence[ArrayLeaf], arrays: Sequence[torch.Tensor]) -> list[list[int]]:
    """The arrays by index, those that share memory together, in the order of the first of each."""
    groups: dict[int | str, list[int]] = defaultdict(list)
    for index, (leaf, array) in enumerate(zip(leaves, arrays, strict=True)):
        if leaf.node["$"] == "tensor" and array.numel():
            groups[array.untyped_storage().data_ptr()].append(index)
        elif leaf.shard is not None:
            # Tied DTensors of which this rank has nothing are tied all the same: names are those of all ranks.
            groups[f"{array.untyped_storage()._cdata} {leaf.shard.grid.signature}"].append(index)
        else:
            groups[-1 - index].append(index)  # never an address: nothing to share
    # In the order of the leaves, which all ranks have; which arrays share a storage may differ between them.
    return sorted(cluster for members in groups.values() for cluster in _overlapping(members, arrays))


def _overlapping(members: Sequence[int], arrays: Sequence[torch.Tensor]) -> list[list[int]]:
    """Split the members of one storage into runs whose byte ranges overlap."""
    if len(members) == 1:
        return [list(members)]
    clusters: list[list[int]] = []
    begin = end = -1
    for index in sorted(members, key=lambda i: (_extent(arrays[i])[0], i)):
        start, stop = _extent(arrays[index])
        if start < end or begin == end == start == stop:
            clusters[-1].append(index)
            end = max(end, stop)
        else:
            clusters.append([index])
            begin, end = start, stop
    return [sorted(c) for c in clusters]


def _extent(array: torch.Tensor) -> tuple[int, int]:
    """Byte range of a view in its storage."""
    size = array.element_size()
    start = int(array.storage_offset()) * size
    if not array.numel():
        return start, start
    reach = sum((n - 1) * s for n, s in zip(array.shape, array.stride(), strict=True))
    return start, start + (reach + 1) * size


def draft_of(
    cluster: Sequence[int],
    leaves: Sequence[ArrayLeaf],
    arrays: Sequence[torch.Tensor],
    lazy: LazyPredicate | None,
    names: Names,
) -> EntrySource:
    """The draft of arrays that share memory, or of one alone: of all leaves that use it.

    Raises:
        StateError: it cannot be stored; names a leaf.
    """
    first = arrays[cluster[0]]
    used = [leaves[i] for i in cluster]
    for i in cluster:
        problem = tensor_problem(arrays[i])
        if problem:
            raise StateError(f"cannot store {'/'.join(map(str, leaves[i].path))}: {problem}")
    name = names.unique(used[0].path)
    device = device_of(first)
    is_lazy = lazy is not None and device.type == LAZY_ON and all(lazy(leaf.path) for leaf in used)
    view = (first.dtype, first.shape, first.stride(), first.storage_offset())
    if all((a.dtype, a.shape, a.stride(), a.storage_offset()) == view for a in (arrays[i] for i in cluster)) and all(
        leaf.shard == used[0].shard for leaf in used
    ):
        if used[0].shard is not None:
            return _sharded(name, first, cluster[0], is_lazy, used, used[0].shard)
        for leaf in used:
            leaf.node["entry"] = name
            if leaf.node["$"] == "tensor" and not first.is_contiguous() and is_dense(first.shape, first.stride()):
                leaf.node["stride"] = list(first.stride())
        nbytes = first.numel() * first.element_size()
        return EntrySource(name, first.dtype, tuple(first.shape), nbytes, cluster[0], None, is_lazy, used, device)
    start = min(_extent(arrays[i])[0] for i in cluster)
    start -= start % max(arrays[i].element_size() for i in cluster)  # each is aligned in memory that begins there
    stop = max(_extent(arrays[i])[1] for i in cluster)
    for i in cluster:
        array = arrays[i]
        leaves[i].node["entry"] = name
        leaves[i].node["view"] = {
            "dtype": dtype_name(array.dtype),
            "shape": list(array.shape),
            "stride": list(array.stride()),
            "byte_offset": int(array.storage_offset()) * array.element_size() - start,
        }
    if any(leaf.shard is not None for leaf in used):
        raise StateError(
            f"cannot store {' and '.join(show_path(leaf.path) for leaf in used)}: DTensors that overlap in memory",
            hint="save one of them, or copies",
        )
    nbytes, at = stop - start, (start, stop - start)
    return EntrySource(name, torch.uint8, (nbytes,), nbytes, cluster[0], at, is_lazy, used, device)


def _sharded(
    name: str, array: torch.Tensor, index: int, is_lazy: bool, used: list[ArrayLeaf], shard: Shard
) -> EntrySource:
    """What this rank has of a DTensor. The boxes of all ranks lie one behind another; a leaf tells how if that is not
    the array in C order."""
    grid = shard.grid
    for leaf in used:
        leaf.node["entry"] = name
        if not grid.is_rows:
            leaf.node["$"] = "sharded"
            leaf.node["blocks"] = [[list(box.offsets), list(box.shape)] for box in grid.boxes]
    number = grid.boxes.index(shard.box) if shard.box.count else 0
    size = array.element_size()
    return EntrySource(
        name,
        array.dtype,
        shard.box.shape,
        shard.box.count * size,
        index,
        None,
        is_lazy,
        used,
        device_of(array),
        whole=grid.shape if len(grid.boxes) > 1 or grid.is_runs else None,
        start_bytes=grid.starts[number] * size,
        grid=grid,
    )


def entry_name(path: TreePath) -> str:
    """The name of the array at a path of the state."""
    return "/".join(str(part).replace("~", "~0").replace("/", "~1") for part in path)


@dataclass(eq=False)
class Names:
    """Container names of leaf paths: keys joined by "/", "~" and "/" inside keys written as ~0 and ~1, unique."""

    _taken: set[str] = field(default_factory=lambda: {"__metadata__"})

    def unique(self, path: TreePath) -> str:
        return free_name(entry_name(path) or "value", self._taken)


def free_name(base: str, taken: set[str]) -> str:
    """A name that is not taken yet, and is from now on."""
    name, n = base, 2
    while name in taken:
        name, n = f"{base}~{n}", n + 1
    taken.add(name)
    return name


def mine(drafts: Sequence[EntrySource], ranks: Ranks) -> list[EntrySource]:
    """The drafts of `ranks.rank`, cut to its rows, in their order.

    Ranks that have the same box of a DTensor share it out among themselves, and all ranks what all have alike.
    """
    teams: dict[tuple[int, ...], list[_Part]] = defaultdict(list)
    found: dict[int, list[EntrySource]] = {}
    for number, draft in enumerate(drafts):
        if _is_own(draft):
            found[number] = [draft]
        elif (part := _part(number, draft, ranks)) is not None:
            teams[part.team].append(part)
    for team, parts in teams.items():
        for part, slices in zip(parts, divide([part.item for part in parts], len(team)), strict=True):
            taken = [_sliced(drafts[part.draft], one) for one in slices if team[one.rank] == ranks.rank]
            found[part.draft] = taken
    return [draft for number in range(len(drafts)) for draft in found.get(number, ())]


def structure_of(drafts: Sequence[EntrySource]) -> str:
    """Equal on ranks whose common arrays are the same: names, dtypes, shapes and how they are divided, in one order.

    A line for all of them, whose order says who writes what, and one for each component: so it is known which differ.
    """
    rows: list[str] = []
    found: dict[str, list[str]] = {}
    for draft in drafts:
        if not _is_own(draft):
            form = draft.shape if draft.grid is None else draft.grid.signature
            rows.append(f"{draft.name}\0{draft.dtype}\0{form}\n")
            found.setdefault(str(draft.path[0]), []).append(rows[-1])
    lines = [f"{component} {digest(''.join(some).encode())}" for component, some in sorted(found.items())]
    return "\n".join([digest("".join(rows).encode()), *lines])


def require_all(drafts: Sequence[EntrySource], ranks: Ranks | None) -> None:
    """Raise if a DTensor is not one of all ranks that take the snapshot.

    Raises:
        StateError: names it.
    """
    everyone = frozenset(range(ranks.size if ranks is not None else 1))
    for draft in drafts:
        leaf = draft.leaves[0]
        if leaf.shard is None:
            continue
        where = f"the DTensor at {show_path(leaf.path)}"
        rows = (
            (
                ranks is not None and _is_own(draft),
                f"{where} is in a component of each rank's own",
                "take the component out of `own`: it is of all",
            ),
            (
                ranks is None and len(leaf.shard.ranks) > 1,
                f"{where} is divided over {len(leaf.shard.ranks)} ranks, and this checkpointer saves for one",
                "make it on every rank with ranks=ProcessGroupRanks(), see docs/sharded.md",
            ),
            (
                ranks is not None and leaf.shard.ranks != everyone,
                f"the mesh of {where} has {len(leaf.shard.ranks)} of the {len(everyone)} ranks",
                "divide it over a mesh of all ranks: meshes of some of them (pipeline stages) are not supported",
            ),
        )
        for holds, why, hint in rows:
            if holds:
                raise StateError(why, hint=hint)


@dataclass(frozen=True, slots=True)
class _Part:
    """What `team` has of draft number `draft`: all of them the same."""

    draft: int
    team: tuple[int, ...]
    item: PlacedArray


def _part(number: int, draft: EntrySource, ranks: Ranks) -> _Part | None:
    """None: this rank has nothing of it."""
    everyone = tuple(range(ranks.size))
    if draft.grid is None:
        item = PlacedArray(draft.nbytes, _rows(draft.shape), ranks.divides(draft.path))
        return _Part(number, everyone, item)
    box = draft.grid.of(ranks.rank)
    if box is None:
        return None
    return _Part(number, draft.grid.holders[box], PlacedArray(draft.nbytes, _rows(draft.shape)))


def _is_own(draft: EntrySource) -> bool:
    return bool(draft.path[0] == RANKS)


def _rows(shape: Sequence[int]) -> int:
    return shape[leading(shape)] if shape else 1


def _sliced(draft: EntrySource, part: Slice) -> EntrySource:
    rows = _rows(draft.shape)
    if part.rows == rows:
        return draft
    dimension = leading(draft.shape)
    shape = (*draft.shape[:dimension], part.rows, *draft.shape[dimension + 1 :])
    row_bytes = draft.nbytes // rows
    return replace(
        draft,
        shape=shape,
        nbytes=part.rows * row_bytes,
        rows=(dimension, part.start, part.rows),
        whole=draft.whole or draft.shape,
        start_bytes=draft.start_bytes + part.start * row_bytes,
    )
