"""The sweep of all trainers: its cells are drawn as they should be, and a sample of them is exact or says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exact import sweep
from tests.exact.parts import CANNOT
from tests.exact.sweep import BAD, Sweep, draw, table


def test_cells_are_the_same_ones_every_time_and_have_everything() -> None:
    """150 of them: each trainer, loader, hook, metric, hidden state, accumulation and number of ranks."""
    cells = [draw(number) for number in range(150)]
    assert cells == [draw(number) for number in range(150)]
    for trainer in sweep.TRAINERS:
        assert sum(cell.trainer == trainer for cell in cells) == 30
    for name, count in (("loader", 13), ("evaluation", 6), ("hooks", 5), ("metric", 4), ("hidden", 15)):
        assert len({getattr(cell, name) for cell in cells}) == count, name
    assert {cell.accumulate for cell in cells} == {1, 2, 3}
    assert {(cell.trainer, cell.ranks) for cell in cells} == {(one, n) for one in sweep.TRAINERS for n in (1, 2)}
    early = {"dataset", "collate"}  # of loaders that read a batch early
    for cell in cells:
        reads_early = cell.hidden in early and cell.trainer in ("accelerate", "transformers")
        may_differ = cell.hidden in CANNOT or "augm" in cell.loader or reads_early
        assert may_differ or not cell.causes, cell


def test_a_life_is_compared_from_where_it_resumed() -> None:
    """Equal lines in order; a gap, another line, or one too many is a difference."""
    wanted = ["a", "b", "c", "d"]
    for done, reached in (([], 0), (["a", "b"], 0), (["b", "c", "d"], 2), (["c"], 2)):
        assert sweep._differs(done, wanted, reached) == ""
    for done, reached, found in (
        (["x"], 2, "it goes on with x"),
        (["c"], 1, "it skips from line 1 to line 2"),
        (["b", "d"], 1, "line 2 is d, not c"),
        (["d", "e"], 3, "line 4 is e, not nothing"),
    ):
        assert sweep._differs(done, wanted, reached) == found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_sample_is_exact_or_says_why_not(tmp_path: Path) -> None:
    """Twelve cells; `python -m tests.exact.sweep --cells 150` runs all."""
    made = Sweep(tmp_path)
    try:
        results = list(made.results(map(draw, SAMPLE), jobs=2))
    finally:
        made.close()
    assert [one for one in results if one.verdict in BAD] == [], table(results)
    assert sum(one.lives for one in results) > 2 * len(SAMPLE)


SAMPLE = (0, 2, 4, 5, 7, 9, 10, 12, 13, 17, 25, 41)
