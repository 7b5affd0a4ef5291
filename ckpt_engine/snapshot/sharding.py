"""What a DTensor is to a snapshot: the tensor this rank has, its box of the whole, and the boxes of all other ranks.

All names of torch that are not public, and that this needs, are in `private`; `tests/sharded/test_private.py` has one
test for each. Which box a rank has is what torch.distributed.checkpoint works out with the same function.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ckpt_engine.ranks.boxes import Box, Grid, tiles

PRIVATE = {
    "torch.distributed.tensor._utils._compute_local_shape_and_global_offset": "the box of any coordinate of a mesh",
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh": "which ranks have the same part, on the other meshes",
}
"""Every name in use that is not public, and what for."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Of a DTensor: how it is divided, which part of it is here, and the ranks of its mesh."""

    grid: Grid
    box: Box
    ranks: frozenset[int]


def is_sharded(value: object) -> bool:
    """Whether it is a DTensor. Where nobody has imported that module nothing is."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: Any) -> torch.Tensor:
    """The live tensor that this rank has."""
    with torch.no_grad():
        found: torch.Tensor = tensor.to_local()
    return found


def here(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of any tensor: all of a plain one."""
    return local(tensor) if is_sharded(tensor) else tensor


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
    return type(tensor), tuple(tensor.shape), tensor.placements, tensor.device_mesh


def problem(tensor: Any) -> str | None:
    """Why a DTensor cannot be stored or filled, or None."""
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
    grid = _grid_of(tensor)
    assert grid is not None
    return Shard(grid, _own(tensor, grid), frozenset(_alike(tensor.device_mesh).ravel().tolist()))


def _own(tensor: Any, grid: Grid) -> Box:
    mesh = tensor.device_mesh
    number = grid.of(int(mesh.mesh[tuple(mesh.get_coordinate())]))
    return grid.boxes[number] if number is not None else Box((0,) * len(grid.shape), (0,) * len(grid.shape))


def _grid_of(tensor: Any) -> Grid | None:
    ranks = _alike(tensor.device_mesh)
    return _grid(tuple(tensor.shape), ranks.shape, tuple(ranks.ravel().tolist()), tuple(tensor.placements))


def _alike(mesh: Any) -> np.ndarray[Any, Any]:
    """The ranks of a mesh, below one more dimension: those of all meshes that are cut alike out of the same one.

    What FSDP2 divides over one dimension of a larger mesh is the same for every place in the other dimensions.
    """
    ranks, everyone = mesh.mesh.numpy(), _root_of(mesh).mesh.numpy()
    found = np.array([np.argwhere(everyone == rank)[0] for rank in ranks.ravel()])
    varies = [bool(np.ptp(found[:, dimension])) for dimension in range(everyone.ndim)]
    steps = [range(1 if differs else n) for n, differs in zip(everyone.shape, varies, strict=True)]
    siblings = [
        everyone[tuple(np.where(varies, found, np.array(place)).T)].reshape(ranks.shape)
        for place in itertools.product(*steps)
    ]
    return np.stack(siblings)


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
    """The grid of meshes of the shape `team[1:]`; None: the part of some rank is no box."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    numbers = np.array(ranks).reshape(team)
    cut = [not placement.is_replicate() for placement in placements]
    holders: dict[Box, list[int]] = {}
    steps = [range(n if is_cut else 1) for n, is_cut in zip(team[1:], cut, strict=True)]
    for coordinate in itertools.product(*steps):
        sizes, offsets = _compute_local_shape_and_global_offset(shape, team[1:], list(coordinate), placements)
        index = (slice(None), *(at if is_cut else slice(None) for at, is_cut in zip(coordinate, cut, strict=True)))
        found = Box(tuple(map(int, offsets)), tuple(map(int, sizes)))
        if found.count or 0 in shape:
            box = found if 0 not in shape else Box.whole(shape)
            holders.setdefault(box, []).extend(int(rank) for rank in numbers[index].ravel())
    boxes = sorted(holders, key=lambda box: box.offsets)
    if 0 not in shape and not tiles(shape, boxes):
        return None
    return Grid(shape, tuple(boxes), tuple(tuple(sorted(holders[box])) for box in boxes))


def _shown(tensor: Any) -> str:
    return ", ".join(map(str, tensor.placements))
