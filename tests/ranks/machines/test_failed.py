"""Ranks that end by an error, as most do when one is lost: what they had in memory is there for the restarted ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.checkpointer import Checkpointer
from tests.ranks.runs import SharedStore, ThreadRanks, on_all

SIZE = 2


def checkpointers(root: Path) -> list[Checkpointer]:
    """Of one start of all ranks, with writers that are processes."""
    store = SharedStore()
    return [
        Checkpointer(tiers=["memory", str(root)], ranks=ThreadRanks(rank, SIZE, store), linger=60)
        for rank in range(SIZE)
    ]


def state_of(step: int, rank: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((64, 8), float(step))}, "own": {"rank": torch.tensor([step, rank])}}


def train(root: Path, *, durable: bool) -> None:
    """Three steps into memory, the last one durable too if it is to be, and then an error on every rank."""
    made = checkpointers(root)

    def run(rank: int) -> None:
        with pytest.raises(ZeroDivisionError), made[rank] as ckpt:
            for step in range(1, 4):
                ckpt.save(state_of(step, rank), step=step, durable=durable and step == 3).wait(60)
            raise ZeroDivisionError

    on_all(run, SIZE)


def resumed(root: Path) -> str:
    """Where all ranks find the state of step 3."""
    made = checkpointers(root)
    places = []

    def run(rank: int) -> None:
        with made[rank] as ckpt:
            state = ckpt.load()
            assert state is not None
            assert torch.equal(state["model"]["w"], state_of(3, rank)["model"]["w"])
            assert state["own"]["rank"].tolist() == [3, rank]
            assert ckpt.loaded is not None
            places.append(ckpt.loaded.place)

    on_all(run, SIZE)
    (place,) = set(places)
    return place


def test_what_failed_ranks_had_in_memory_is_there_for_the_next_ones(tmp_path: Path) -> None:
    """It also became durable, as all of their writers are there."""
    train(tmp_path, durable=False)
    assert len(list((tmp_path / "snapshots").glob("*-s0000000003-*.json"))) == 1
    assert resumed(tmp_path) == "memory"


def test_what_is_durable_is_not_kept_in_memory(tmp_path: Path) -> None:
    """A run that is stopped with a last snapshot leaves no process behind."""
    train(tmp_path, durable=True)
    assert resumed(tmp_path) != "memory"
