"""The names of torch that DTensors need and that are not public are there, mean what they did, and are in one file."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ckpt_engine.snapshot import sharding
from tests.sharded.pretend import mesh_of, part, pretended

PACKAGE = Path(sharding.__file__).parents[1]


@pytest.fixture(autouse=True)
def four_ranks() -> Iterator[None]:
    with pretended(4):
        yield


@pytest.mark.parametrize("name", sharding.PRIVATE)
def test_torch_has_it(name: str) -> None:
    """A torch that moves one of these is noticed here, and not by a user."""
    parts = name.split(".")
    owner: Any = torch
    for at in range(len(parts) - 1, 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:at]))
        except ImportError:
            continue
        for attribute in parts[at:-1]:
            owner = getattr(owner, attribute)
        break
    if name.endswith(("_local_tensor", "_spec")):
        owner = part(torch.zeros(4, 4), mesh_of([0, 1, 2, 3], 0), [Shard(0)])
    assert hasattr(owner, parts[-1])


def test_other_files_have_none_of_them() -> None:
    """What is not public stays behind one door."""
    own = {name.rpartition(".")[2] for name in sharding.PRIVATE} - {"_spec"}  # which others call theirs
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, own))})\b")
    users = [
        path.name for path in PACKAGE.rglob("*.py") if pattern.search(path.read_text()) and path.name != "sharding.py"
    ]
    assert users == []


@pytest.mark.parametrize("placements", [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Shard(0)]])
def test_every_rank_knows_the_boxes_of_all(placements: list[Any]) -> None:
    """What a rank works out for another one is what that one works out with the public function."""
    for shape in ((8, 6), (7, 5), (3, 1)):
        for rank in range(4):
            mesh = mesh_of([[0, 1], [2, 3]], rank)
            tensor = part(torch.zeros(shape), mesh, placements)
            shard = sharding.shard_of(tensor)
            sizes, offsets = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
            if 0 in sizes:
                assert shard.grid.of(rank) is None
                assert shard.box.count == 0
                continue
            number = shard.grid.of(rank)
            assert number is not None
            assert shard.grid.boxes[number] == shard.box
            assert (shard.box.shape, shard.box.offsets) == (tuple(sizes), tuple(offsets))
            assert tuple(sharding.local(tensor).shape) == shard.box.shape


def test_meshes_that_are_cut_alike_are_replicas() -> None:
    """FSDP2 over one dimension has the same boxes at every place of the other; flattened dimensions count as one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    outer = sharding.shard_of(part(torch.zeros(6, 2), mesh["outer"], [Shard(0)]))
    assert outer.grid.holders == ((0, 1), (2, 3))
    assert outer.ranks == frozenset(range(4))
    inner = sharding.shard_of(part(torch.zeros(6, 2), mesh["inner"], [Shard(0)]))
    assert inner.grid.holders == ((0, 2), (1, 3))
    flat = sharding.shard_of(part(torch.zeros(8, 2), mesh._flatten(), [Shard(0)]))
    assert flat.grid.holders == ((0,), (1,), (2,), (3,))


def test_what_is_here_becomes_a_tensor_again() -> None:
    """`divided_like` is `here` the other way round; plain tensors stay as they are."""
    tensor = part(torch.arange(21.0).view(7, 3), mesh_of([0, 1, 2, 3], 2), [Shard(0)])
    again: Any = sharding.divided_like(tensor, sharding.here(tensor))
    assert again.placements == tensor.placements
    assert again.shape == tensor.shape
    assert torch.equal(again.to_local(), tensor.to_local())
    plain = torch.zeros(3)
    assert sharding.here(plain) is plain
    assert sharding.divided_like(plain, plain) is plain
