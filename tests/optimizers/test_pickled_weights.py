"""A model with tensors of other tensors, which the option `pickle` stores, is resumed like any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_engine import Checkpointer
from ckpt_engine.errors import MismatchError, UnstorableLeafError
from tests.tracking.conftest import arena_at_once, one_thread

__all__ = ["arena_at_once", "one_thread"]


class Scaled(torch.Tensor):
    """Integers and their scale, as low-bit weights have them."""

    q: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, q: torch.Tensor, scale: torch.Tensor) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=scale.dtype)
        return made

    def __init__(self, q: torch.Tensor, scale: torch.Tensor) -> None:
        self.q, self.scale = q, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["q", "scale"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].q, args[0].scale)
        if func is torch.ops.aten.copy_.default:
            args[0].q.copy_(args[1].q)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        if func is torch.ops.aten.clone.default:
            return cls(args[0].q.clone(), args[0].scale.clone())
        raise NotImplementedError(func)


class LowBit(nn.Module):
    """Multiplies by a weight of integers, which stays as it is."""

    def __init__(self, width: int, as_parameter: bool) -> None:
        super().__init__()
        weight = Scaled(torch.randint(-9, 9, (width, width), dtype=torch.int8), torch.rand(width))
        if as_parameter:
            self.weight = nn.Parameter(weight, requires_grad=False)
        else:
            self.register_buffer("weight", weight)

    def forward(self, x: torch.Tensor) -> Any:
        weight: Any = self.weight
        return x @ (weight.q * weight.scale)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "parameter": (lambda: nn.Sequential(LowBit(4, True), nn.Linear(4, 1)), "model/0.weight"),
    "buffer": (lambda: nn.Sequential(LowBit(4, False), nn.Linear(4, 1)), "model/0.weight"),
    "within others": (
        lambda: nn.Sequential(nn.Sequential(LowBit(4, True), LowBit(4, False)), nn.Linear(4, 1)),
        "model/0.*",
    ),
}


def train(folder: Path, model: nn.Module, steps: int, **options: Any) -> list[str]:
    """A run of so many steps in all; its losses."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=1e-3)  # type: ignore[index]
    losses = []
    with Checkpointer(str(folder), every_n_steps=2, writer="thread", **options) as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        for _ in range(run.global_step, steps):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()).hex())
            run.step()
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_pickled_weights_are_resumed_bit_for_bit(name: str, tmp_path: Path) -> None:
    """The process that resumes makes others, and has those of the snapshot afterwards."""
    make, pattern = MODELS[name]
    torch.manual_seed(0)
    whole = train(tmp_path / "whole", make(), 6, pickle=[pattern])
    torch.manual_seed(0)
    first = train(tmp_path / "run", make(), 4, pickle=[pattern])
    torch.manual_seed(1)
    assert [*first, *train(tmp_path / "run", make(), 6, pickle=[pattern])] == whole


def test_a_pickled_weight_does_not_excuse_others(tmp_path: Path) -> None:
    """What is a plain tensor is compared as ever."""
    train(tmp_path, nn.Sequential(LowBit(4, True), nn.Linear(4, 1)), 2, pickle=["model/0.weight"])
    with pytest.raises(MismatchError, match=r"1\.weight: \[1, 4\] saved, \[2, 4\] here"):
        train(tmp_path, nn.Sequential(LowBit(4, True), nn.Linear(4, 2)), 4, pickle=["model/0.weight"])


def test_without_the_option_the_refusal_names_it(tmp_path: Path) -> None:
    """Before anything is trained."""
    with pytest.raises(UnstorableLeafError, match=r"model/0\.weight") as refused:
        train(tmp_path, nn.Sequential(LowBit(4, True), nn.Linear(4, 1)), 2)
    assert "pickle: [that path]" in str(refused.value)
