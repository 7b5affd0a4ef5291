"""What is durable after older data was damaged can be restored: no tier refers to a piece for long that it has lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt_engine import Checkpointer

WAIT_SECONDS = 60.0
STEPS = 5
HURT_AT = 1


def flip(path: Path) -> None:
    """A byte of what is shared, behind the header."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, 5000)


TIERS = {
    "nearest": ([{"url": "near"}], "near"),
    "nearest, encoded": ([{"url": "near", "codec": "delta"}], "near"),
    "further": ([{"url": "near"}, {"url": "far"}], "far"),
    "further, encoded": ([{"url": "near"}, {"url": "far", "codec": "delta"}], "far"),
}


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
@pytest.mark.parametrize("where", TIERS)
def test_a_later_snapshot_does_not_rest_on_damaged_data(
    tmp_path: Path, where: str, damage: Callable[[Path], object]
) -> None:
    """The frozen weights lie in the first file, which is damaged while the run continues."""
    tiers, hurt = TIERS[where]
    options = {"keep": {"last": 9}, "writer": "thread", "wait_at_end": WAIT_SECONDS}
    state = {"frozen": torch.randn(300_000), "w": torch.zeros(2000)}
    wanted = state["frozen"].clone()
    for step in range(STEPS):
        with Checkpointer({**options, "tiers": [{**one, "url": str(tmp_path / one["url"])} for one in tiers]}) as ckpt:
            state["w"].fill_(step)
            assert ckpt.save(state, step=step).wait(WAIT_SECONDS)
        if step == HURT_AT:
            damage(max((tmp_path / hurt / "data").iterdir(), key=lambda path: path.stat().st_size))
    with Checkpointer(str(tmp_path / hurt)) as ckpt:
        found = ckpt.load()
        assert ckpt.loaded is not None and ckpt.loaded.rejected == ()
    assert torch.equal(found["frozen"], wanted) and found["w"][0] == STEPS - 1
