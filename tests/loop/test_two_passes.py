"""Two passes over one tracked loader at the same time cannot be repeated, and the user learns that at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ckpt_engine import Checkpointer


def test_two_passes_at_the_same_time_are_reported_before_a_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else is about to be said, and no boundary is reached."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
    with Checkpointer(str(tmp_path), at_end=False).track(model=model, optimizer=optimizer, loader=loader):
        first, second = iter(loader), iter(loader)
        next(second)
        assert "run at the same time" not in caplog.text
        next(first)
        assert "two passes over 'loader' run at the same time" in caplog.text
