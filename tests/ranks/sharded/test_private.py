"""The names of torch that DTensors need and that are not public are there, mean what they did, and are in one file."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from ckpt_engine.errors import ConfigError, RanksError
from ckpt_engine.loop import distributed_models
from ckpt_engine.loop.components import NamedParts
from ckpt_engine.loop.distributed_models import GradientOrder
from ckpt_engine.state import sharding
from tests.ranks.sharded.pretend import mesh_of, part, pretended

PACKAGE = Path(sharding.__file__).parents[1]


@pytest.fixture(autouse=True)
def four_ranks() -> Iterator[None]:
    with pretended(4):
        yield


@pytest.mark.parametrize("name", sharding.PRIVATE)
def test_torch_has_it(name: str) -> None:
    """A torch that moves one of these is noticed here, and not by a user."""
    if name.endswith(("_global_offset", "_get_root_mesh")) and not hasattr(DeviceMesh, "_get_root_mesh"):
        pytest.skip("older than 2.8, where others do the same")
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


FSDP_PRIVATE = {
    "FullyShardedDataParallel._handle": "the unit's parameters; None where it has none",
    "FlatParamHandle.flat_param": "the row of them",
    "FlatParamHandle.uses_sharded_strategy": "False for NO_SHARD, where each rank has all",
    "FlatParamHandle.process_group": "the ranks that divide it",
    "FlatParamHandle.reshard": "the row is this rank's run again after a forward without backward",
    "FlatParameter._params": "the parameters, as the optimizer has them; None without use_orig_params",
    "FlatParameter._fqns": "their names",
    "FlatParameter._shapes": "their shapes",
    "FlatParameter._numels_with_padding": "how long they are, and what lies between them",
    "FlatParameter._is_padding_mask": "which of these is between them",
    "FlatParameter._sharded_size": "how long the run of a rank is",
    "FlatParameter._local_shard": "the run of this rank, from the first forward on",
    "Module._state_dict_hooks": "taken off, with its three siblings, while FSDP1 would gather",
}
"""Every name in use that is not public, and what for."""


@pytest.mark.parametrize("name", FSDP_PRIVATE)
def test_fsdp1_has_it(name: str) -> None:
    """FSDP1 and its rows of parameters have the private names that we use."""
    unit: Any = FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu"), use_orig_params=True)
    owners: dict[str, Any] = {
        "FullyShardedDataParallel": unit,
        "FlatParamHandle": unit._handle,
        "FlatParameter": unit._handle.flat_param,
        "Module": unit,
    }
    owner, _, attribute = name.partition(".")
    assert hasattr(owners[owner], attribute) or attribute in FlatParameter.__annotations__


def test_every_rank_knows_the_rows_of_all() -> None:
    """What is worked out of the lengths of parameters is what FSDP1 itself says of the run of this rank."""
    net = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    whole = {name: value.detach().clone() for name, value in net.named_parameters()}
    unit: Any = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    state = distributed_models.FlatModels([unit]).state(unit)
    assert list(state) == list(whole)
    for name, info in zip(unit._handle.flat_param._fqns, unit._handle.flat_param._shard_param_infos, strict=True):
        part = state[name]
        assert part.shape == tuple(whole[name].shape)
        assert sum(box.count for box in part.grid.boxes) == whole[name].numel()
        if info.in_shard:
            start, stop = info.intra_param_start_idx, info.intra_param_end_idx + 1
            assert (part.box.offsets, part.box.shape) == ((start,), (stop - start,))
            assert torch.equal(part.part, whole[name].reshape(-1)[start:stop])
        else:
            assert part.part.numel() == part.box.count == 0


def test_rows_of_many_parameters_are_refused() -> None:
    """Without the original parameters an optimizer has only rows, and the strategy is refused."""
    unit = FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu"), use_orig_params=False)
    with pytest.raises(ConfigError, match="use_orig_params=True"):
        distributed_models.flat_models([unit])


def flat(module: nn.Module) -> Any:
    """A unit of FSDP1."""
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


def test_ranks_that_have_only_what_is_frozen_are_refused() -> None:
    """They cannot tell which states the others have; each rank says so, at the start."""
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 2))
    net[0].requires_grad_(False)
    for unit, trained in ((flat(net), ""), (flat(nn.Linear(32, 32)), "bias")):
        wanted = [p for name, p in unit.named_parameters() if name.endswith(trained) and p.requires_grad]
        optimizer = torch.optim.AdamW(wanted)
        with pytest.raises(ConfigError, match=r"gives ranks \[0, 1, 2\] nothing of what AdamW trains") as error:
            NamedParts({"model": unit, "optimizer": optimizer})
        assert "units of their own" in str(error.value)
    whole = flat(nn.Linear(32, 32))
    NamedParts({"model": whole, "optimizer": torch.optim.AdamW(whole.parameters())})


def test_a_unit_without_a_step_has_no_states() -> None:
    """No rank has a state then, whether it has something of a parameter or not: the tree is the same on all."""
    net = nn.Sequential(flat(nn.Linear(8, 8)), flat(nn.Linear(8, 8)))
    optimizer = torch.optim.AdamW(net.parameters())
    models = distributed_models.FlatModels([net])
    assert models.optimizer_state(optimizer)["state"] == {}
    for parameter in net[0].parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.numel() else None
    optimizer.step()
    assert list(models.optimizer_state(optimizer)["state"]) == [0, 1], "its weight, and its bias that is elsewhere"


DDP_PRIVATE = {
    "DistributedDataParallel._get_ddp_logging_data": "the order, once there is one",
    "DistributedDataParallel._build_params_for_reducer": "the parameters in the order of their numbers",
    "DistributedDataParallel._comm_hooks": "what else sees gradients, and its state",
    "DistributedDataParallel.find_unused_parameters": "there is no other order then",
    "DistributedDataParallel.reducer": "a backward pass without a forward",
    "DistributedDataParallel.require_forward_param_sync": "whether the next forward pass takes the buffers of rank 0",
    "DistributedDataParallel._join_config": "whether ranks may make other numbers of steps",
    "ProcessGroup._get_sequence_number_for_group": "whether all ranks are behind the same collective",
}
"""Every name in use that is not public, and what for."""


@pytest.mark.parametrize("name", DDP_PRIVATE)
def test_ddp_has_it(name: str) -> None:
    """DDP has the names that get and set the order of sums, and a wrapped model has no order yet."""
    owner, _, attribute = name.partition(".")
    wrapped: Any = DistributedDataParallel(nn.Linear(4, 3))
    assert hasattr({"DistributedDataParallel": wrapped, "ProcessGroup": wrapped.process_group}[owner], attribute)
    assert GradientOrder([wrapped]).state() == [b""]


def test_ranks_that_may_make_other_numbers_of_steps_have_no_snapshot() -> None:
    """A rank that is ahead would give its part at another moment: under Join, and after it."""
    wrapped = DistributedDataParallel(nn.Linear(4, 3))
    Join([wrapped], enable=False)
    assert GradientOrder([wrapped]).state() == [b""]
    Join([wrapped])
    with pytest.raises(RanksError, match="under Join"):
        GradientOrder([wrapped]).state()


def test_the_next_pass_after_a_resume_takes_the_buffers_of_rank_0_only_if_it_would_have() -> None:
    """Not after a validation: then a rank goes on with its own statistics of batch norm, which it got back."""
    wrapped, other = (DistributedDataParallel(nn.BatchNorm1d(4)) for _ in range(2))
    assert GradientOrder([wrapped]).syncs() == [True]
    with torch.no_grad():
        wrapped(torch.ones(2, 4))
    assert GradientOrder([wrapped]).syncs() == [False]
    GradientOrder([other]).restore_syncs([False])
    assert not other.will_sync_module_buffers()


def test_what_a_communication_hook_carries_from_step_to_step_is_not_restored() -> None:
    """PowerSGD adds the errors of earlier steps to gradients; a hook without a state of its own has nothing to lose."""
    states = [PowerSGDState(None), None, dist.group.WORLD]
    hooks = [powerSGD_hook, allreduce_hook, allreduce_hook]
    for state, hook, lost in zip(states, hooks, (["state of powerSGD_hook"], [], []), strict=True):
        wrapped = DistributedDataParallel(nn.Linear(2, 2))
        wrapped.register_comm_hook(state, hook)
        assert [one.name for one in GradientOrder([wrapped]).lost()] == lost
