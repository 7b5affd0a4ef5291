"""How objects of a run show themselves in a shell and in a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer


@pytest.mark.parametrize("name", ["run", "a <b> & c"])
def test_a_checkpointer_shows_where_its_run_is_and_how_far(tmp_path: Path, name: str) -> None:
    """Before its first snapshot, after it, and after a resume; nothing is read for it."""
    root = tmp_path / name
    with Checkpointer(root, writer="thread") as ckpt:
        assert repr(ckpt) == f"Checkpointer(at {root}, newest durable none yet)"
        assert not root.exists()
        ckpt.save({"x": torch.zeros(2)}, step=1_500).wait()
        assert repr(ckpt) == f"Checkpointer(at {root}, newest durable step 1,500)"
    with Checkpointer(root, writer="thread") as ckpt:
        ckpt.load()
        assert "resumed from step 1,500" in repr(ckpt)
        table = ckpt._repr_html_()
    assert "<th>resumed from</th><td>step 1,500</td>" in table
    assert (name in table) == ("<" not in name)


def test_a_tracker_shows_epoch_and_step_too(tmp_path: Path) -> None:
    """As they are at that moment."""
    model = torch.nn.Linear(2, 1)
    parts: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    loader = torch.utils.data.DataLoader(list(torch.zeros(4, 2)), batch_size=1)
    with Checkpointer(tmp_path / "run", writer="thread", every_n_steps=2) as ckpt:
        run = ckpt.track(**parts, loader=loader)
        assert repr(run).endswith("epoch 0, step 0)")
        for _ in range(run.epoch, 2):
            for batch in loader:
                model(batch).sum().backward()
                parts["optimizer"].step()
        shown = repr(run)
        assert shown.startswith(f"Tracker(at {tmp_path}/run, ") and shown.endswith("epoch 2, step 8)"), shown
        assert "<th>step</th><td>8</td>" in run._repr_html_()
