"""What a DTensor is to a snapshot: the tensor this rank has, its box of the whole, and the boxes of all other ranks.

A `FlatPart` is the same for what FSDP1 divides.

All names of torch that are not public, and that this needs, are in `private`; `tests/ranks/sharded/test_private.py`
has one test for each. Which box a rank has is what torch.distributed.checkpoint works out with the same function.

Runs of consecutive elements of arrays: what a rank has where parameters are divided as one long row (FSDP1).

The state of an optimizer as empty tensors that are divided as its parameters are, to read a snapshot into.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from ckpt_engine.grouping import grouped
from ckpt_engine.ranks.boxes import Box, Grid, tiles
from ckpt_engine.state.json_types import dtype_of
from ckpt_engine.store.manifest import Entry
from ckpt_engine.store.tree import keyed

PRIVATE = {
    "torch.distributed.tensor._utils._compute_local_shape_and_global_offset": "the box of any coordinate of a mesh",
    "torch.distributed.tensor.DTensor._local_tensor": "the local tensor, at the price of an attribute",
    "torch.distributed.tensor.DTensor._spec": "placements and mesh, likewise",
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh": "which ranks have the same part, on the other meshes",
}
"""Every name in use that is not public, and what for."""
_teams: dict[int, _Team] = {}
"""By `id` of meshes that live: two that are equal may be cut out of different ones."""
NOTHING = Box((0,), (0,))


@dataclass(frozen=True, slots=True)
class Shard:
    """Of a DTensor: how it is divided, which part of it is here, and the ranks of its mesh."""

    grid: Grid
    box: Box
    ranks: frozenset[int]


def is_sharded(value: object) -> bool:
    """Whether it is a DTensor or a `FlatPart`. Where the module of DTensors is not imported none is one."""
    if type(value) is FlatPart:
        return True
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: Any) -> torch.Tensor:
    """The live tensor that this rank has."""
    if type(tensor) is FlatPart:
        return tensor.part
    found: torch.Tensor = tensor._local_tensor
    if type(found) is torch.Tensor:
        return found  # at every snapshot, of every tensor: `to_local` takes many times as long
    with torch.no_grad():
        found = tensor.to_local()
    return found.wait() if hasattr(found, "wait") else found


def is_wrapper(tensor: object) -> bool:
    """Whether it is a tensor of other tensors (torchao's low-bit ones), which has no memory itself; no DTensor."""
    return hasattr(type(tensor), "__tensor_flatten__") and not is_sharded(tensor)


def here(tensor: Any) -> torch.Tensor:
    """What this rank has of any tensor: all of a plain one."""
    if is_sharded(tensor):
        return local(tensor)
    return cast(torch.Tensor, tensor)


def parts_of(tensor: Any) -> Iterator[torch.Tensor]:
    """The tensors with memory that this rank has of any tensor: of one of others those, of a plain one itself."""
    if is_wrapper(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, name))
    else:
        yield here(tensor)


def divided_like(tensor: Any, part: torch.Tensor) -> torch.Tensor:
    """A tensor that is divided as `tensor` is, of which this rank has `part`; the other way round than `here`."""
    if not is_sharded(tensor):
        return part
    from torch.distributed.tensor import DTensor

    found: torch.Tensor = DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return found


def signature(tensor: Any) -> tuple[Any, ...]:
    """Equal for tensors that are divided alike."""
    if type(tensor) is FlatPart:
        return tensor.signature
    spec = tensor._spec
    return type(tensor), tensor.shape, spec.placements, spec.mesh


def problem(tensor: Any) -> str | None:
    """Why a DTensor cannot be stored or filled, or None."""
    if type(tensor) is FlatPart:
        return None
    if any(placement.is_partial() for placement in tensor.placements):
        return f"its values are partial sums ({_shown(tensor)}): redistribute it first"
    if tensor.device_mesh.get_coordinate() is None:
        return "this rank is not part of its mesh"
    mine = local(tensor)
    if type(mine) not in (torch.Tensor, torch.nn.Parameter):
        return f"its local part is a {type(mine).__name__}"
    grid = _grid_of(tensor)
    if grid is None:
        return f"a rank has several separate runs of it ({_shown(tensor)})"
    if mine.numel() and tuple(mine.shape) != _own(tensor, grid).shape:
        return f"its local part is {tuple(mine.shape)}, and torch divides {tuple(tensor.shape)} otherwise"
    return None


