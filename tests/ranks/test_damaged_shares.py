"""Damage in the share of one rank: what any rank finds all ranks know, and it is noted as where one process loads."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.store import names
from ckpt_engine.store.manifest import Manifest, Piece
from tests.cli.conftest import ckpt  # noqa: F401 - a fixture
from tests.ranks.runs import on_all, open_ranks
from tests.ranks.test_checkpointer import close_all
from tests.restore.test_resumed_past_damage import newest, repository, rot
from tests.snapshot.passage import same

Ckpt = Callable[..., Any]
WAIT_SECONDS = 60.0
SIZE = 2


def state(value: int, rank: int) -> dict[str, Any]:
    """Shared weights that never change, and what a rank has of its own, of which two values may be equal."""
    return {
        "model": {"w": torch.arange(1_400_000.0)},
        "own": {"mine": torch.full((200_000,), float(10 * value + rank))},
    }


def save_all(ranks: list[Checkpointer], step: int, *values: int) -> None:
    """With one value for all ranks, or one for each."""
    handles = on_all(lambda rank: ranks[rank].save(state(values[rank % len(values)], rank), step=step), SIZE)
    for handle in handles:
        assert handle.wait(WAIT_SECONDS)


def load_all(ranks: list[Checkpointer], value: int) -> None:
    for rank, found in enumerate(on_all(lambda rank: ranks[rank].load(), SIZE)):
        assert same(found, state(value, rank))


def spoil(root: Path, rank: int) -> tuple[str, str]:
    """Damage what the newest snapshot has of this rank alone; the snapshot, and the name of the file."""
    manifest = newest(root)
    (piece,) = (
        piece
        for name, entry in manifest.entries.items()
        if name.endswith("mine")
        for piece in entry.pieces
        if names.data_rank(manifest.files[piece.file].name) == rank
    )
    return manifest.info.id, rot(root, manifest, piece)


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_resume_that_passes_it_over_notes_it_and_refers_to_nothing_of_it(tmp_path: Path, rank: int) -> None:
    """Whichever rank reads it. What is saved next has the value again that is damaged."""
    root = tmp_path / "run"
    ranks = open_ranks(root, SIZE, keep={"last": 9})
    save_all(ranks, 1, 1)
    save_all(ranks, 2, 2)
    close_all(ranks)
    snapshot, file = spoil(root, rank)
    ranks = open_ranks(root, SIZE, keep={"last": 9})
    load_all(ranks, 1)
    assert (root / names.quarantine_name(snapshot)).exists()
    assert repository(root).scan().damaged[0].files == (file,)
    save_all(ranks, 3, 2)
    close_all(ranks)
    assert file not in [one.name for one in newest(root).files]
    ranks = open_ranks(root, SIZE, keep={"last": 9})
    load_all(ranks, 2)
    assert ranks[0].loaded is not None and ranks[0].loaded.rejected == ()
    close_all(ranks)


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_run_mends_what_another_tier_has(tmp_path: Path, rank: int) -> None:
    """Whichever rank reads it."""
    near, far = tmp_path / "near", tmp_path / "far"
    options = {"tiers": [str(near), str(far)], "keep": {"last": 9}, "wait_at_end": WAIT_SECONDS}
    ranks = open_ranks(None, SIZE, **options)
    save_all(ranks, 1, 1)
    save_all(ranks, 2, 2)
    close_all(ranks)
    manifest = newest(near)
    was = {file.name: (near / file.name).read_bytes() for file in manifest.files}
    _, file = spoil(near, rank)
    ranks = open_ranks(None, SIZE, **options)
    load_all(ranks, 2)
    save_all(ranks, 3, 3)
    deadline, pause = time.monotonic() + WAIT_SECONDS, threading.Event()
    while (near / file).read_bytes() != was[file]:
        assert time.monotonic() < deadline
        pause.wait(0.05)
    close_all(ranks)


def test_a_shared_file_is_mended_from_a_place_with_the_newest_snapshot_only(ckpt: Ckpt, tmp_path: Path) -> None:
    """All its bytes are there, in another form; of the older snapshot that needs them the place has no manifest."""
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = [{"url": str(near)}, {"url": str(far), "codec": "zstd", "keep": {"last": 1}}]
    ranks = open_ranks(None, SIZE, tiers=tiers, keep={"last": 9}, wait_at_end=WAIT_SECONDS)
    save_all(ranks, 1, 1)
    save_all(ranks, 2, 2)
    close_all(ranks)
    older, last = repository(near).ids()
    assert [parsed.id for parsed in repository(far).ids()] == [last.id]
    shutil.copytree(near, tmp_path / "was")
    manifest, name = newest(near), names.data_name(older.id, 1)
    file = rot(near, manifest, next(one for one in manifest.entries["model/w"].pieces if in_file(manifest, one, name)))
    assert ckpt("repair", near, "--from", far).code == 0
    assert (near / file).read_bytes() == (tmp_path / "was" / file).read_bytes()


def in_file(manifest: Manifest, piece: Piece, name: str) -> bool:
    return manifest.files[piece.file].name == name
