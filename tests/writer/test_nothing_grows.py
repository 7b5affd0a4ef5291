"""A run of weeks makes a million snapshots: nothing that one of them leaves in memory may stay.

The writer is a thread here, so that both sides are in this process.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer

WARM, MORE = 20, 40
KEEP = {"last": 2}


def _containers() -> dict[int, tuple[Any, int]]:
    """What can gain an item with each snapshot, and how many it has: a deque with a limit cannot."""
    gc.collect()
    kinds = (set, dict, list)
    return {id(one): (one, len(one)) for one in gc.get_objects() if type(one) in kinds}


@pytest.mark.parametrize("count", [1, 2])
def test_no_container_gains_an_item_with_each_snapshot(count: int, tmp_path: Path) -> None:
    """Of those that are there after the first snapshots; with one tier and with two."""
    tiers = [{"url": str(tmp_path / str(number)), "keep": KEEP} for number in range(count)]
    weights = torch.zeros(64)
    with Checkpointer(tiers=tiers, writer="thread") as ckpt:
        for step in range(WARM):
            weights += 1
            ckpt.save({"weights": weights}, step=step).wait(30)
        before = _containers()
        for step in range(WARM, WARM + MORE):
            weights += 1
            ckpt.save({"weights": weights}, step=step).wait(30)
        after = _containers()
        grown = [
            one
            for number, (one, length) in after.items()
            if number in before and before[number][0] is one and length - before[number][1] >= MORE // 2
        ]
    assert [f"{type(one).__name__} with {str(list(one)[:2])[:300]}" for one in grown] == []