def shard_of(tensor: Any) -> Shard:
    """How a DTensor without `problem` is divided."""
    if type(tensor) is FlatPart:
        return Shard(tensor.grid, tensor.box, tensor.ranks)
    grid = _grid_of(tensor)
    assert grid is not None
    return Shard(grid, _own(tensor, grid), frozenset(_team_of(tensor.device_mesh).ranks))


@dataclass(frozen=True, slots=True)
class _Team:
    """The ranks of a mesh, below one more dimension: those of all meshes that are cut alike out of the same one.

    What FSDP2 divides over one dimension of a larger mesh is the same for every place in the other dimensions.

    Args:
        shape: of the places; the last dimensions are those of the mesh.
        ranks: by place, in C order.
        own: this rank.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    own: int


def _team_of(mesh: Any) -> _Team:
    if id(mesh) not in _teams:
        _teams[id(mesh)] = _make_team(mesh)
        weakref.finalize(mesh, _teams.pop, id(mesh), None)
    return _teams[id(mesh)]


def _make_team(mesh: Any) -> _Team:
    ranks, everyone = mesh.mesh.numpy(), _root_of(mesh).mesh.numpy()
    places = {int(rank): place for place, rank in np.ndenumerate(everyone)}
    found = np.array([places[int(rank)] for rank in ranks.ravel()])
    varies = [bool(np.ptp(found[:, dimension])) for dimension in range(everyone.ndim)]
    steps = [range(1 if differs else n) for n, differs in zip(everyone.shape, varies, strict=True)]
    alike = np.stack(
        [
            everyone[tuple(np.where(varies, found, np.array(place)).T)].reshape(ranks.shape)
            for place in itertools.product(*steps)
        ]
    )
    return _Team(alike.shape, tuple(alike.ravel().tolist()), int(ranks[tuple(mesh.get_coordinate())]))


def _own(tensor: Any, grid: Grid) -> Box:
    number = grid.of(_team_of(tensor.device_mesh).own)
    return grid.boxes[number] if number is not None else Box((0,) * len(grid.shape), (0,) * len(grid.shape))


def _grid_of(tensor: Any) -> Grid | None:
    team = _team_of(tensor.device_mesh)
    return _grid(tuple(tensor.shape), team.shape, team.ranks, tuple(tensor.placements))


def _root_of(mesh: Any) -> Any:
    root = getattr(mesh, "_get_root_mesh", None)
    if root is not None:
        return root()
    from torch.distributed.device_mesh import _mesh_resources  # before torch 2.8

    return _mesh_resources.get_root_mesh(mesh)


@lru_cache(maxsize=4096)
def _grid(
    shape: tuple[int, ...], team: tuple[int, ...], ranks: tuple[int, ...], placements: Sequence[Any]
) -> Grid | None:
    """The grid of a team; None: the part of some rank is no box."""
    numbers = np.array(ranks).reshape(team)
    cut = [not placement.is_replicate() for placement in placements]
    holders: dict[Box, list[int]] = {}
    steps = [range(n if is_cut else 1) for n, is_cut in zip(team[1:], cut, strict=True)]
    for coordinate in itertools.product(*steps):
        sizes, offsets = _part_of(shape, team[1:], list(coordinate), placements)
        index = (slice(None), *(at if is_cut else slice(None) for at, is_cut in zip(coordinate, cut, strict=True)))
        found = Box(tuple(map(int, offsets)), tuple(map(int, sizes)))
        if found.count or 0 in shape:
            box = found if 0 not in shape else Box.whole(shape)
            holders.setdefault(box, []).extend(int(rank) for rank in numbers[index].ravel())
    boxes = sorted(holders, key=lambda box: box.offsets)
    if 0 not in shape and not tiles(shape, boxes):
        return None
    return Grid(shape, tuple(boxes), tuple(tuple(sorted(holders[box])) for box in boxes))


def _part_of(shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: list[int], placements: Sequence[Any]) -> Any:
    """Sizes and offsets of what the rank at a coordinate of a mesh has."""
    try:
        from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as compute
    except ImportError:  # torch 2.6 asks a mesh for the rest
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        asked: Any = SimpleNamespace(
            ndim=len(mesh), shape=mesh, size=mesh.__getitem__, get_coordinate=lambda: coordinate
        )
        return compute_local_shape_and_global_offset(shape, asked, placements)
    return compute(shape, mesh, coordinate, placements)


def _shown(tensor: Any) -> str:
    return ", ".join(map(str, tensor.placements))


@dataclass(frozen=True, slots=True, eq=False)
class FlatPart:
    """What this rank has of an array: a run of its elements in C order.

    Args:
        part: live, of one dimension. Where there is nothing it MUST be a tensor of its own memory, because tensors that
            share memory count as tied.
        grid: who has which run.
        ranks: all that were asked, those with nothing included.
        rank: this one.
    """

    part: torch.Tensor
    grid: Grid
    ranks: frozenset[int]
    rank: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self.grid.shape

    @property
    def box(self) -> Box:
        """The run: one dimension, whatever the array has."""
        number = self.grid.of(self.rank)
        return NOTHING if number is None else self.grid.boxes[number]

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for arrays that are divided alike."""
        return FlatPart, self.grid.signature

    def like(self, part: torch.Tensor) -> FlatPart:
        """Another array that is divided as this one is, of which this rank has `part`."""
        return FlatPart(part, self.grid, self.ranks, self.rank)

    def one(self, part: torch.Tensor) -> FlatPart:
        """A single number that the ranks have which have something of this array."""
        holders = tuple(sorted({rank for ranks in self.grid.holders for rank in ranks}))
        return FlatPart(part, _number(holders), self.ranks, self.rank)


