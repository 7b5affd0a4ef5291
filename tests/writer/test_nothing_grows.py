"""A run of weeks makes a million snapshots: nothing that one of them leaves in memory may stay.

The writer is a thread here, so that both sides are in this process.
"""

from __future__ import annotations

import errno
import gc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.errors import SnapshotFailedError
from ckpt_engine.store.storage.disk import Disk
from ckpt_engine.writer.memory_snapshots import StagedJob

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


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Cycles stay."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("codec", ["raw", "delta"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_job_goes_with_its_last_reference(
    codec: str, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of its slot goes with it: where it is done, and where its error refers to what has raised it."""
    write = Disk.write

    def broken(self: Disk, *what: Any) -> Any:
        if broken_now:
            raise OSError(errno.EIO, "broken")
        return write(self, *what)

    monkeypatch.setattr(Disk, "write", broken)
    broken_now = False
    with Checkpointer(tiers=[{"url": str(tmp_path), "codec": codec}], writer="thread") as ckpt:
        for step in range(1, 5):
            broken_now = fails and step in (2, 3)
            with pytest.raises(SnapshotFailedError) if broken_now else nullcontext():
                ckpt.save({"weights": torch.full((1 << 16,), float(step))}, step=step).wait(30)
    assert [one.job.step for one in gc.get_objects() if isinstance(one, StagedJob)] == []
