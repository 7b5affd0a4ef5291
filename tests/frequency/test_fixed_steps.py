"""Snapshots at fixed steps come at these steps, also where the memory for them is not ready yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ckpt_engine import Checkpointer
from ckpt_engine.snapshot.arena import SharedSlot

WAIT_SECONDS = 60.0


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"every_n_steps": 5}, [5, 10, 15, 20]), ({"at_steps": [3], "at_end": False}, [3])],
    ids=str,
)
def test_the_first_one_does_not_wait_for_memory(
    options: dict[str, object],
    expected: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Its memory is touched by the copy then, which takes longer; a step later would be another step."""
    idle, prefault = threading.Event(), SharedSlot.prefault

    def starved(slot: SharedSlot, go_on: Callable[[], bool] = lambda: True) -> bool:
        if threading.current_thread().name.startswith("ckpt-prefault"):
            idle.wait(WAIT_SECONDS)
        return prefault(slot, go_on)

    monkeypatch.setattr(SharedSlot, "prefault", starved)
    request.addfinalizer(idle.set)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 0)  # a core is idle, so that memory is touched ahead
    model, loader = torch.nn.Linear(8, 1), DataLoader(TensorDataset(torch.ones(20, 8)))
    optimizer = torch.optim.Adam(model.parameters())
    with Checkpointer(tmp_path, writer="thread", keep={"last": 9}, **options) as ckpt:  # type: ignore[arg-type]
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for _ in range(run.epoch, 1):
            for step, (x,) in enumerate(loader):
                if step > expected[0]:
                    idle.set()
                    assert ckpt.wait(WAIT_SECONDS)
                model(x).sum().backward()
                optimizer.step()
    assert [one.step for one in ckpt.snapshots()] == expected
