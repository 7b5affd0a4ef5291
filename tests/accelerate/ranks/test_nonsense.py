"""Ranks that do not want the same: each of them, or the one that waits for the others, soon says what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.accelerate.ranks.lives import Lives

SECONDS = {True: 2.0, False: 60.0}
"""That ranks wait for each other, where one does not come, and where all do; minutes for users."""
ONE_RUN = "has its snapshots in"


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("wrong", "who", "why"),
    [
        pytest.param(
            {"1": {"without": True}}, 0, "1 of 2 ranks have not called resume_from(): 1", marks=pytest.mark.slow
        ),
        ({"1": {"forgets": True}}, 0, "1 of 2 ranks have not called resume_from(): 1"),
        ({"0": {"without": True}}, 1, "rank 0 has not called resume_from()"),
        ({"1": {"subfolder": "other"}}, 0, ONE_RUN),
        pytest.param(
            {"1": {"arguments": {"ignore_data_skip": True}}},
            0,
            "ignore_data_skip=True begins the epoch's data again",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["no callback", "no resume_from", "not on rank 0", "another folder", "another argument"],
)
def test_nonsense_is_one_clear_error(wrong: dict[str, Any], who: int, why: str, lives_in: Callable[..., Lives]) -> None:
    """No rank hangs, and nothing is written."""
    missing = "resume_from()" in why
    lives = lives_in("lives", ranks=wrong, agree_seconds=SECONDS[missing])
    life = lives.start(lets_end=not missing)
    statuses = lives.join()
    assert all(statuses), life.log()
    assert str(life.exit(who)).startswith("ConfigError: "), life.log()
    assert why in life.exit(who)
    assert not (lives.folder / "run").exists()
