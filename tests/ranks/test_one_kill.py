"""One kill of a loop of several ranks, and they go on. The slow suite plays every trainer, size and layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.ranks.elastic_runs import Lives
from tests.ranks.launch import Launcher

SAMPLES = 48
STEPS = 2
"""After which a life is killed."""
FSDP2 = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch has no FSDP2 on CPUs")


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    made = Launcher("tests.ranks.train_elastic")
    yield made
    made.close()


@pytest.fixture
def lives(launcher: Launcher, tmp_path: Path) -> Lives:
    return Lives(launcher, tmp_path, "plain", epochs=1, samples=SAMPLES, options={"writer": "process"})


def test_two_ranks_go_on_exactly_after_one_is_killed(launcher: Launcher, tmp_path: Path, lives: Lives) -> None:
    """Batches, random draws, weights and optimizer state of both are those of a run that nothing interrupts."""
    lives.run(2, kill_after=STEPS, victim=1, pace=0.2)  # the others end with it, before the run does
    assert lives.run(2) == [0, 0], lives.logs()
    whole = Lives(launcher, tmp_path / "whole", "plain", epochs=1, samples=SAMPLES)
    whole.folder.mkdir()
    assert whole.run(2) == [0, 0], whole.logs()
    assert lives.start(1) >= STEPS
    for rank in range(2):
        assert lives.lines(1, rank) == whole.lines(0, rank)[lives.start(1) :]


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "now", "layout"),
    [
        (2, 1, "ddp"),
        pytest.param(2, 1, "fsdp2", marks=FSDP2),
        pytest.param(1, 2, "ddp", marks=pytest.mark.slow),
        pytest.param(2, 3, "ddp", marks=pytest.mark.slow),
    ],
)
def test_another_number_of_ranks_goes_on_with_what_was_saved(before: int, now: int, layout: str, lives: Lives) -> None:
    """Ranks with a whole or a divided model are killed; others have their state, and each sample comes once.

    Their steps are others, so that none is compared.
    """
    lives.run(before, layout=layout, kill_after=STEPS, pace=0.03)
    assert lives.run(now) == [0] * now, lives.logs()
    why = f"another number of processes: the snapshot is of {before}, now {now}"
    assert lives.report()["replay"] == {"result": "not compared", "steps": 0, "why": why, "first": None}
    assert lives.start(1) >= STEPS
    lives.require_saved_state(1)
    lives.require_whole_epochs(now - 1)
