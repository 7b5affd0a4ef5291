"""A small model in every layout, on the first `size` ranks of a process group, with an optimizer that has stepped."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckpt_engine.ranks.process_group import ProcessGroupRanks

LAYOUTS = ("ddp", "fsdp2", "tp", "hsdp", "fsdp2+tp")
_PAIRS = {1: (1, 1), 2: (2, 1), 4: (2, 2)}
"""Ranks in two dimensions."""


class FirstRanks:
    """The first `size` ranks of the default group, for one checkpointer.

    Args:
        group: all ranks; one object serves many checkpointers, because connecting takes time.
        name: which checkpointer it is: the same on all ranks.
    """

    def __init__(self, group: ProcessGroupRanks, size: int, name: str) -> None:
        self.rank, self.size = group.rank, size
        self.node, self.address = group.node, group.address
        self.own = frozenset({"rng"})
        self.wait_seconds = 60.0
        self.store = _Part(group.store, f"{name}/")

    def divides(self, path: tuple[Any, ...]) -> bool:
        return True


class _Part:
    """Keys of a store with a prefix."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def set(self, key: str, value: str) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str) -> str | None:
        found: str | None = self._store.get(self._prefix + key)
        return found

    def add(self, key: str) -> int:
        found: int = self._store.add(self._prefix + key)
        return found

    def remove(self, key: str) -> None:
        self._store.remove(self._prefix + key)

    def wait(self, key: str, timeout: float) -> str:
        found: str = self._store.wait(self._prefix + key, timeout)
        return found


class Net(nn.Module):
    """Rows that no number of ranks divides, a scalar, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.up = nn.Linear(10, 16)
        self.down = nn.Linear(16, 6)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


class Trained:
    """A model and its optimizer after two steps.

    Args:
        meshes: see `meshes`.
        seed: of weights and data.
    """

    def __init__(self, layout: str, meshes: dict[str, DeviceMesh], seed: int) -> None:
        torch.manual_seed(seed)
        self.model: Any = Net()
        if layout == "tp":
            _parallelize(self.model, meshes["flat"])
        elif layout == "fsdp2":
            fully_shard(self.model.up, mesh=meshes["flat"])
            fully_shard(self.model, mesh=meshes["flat"])
        elif layout == "hsdp":
            fully_shard(self.model, mesh=meshes["pairs"])
        elif layout == "fsdp2+tp":
            _parallelize(self.model, meshes["pairs"]["inner"])
            fully_shard(self.model, mesh=meshes["pairs"]["outer"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        for _ in range(2):
            self.step()

    def step(self) -> torch.Tensor:
        """The same data on every rank."""
        loss: torch.Tensor = self.model(torch.randn(4, 10)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": {"rank": dist.get_rank()},
        }


def meshes(size: int) -> dict[str, DeviceMesh]:
    """Meshes of the first `size` ranks. All ranks of the group call this."""
    numbers = torch.arange(size)
    return {
        "flat": DeviceMesh("cpu", numbers, mesh_dim_names=("flat",)),
        "pairs": DeviceMesh("cpu", numbers.view(_PAIRS[size]), mesh_dim_names=("outer", "inner")),
    }


def gathered(node: Any) -> Any:
    """A state with whole plain tensors: copies."""
    if isinstance(node, DTensor):
        return node.full_tensor().clone()
    if isinstance(node, torch.Tensor):
        return node.clone()
    if isinstance(node, dict):
        return {key: gathered(value) for key, value in node.items()}
    return [gathered(value) for value in node] if isinstance(node, list) else node


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two states differ, bit for bit."""
    if isinstance(a, torch.Tensor):
        same = type(a) is type(b) and a.dtype == b.dtype and torch.equal(a, b)
        return [] if same else [path]
    if isinstance(a, dict):
        if list(a) != list(b):
            return [f"{path}: {list(a)} and {list(b)}"]
        return [found for key in a for found in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, list | tuple):  # torch makes lists of tuples on the way
        return [found for i, (x, y) in enumerate(zip(a, b, strict=True)) for found in differences(x, y, f"{path}/{i}")]
    return [] if a == b else [f"{path}: {a} and {b}"]


def _parallelize(model: Any, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
