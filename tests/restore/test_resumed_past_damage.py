"""A run that resumes past damaged bytes refers to none of them in the snapshots that it takes from then on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.store.manifest import Manifest, Piece
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from tests.snapshot.passage import same

WAIT_SECONDS = 60.0
FROZEN = 30


def state(step: int) -> dict[str, Any]:
    """Most of it never changes, in pieces of their own: a later snapshot refers to them."""
    generator = torch.Generator().manual_seed(1)
    frozen = {f"frozen{number}": torch.randn(20_000, generator=generator) for number in range(FROZEN)}
    return {**frozen, "w": torch.full((300_000,), float(step))}


def repository(root: Path) -> Repository:
    return Repository(open_storage(str(root)))


def newest(root: Path) -> Manifest:
    there = repository(root)
    return there.read(there.ids()[-1].id)


def rot(root: Path, manifest: Manifest, piece: Piece) -> str:
    """Change a byte of a piece; the name of its file."""
    name = manifest.files[piece.file].name
    with (root / name).open("r+b") as file:
        file.seek(piece.offset + piece.nbytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return name


def unlooked(manifest: Manifest) -> list[Piece]:
    """The frozen pieces that the next snapshot does not happen to read back."""
    pieces = sorted(
        (piece for name, entry in manifest.entries.items() if name != "w" for piece in entry.pieces),
        key=lambda piece: (piece.file, piece.offset),
    )
    return [
        piece
        for number, piece in enumerate(pieces)
        if number not in {(manifest.info.seq + n) % FROZEN for n in range(4)}
    ]


@pytest.mark.cells(1)
@pytest.mark.parametrize("codec", ["raw", "delta"])
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_what_another_tier_has_served_is_written_again(tmp_path: Path, codec: str, writer: str) -> None:
    """The near copy of a frozen tensor is damaged, and the far one is not: what is saved next rests on no bad byte."""
    near, far = tmp_path / "near", tmp_path / "far"
    options: dict[str, Any] = {
        "tiers": [{"url": str(near), "codec": codec}, {"url": str(far), "codec": codec}],
        "keep": {"last": 9},
        "writer": writer,
        "wait_at_end": WAIT_SECONDS,
    }
    for step in (1, 2):
        with Checkpointer(options) as ckpt:
            assert ckpt.save(state(step), step=step).wait(WAIT_SECONDS)
    before = newest(near)
    damaged = rot(near, before, unlooked(before)[0])
    with Checkpointer(options) as ckpt:
        assert same(ckpt.load(), state(2))
        assert ckpt.loaded is not None and [one.file for one in ckpt.loaded.repairs] == [damaged]
        assert ckpt.save(state(3), step=3).wait(WAIT_SECONDS)
    assert damaged not in [file.name for file in newest(near).files]
    with Checkpointer(str(near)) as ckpt:
        assert same(ckpt.load(), state(3)) and ckpt.loaded is not None and ckpt.loaded.rejected == ()


@pytest.mark.cells(1)
@pytest.mark.parametrize("codec", ["raw", "delta"])
@pytest.mark.parametrize("far", [False, True])
def test_what_could_not_be_used_is_not_referred_to(tmp_path: Path, codec: str, far: bool) -> None:
    """The newest snapshot is damaged wherever it is, and an older one is taken: later ones do not rest on it."""
    near, places = tmp_path / "near", [tmp_path / "near", *([tmp_path / "far"] if far else [])]
    options: dict[str, Any] = {
        "tiers": [{"url": str(place), "codec": codec} for place in places],
        "keep": {"last": 9},
        "writer": "thread",
        "wait_at_end": WAIT_SECONDS,
    }
    start = state(1) | {"frozen0": torch.zeros(20_000), "frozen1": torch.zeros(20_001)}
    for step, saved in ((1, start), (2, state(2))):
        with Checkpointer(options) as ckpt:
            assert ckpt.save(saved, step=step).wait(WAIT_SECONDS)
    manifest = newest(near)
    for place in places:
        there = newest(place)
        (piece,) = there.entries["frozen1"].pieces
        damaged = rot(place, there, piece)
        assert damaged not in [file.name for file in repository(place).read(repository(place).ids()[0].id).files]
    with Checkpointer(options) as ckpt:
        assert same(ckpt.load(), start)
        assert ckpt.loaded is not None and [one.id for one in ckpt.loaded.rejected] == [manifest.info.id]
        assert ckpt.save(state(3), step=3).wait(WAIT_SECONDS)
    for place in places:
        assert damaged not in [file.name for file in newest(place).files]
        with Checkpointer(str(place)) as ckpt:
            assert same(ckpt.load(), state(3)) and ckpt.loaded is not None and ckpt.loaded.rejected == ()
