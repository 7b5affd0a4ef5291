"""What is durable after older data was damaged can be restored: no tier refers to a piece for long that it has lost."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.store.manifest import Piece
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage

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


@pytest.mark.cells(3)
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


@pytest.mark.parametrize("codec", ["raw", "delta", "zstd"])
@pytest.mark.parametrize("rots", [True, False])
def test_what_the_disk_has_not_kept_is_named_at_once(
    tmp_path: Path, codec: str, rots: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One piece of each durable snapshot is read back. The next one does not refer to the file that has lost it, though
    all other pieces there are as they were."""
    chosen, first = list[str](), list[Path]()
    choice = secrets.choice

    def rotting(pieces: Sequence[tuple[str, Piece]]) -> tuple[str, Piece]:
        name, piece = choice(pieces)
        chosen.append(name)
        first[:] = first or (tmp_path / "data").iterdir()
        if rots and len(chosen) == 1:
            with first[piece.file].open("r+b") as file:
                file.seek(piece.offset + piece.nbytes // 2)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes(255 - one for one in byte))
        return name, piece

    monkeypatch.setattr(secrets, "choice", rotting)
    state = {**{f"frozen{number}": torch.randn(10_000) for number in range(30)}, "w": torch.zeros(2000)}
    streams = random.getstate()
    with Checkpointer(tiers=[{"url": str(tmp_path), "codec": codec}], writer="thread") as ckpt:
        snapshot = ckpt.save(state, step=1).wait(WAIT_SECONDS)
        state["w"].fill_(2)
        newest = ckpt.save(state, step=2).wait(WAIT_SECONDS)
    assert random.getstate() == streams and len(chosen) == 2
    found = [record.message for record in caplog.records if record.levelname == "ERROR"]
    files = {Path(file.name) for file in Repository(open_storage(str(tmp_path))).read(newest).files}
    shared = files & {one.relative_to(tmp_path) for one in first}
    damaged = Repository(open_storage(str(tmp_path))).scan().damaged
    assert [one.id for one in damaged] == ([snapshot] if rots else [])  # in quarantine
    if not rots:
        assert shared and not found
        return
    (message,) = found
    assert not shared and f"{chosen[0]!r}" in message and snapshot in message and "CKPT401" in message
    assert first[0].name in message and f"`ckpt verify {tmp_path}`" in message


def test_a_state_without_tensors_has_nothing_to_read_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is saved like any other."""
    with Checkpointer(str(tmp_path), writer="thread") as ckpt:
        assert ckpt.save({"a": 1}, step=1).wait(WAIT_SECONDS)
    assert not [record for record in caplog.records if record.levelname != "INFO"]
