"""Layers whose weights the first forward makes: a run that has some is tracked and resumed like any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_engine.errors import MismatchError
from tests.loop.conftest import arena_at_once, one_thread
from tests.state.optimizers.runs import Case, assert_exact, resumed, tracked

__all__ = ["arena_at_once", "one_thread"]
pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")


class Unused(nn.Module):
    """A lazy layer that no forward ever uses stays lazy."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.used, self.never = nn.LazyLinear(width), nn.LazyLinear(3)
        self.last = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.used(x).tanh())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "all lazy": lambda: nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(1)),
    "some": lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LazyLinear(1)),
    "with buffers": lambda: nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.Linear(16, 1)),
    "one is never used": Unused,
}


def trained(model: nn.Module) -> Any:
    return torch.optim.Adam([p for p in model.parameters()], lr=1e-2)  # noqa: C416 - of each, lazy or not


@pytest.mark.cells(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_lazy_layers_is_resumed_bit_for_bit(name: str, tmp_path: Path) -> None:
    """In the process that resumes they are lazy until the snapshot is loaded."""
    assert_exact(Case(trained, MODELS[name]), tmp_path)


def test_a_model_that_differs_elsewhere_is_refused_as_ever(tmp_path: Path) -> None:
    """A lazy weight fits any shape, and its layer's bias does not excuse others."""
    tracked(Case(trained, Unused), tmp_path)
    with pytest.raises(MismatchError, match=r"last\.weight: \[1, 16\] saved, \[1, 32\] here"):
        resumed(Case(trained, lambda: Unused(32)), tmp_path)