@lru_cache(maxsize=1024)
def _number(holders: tuple[int, ...]) -> Grid:
    return Grid((), (Box((0,), (1,)),), (holders,))


def grid_of_runs(shape: Sequence[int], runs: Sequence[tuple[int, int, int]]) -> Grid:
    """The grid of an array whose elements are dealt in runs.

    Args:
        runs: (rank, first element, one after the last) of each rank that has something. Several may have the same run;
            otherwise they lie one behind another and are the array.
    """
    holders = grouped((Box((start,), (stop - start,)), rank) for rank, start, stop in runs)
    boxes = sorted(holders, key=lambda box: box.offsets)
    return Grid(tuple(shape), tuple(boxes), tuple(tuple(sorted(holders[box])) for box in boxes))


def optimizer_shell(
    optimizer: torch.optim.Optimizer,
    tree: Any,
    entries: Mapping[str, Entry],
    flat: Mapping[int, FlatPart] | None = None,
) -> dict[str, dict[Any, dict[str, Any]]]:
    """What of `optimizer.state_dict()` is divided over ranks.

    Before its first step an optimizer has no state that could be filled. Everything that is not of the shape of a
    parameter that is a DTensor (the count of steps) is left out: it is read as it is.

    Args:
        tree: the node of that state dict in a manifest; its states have the numbers of parameters, as torch's have.
        entries: of the manifest.
        flat: of parameters that are no DTensors but divided all the same, by their `id`.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parts = flat or {}
    found: dict[Any, dict[str, Any]] = {}
    for number, states in keyed(tree.get("state")):
        if not isinstance(number, int) or number >= len(parameters):
            continue
        parameter = parts.get(id(parameters[number]), parameters[number])
        if not is_sharded(parameter):
            continue
        for name, node in keyed(states):
            entry = entries.get(str(node.get("entry"))) if isinstance(node, dict) else None
            if entry is not None and tuple(node.get("view", {}).get("shape", entry.shape)) == tuple(parameter.shape):
                found.setdefault(number, {})[name] = _empty(parameter, dtype_of(entry.dtype))
    return {"state": found}


def _empty(parameter: Any, dtype: torch.dtype) -> Any:
    if isinstance(parameter, FlatPart):
        return parameter.like(torch.zeros_like(parameter.part, dtype=dtype))
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
