"""Parts of all ranks in one process: meshes that believe to be on a rank, over a process group that does nothing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt_engine.state.sharding import FlatPart, grid_of_runs


@contextmanager
def pretended(size: int) -> Iterator[None]:
    """A process group of `size` ranks in which nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(ranks: Any, rank: int) -> DeviceMesh:
    """The mesh as `rank` sees it."""
    if "_rank" not in inspect.signature(DeviceMesh.__init__).parameters:
        pytest.skip("a mesh of this torch belongs to real processes")
    names = ("outer", "inner")[-torch.tensor(ranks).dim() :]
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


def row(wholes: Mapping[str, torch.Tensor], rank: int, size: int) -> dict[str, FlatPart]:
    """What a rank has of arrays that lie one behind another, as FSDP1 divides them."""
    length = -(-sum(whole.numel() for whole in wholes.values()) // size)
    mine = torch.cat([whole.reshape(-1) for whole in wholes.values()])[rank * length : (rank + 1) * length].clone()
    found, start = {}, 0
    for name, whole in wholes.items():
        spans = [(max(0, r * length - start), min(whole.numel(), (r + 1) * length - start)) for r in range(size)]
        runs = [(r, low, high) for r, (low, high) in enumerate(spans) if high > low]
        low, high = spans[rank]
        at = start + low - rank * length
        here = mine[at : at + high - low] if high > low else torch.empty(0)
        found[name] = FlatPart(here, grid_of_runs(tuple(whole.shape), runs), frozenset(range(size)), rank)
        start += whole.numel()
    return found


def part(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """What the rank of `mesh` has of `whole`."""
    shape, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    here = whole[tuple(slice(a, a + n) for a, n in zip(offsets, shape, strict=True))].clone()
    return DTensor.from_local(
        here, mesh, placements, run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )
