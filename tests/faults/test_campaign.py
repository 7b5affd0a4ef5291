"""The fault campaign: a small one always, the one of the bar when there is time."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.faults.campaign import campaign, table
from tests.faults.disk import SABOTAGES
from tests.faults.draws import SMALL_BYTES, Draw, draw, draws
from tests.faults.run import Outcome
from tests.servers.s3 import rclone

BAR_RUNS = 312
JOBS = 2


def wrong(outcomes: list[Outcome]) -> list[str]:
    return [f"{one.draw.name}: {line}" for one in outcomes for line in (*one.bad, *one.lost)]


def a_few() -> list[Draw]:
    """A network, a disk and a power loss, small."""
    network = draw(0, 1, "reset", "replicate")
    disk, power = draw(1, 1, "eio", "save"), draw(2, 1, "power_loss", "prune")
    alone: dict[str, Any] = {"tiers": ("a",), "target": "a"}
    drawn = [network, dataclasses.replace(disk, **alone), dataclasses.replace(power, **alone)]
    return [dataclasses.replace(one, seconds=0.2, state_bytes=SMALL_BYTES) for one in drawn]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_few_faults_leave_nothing_bad_and_lose_nothing(tmp_path: Path) -> None:
    """Each fault has struck, and what it struck is whole or absent."""
    outcomes = campaign(a_few(), "moto", tmp_path, jobs=JOBS)
    assert wrong(outcomes) == []
    assert [one.draw.name for one in outcomes if not one.struck] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_over_obstore_leave_nothing_bad_and_lose_nothing(tmp_path: Path) -> None:
    """Trainers and writers are killed over a network that breaks; what is there is read through the other transport."""
    pytest.importorskip("obstore")
    outcomes = campaign(draws(6, seed=5, faults=["reset"]), "moto", tmp_path, jobs=JOBS, transport="obstore")
    assert wrong(outcomes) == []
    assert {"kill_both"} <= {one.draw.ending for one in outcomes}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_a_writer_that_breaks_a_rule_is_noticed(tmp_path: Path, sabotage: str) -> None:
    """The same campaign is not satisfied with files that are not synced, nor with manifests that come before data."""
    one = dataclasses.replace(draw(0, 1, "power_loss", "save"), tiers=("a",), target="a")
    # All over the 16 operations of a snapshot; in 6 of them a manifest that came first is alone.
    todo = [dataclasses.replace(one, number=after, after=after) for after in range(16, 36, 5)]
    outcomes = campaign(todo, "moto", tmp_path, jobs=JOBS, sabotage=sabotage)
    assert sum(bool(one.bad or one.lost) for one in outcomes) > 0


@pytest.mark.slow
@pytest.mark.timeout(10800)
def test_the_whole_campaign_leaves_nothing_bad_and_loses_nothing(tmp_path: Path) -> None:
    """312 runs, all faults in all phases, on a server that keeps what it has when it is killed."""
    try:
        rclone()
    except LookupError as err:
        pytest.skip(str(err))
    outcomes = campaign(draws(BAR_RUNS, seed=1), "rclone", tmp_path, jobs=JOBS)
    print(table(outcomes))
    assert wrong(outcomes) == []
    assert sum(one.struck > 0 for one in outcomes) > 0.9 * BAR_RUNS
