"""Each optimizer of torch is resumed bit for bit, and so are those of libraries that are installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.loop.conftest import arena_at_once, one_thread
from tests.state.optimizers.sweep import LIBRARIES, Cell, cells, run

__all__ = ["arena_at_once", "one_thread"]


@pytest.mark.cells(7)
@pytest.mark.parametrize("cell", list(cells(["torch"])), ids=str)
def test_an_optimizer_of_torch_goes_on_bit_for_bit(cell: Cell, tmp_path: Path) -> None:
    """Its report names nothing, although a schedule leaves a mark on it."""
    result = run(cell, tmp_path)
    assert result.is_good, result


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", [one for one in LIBRARIES if one != "torch"])
def test_an_optimizer_of_a_library_goes_on_bit_for_bit_or_its_first_snapshot_is_refused(
    library: str, tmp_path: Path
) -> None:
    found = [run(cell, tmp_path / str(cell)) for cell in cells([library])]
    if not found:
        pytest.skip(f"{library} is not installed")
    assert [one for one in found if not one.is_good] == []


class Unknown(torch.optim.SGD):
    """Of a user's own class, which is looked into for hidden state."""


def test_a_schedule_leaves_no_hidden_state_at_an_optimizer() -> None:
    """What `audit.attributes` leaves out is all that a schedule of torch notes there."""
    from ckpt_engine.audit.attributes import _SET_BY_SCHEDULERS

    optimizer = Unknown([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    before = set(vars(optimizer))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.step()
    schedule.step()
    assert set(vars(optimizer)) - before <= {*_SET_BY_SCHEDULERS, "step"}
