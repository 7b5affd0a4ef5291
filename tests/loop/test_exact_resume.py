"""A plain loop that is resumed from any boundary, under other seeds, is the uninterrupted run, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_engine.restore.choose import assemble
from ckpt_engine.tools.compare import Comparison
from ckpt_engine.tools.stored_run import LATEST, find_run
from tests.loop.runs import LOADERS, Case, assert_continues, every_boundary, only, shuffled, taken, train_plain

LOOPS = {
    "evaluation within epochs": Case(evaluate_every=2),
    "no evaluation": Case(evaluation=None),
    "accumulation of 2": Case(accumulate=2),
    "accumulation of 4": Case(accumulate=4, loader=shuffled(30)),
    "one batch per epoch": Case(loader=shuffled(4), epochs=6),
    "two batches per epoch": Case(loader=shuffled(8), epochs=6),
    "one step per epoch": Case(loader=shuffled(16), accumulate=4, epochs=6),
}
CASES = {**{name: Case(loader=loader) for name, loader in LOADERS.items()}, **LOOPS}
FEW = ("shuffled", "two workers", "stateful iterable dataset", "evaluation within epochs", "one step per epoch")


@pytest.mark.cells(2)
@pytest.mark.parametrize("name", FEW)
def test_a_few_configurations_resume_exactly(name: str, tmp_path: Path) -> None:
    """Tracking leaves the run as it is; from the middle, three generations of resume repeat it."""
    case, every = CASES[name], 1 if name == "one step per epoch" else 3
    reference, snapshots = taken(train_plain, case, tmp_path / "run", every)
    assert len(snapshots) >= 3
    chosen = snapshots[len(snapshots) // 2]
    assert_continues(train_plain, case, reference, chosen, tmp_path / "run", tmp_path / "resumed", every)


def test_the_last_snapshot_of_a_resumed_run_is_that_of_the_uninterrupted_one(tmp_path: Path) -> None:
    """Where a pass is resumed so late that no boundary within it is left, too."""
    case = Case(evaluation=None, epochs=1)
    _, snapshots = taken(train_plain, case, tmp_path / "run")
    train_plain(case, every_boundary(only(tmp_path / "run", snapshots[-1], tmp_path / "resumed")), seed=1)
    whole, resumed = (assemble(*find_run(str(tmp_path / name)).find(LATEST)) for name in ("run", "resumed"))
    assert [str(one) for one in Comparison(whole, resumed) if not one.measured] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_boundary_resumes_exactly(name: str, tmp_path: Path) -> None:
    """Whatever boundary a run is resumed from, it continues bit for bit, and so do its heirs."""
    case = CASES[name]
    reference, snapshots = taken(train_plain, case, tmp_path / "run")
    for snapshot in snapshots:
        assert_continues(train_plain, case, reference, snapshot, tmp_path / "run", tmp_path / snapshot.id)
