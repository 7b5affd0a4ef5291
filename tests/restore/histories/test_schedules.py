"""Two jobs in any order of loading, taking the lease, saving, dying and starting again lose nothing of each other."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.restore.histories.schedule import KINDS, Schedule, preload

QUICK = (20, 5)
EACH = 20


@pytest.mark.long
@pytest.mark.parametrize("seed", QUICK)
def test_nothing_acknowledged_is_removed_in_a_few_schedules(seed: int, tmp_path: Path) -> None:
    """Plain loops: of each line the newest snapshots are there, and who resumes goes on from the newest."""
    preload()
    schedule = Schedule(seed, tmp_path, "plain")
    schedule.play()
    counted, wrong = schedule.judge()
    assert wrong == [], schedule.said
    assert counted > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, 200, EACH))
def test_nothing_acknowledged_is_removed_in_200_schedules_of_every_trainer(first: int, tmp_path: Path) -> None:
    """The same with Lightning, Accelerate and transformers among the jobs; see `campaign`."""
    wanted = ("torch._dynamo", "accelerate", "lightning.pytorch", "transformers")
    preload(*(name for name in wanted if importlib.util.find_spec(name)), "lightning_ckpt", "accelerate_ckpt")
    for seed in range(first, first + EACH):
        schedule = Schedule(seed, tmp_path / str(seed), KINDS[seed % len(KINDS)])
        schedule.folder.mkdir()
        schedule.play()
        assert schedule.judge()[1] == [], (seed, schedule.said)
