"""Scripts of the kinds that were silently another run after a resume: each is bitwise now, or a difference is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exact.silent import SCRIPTS
from tests.exact.silent.lives import judge

QUICK = (
    "environments_with_slots_in_an_agent",
    "parameters_in_another_order",
    "noise_drawn_before_the_loop",
    "pool_in_a_local_list",
    "dict_that_has_the_model",
)


def test_there_are_forty_scripts_at_least() -> None:
    """Of all kinds."""
    assert len(SCRIPTS) >= 40
    assert set(QUICK) <= set(SCRIPTS)


@pytest.mark.cells(2)
@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in SCRIPTS])
def test_a_resume_is_bitwise_or_says_what_is_not(name: str, tmp_path: Path) -> None:
    """After a kill four steps behind the last snapshot, by a process with other seeds."""
    found = judge(name, tmp_path)
    assert found.verdict in ("bitwise", "found", "declared"), found
