"""Optimizers within others, and what they keep in attributes of their own, are resumed bit for bit or named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.loop.conftest import arena_at_once, one_thread
from tests.state.optimizers.nested import Beside, Sharpness, Slow
from tests.state.optimizers.runs import Case, assert_exact, resumed, tracked, train

__all__ = ["arena_at_once", "one_thread"]


def once(optimizer: Any, closure: Any) -> Any:
    """The step begins with the gradients that the one before has left."""
    return optimizer.step(closure)


def twice(optimizer: Any, closure: Any) -> Any:
    closure()
    return optimizer.step(closure)


def identity(parameter: Any) -> Any:
    return parameter


EXACT = {
    "shared state": Case(lambda m: Sharpness(m.parameters()), step=twice),
    "shared state, of the inner one": Case(lambda m: Sharpness(m.parameters(), delegates=True), step=twice),
    "gradients of the step before": Case(lambda m: Sharpness(m.parameters()), step=once),
    "those, of the inner one": Case(lambda m: Sharpness(m.parameters(), delegates=True), step=once),
    "around another": Case(lambda m: Slow(m.parameters())),
    "by parameter": Case(lambda m: Beside(m.parameters(), identity)),
    "by the id of a parameter": Case(lambda m: Beside(m.parameters(), id)),
    "by the id, in its state too": Case(lambda m: Beside(m.parameters(), id, reads=True)),
}


@pytest.mark.cells(2)
@pytest.mark.parametrize("name", EXACT)
def test_what_optimizers_share_and_keep_is_resumed(name: str, tmp_path: Path) -> None:
    assert_exact(EXACT[name], tmp_path)


def test_an_inner_optimizer_whose_state_nothing_has_is_named(tmp_path: Path) -> None:
    case = Case(lambda m: Sharpness(list(m.parameters()), shares=False), step=twice)
    tracked(case, tmp_path)
    _, lost, _ = resumed(case, tmp_path)
    assert [line for line in lost if "optimizer.base_optimizer (AdamW)" in line]


def test_gradients_that_no_step_uses_stay_out_of_snapshots(tmp_path: Path) -> None:
    """An optimizer of one's own that runs its closure first."""

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = torch.enable_grad()(closure)()
            super().step()
            return loss

    case = Case(lambda m: Own(m.parameters(), lr=1e-2), lambda: nn.Sequential(nn.Linear(8, 1)), step=once)
    wanted = train(case, None)
    tracked(case, tmp_path)
    found, lost, notes = resumed(case, tmp_path)
    assert (found.losses, found.end, lost) == (wanted.losses[-3:], wanted.end, [])
    assert not [note for note in notes if "gradient" in note]
