"""DTensors of all ranks in one process: meshes that believe to be on a rank, over a process group that does nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore


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
    names = ("outer", "inner")[-torch.tensor(ranks).dim() :]
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


def part(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """What the rank of `mesh` has of `whole`."""
    shape, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    here = whole[tuple(slice(a, a + n) for a, n in zip(offsets, shape, strict=True))].clone()
    return DTensor.from_local(
        here, mesh, placements, run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )
