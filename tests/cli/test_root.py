"""How a snapshot is named on the command line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckpt_engine.cli.root import open_run
from ckpt_engine.errors import StorageMissingError

ARRAY = {"a/x": np.zeros(1)}


def find_snapshot(repository: Any, *wanted: str) -> str:
    return open_run(repository.storage.root).find(*wanted)[0]


def test_a_snapshot_is_named_by_id_prefix_step_or_latest(run_folder: Any) -> None:
    """All spellings of the same snapshot find it."""
    ids = [run_folder.add(step, ARRAY) for step in (1200, 2400)]
    repository = run_folder.repository
    for wanted in (ids[0], ids[0][:8], "00000001", "1200", "step=1200"):
        assert find_snapshot(repository, wanted) == ids[0], wanted
    assert find_snapshot(repository) == find_snapshot(repository, "latest") == ids[1]


def test_latest_is_the_highest_seq_and_not_the_highest_step(run_folder: Any) -> None:
    """After a resume from an older snapshot, steps repeat; age decides."""
    run_folder.add(2400, ARRAY)
    older, newer = run_folder.add(1200, ARRAY), run_folder.add(1200, ARRAY)
    assert find_snapshot(run_folder.repository, "latest") == newer
    assert find_snapshot(run_folder.repository, "1200") == newer
    assert find_snapshot(run_folder.repository, older) == older


def test_a_step_wins_over_the_start_of_an_id(run_folder: Any) -> None:
    """`0` is step 0 where there is one, although every id starts with it."""
    run_folder.add(5, ARRAY)
    zero = run_folder.add(0, ARRAY)
    assert find_snapshot(run_folder.repository, "0") == zero


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ("0000", "2 snapshots at .* start with '0000'"),
        ("1300", "no snapshot '1300' .*; the nearest step is 1200.*ckpt ls"),
        ("step=9999", "the nearest step is 2400"),
        ("newest", "no snapshot 'newest'"),
        ("", "no snapshot ''"),
    ],
)
def test_what_cannot_be_found_says_what_is_near(run_folder: Any, wanted: str, text: str) -> None:
    """Ambiguous and missing names are errors that help."""
    run_folder.add(1200, ARRAY)
    run_folder.add(2400, ARRAY)
    with pytest.raises(StorageMissingError, match=text):
        find_snapshot(run_folder.repository, wanted)


def test_a_run_without_snapshots_has_no_latest(run_folder: Any) -> None:
    """The message says that the run has no snapshot."""
    with pytest.raises(StorageMissingError, match="it has none yet"):
        find_snapshot(run_folder.repository)
