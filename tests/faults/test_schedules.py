"""Random schedules of trainings and verbs with real kills: what is listed is whole, and nothing leaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.schedules import campaign

BAR_SCHEDULES = 200


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_collection_that_looks_at_no_manifest_is_noticed(tmp_path: Path) -> None:
    """The campaign is not satisfied with one that takes what snapshots share."""
    assert campaign(tmp_path, 12, seed=3, sabotage=True).bad


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_kills_leave_whole_snapshots_and_nothing_else(tmp_path: Path) -> None:
    """The campaign of the bar: `python -m tests.faults.schedules`."""
    tally = campaign(tmp_path, BAR_SCHEDULES, seed=1)
    assert tally.bad == []
    assert tally.kills > BAR_SCHEDULES
    assert tally.codecs >= {"raw", "rows", "zstd", "byteplane-zstd", "delta-byteplane-zstd"}
