"""Every loader a trainer has goes on where it was: three generations deep, under other seeds, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lightning.loader_cases import CASES
from tests.lightning.runs import Case, Outcome, Saved, every_batch, fit, only, resumer, saved, trained
from tests.lightning.test_exact_resume import taken
from tests.lightning.test_kill import Plan, Trainers, assert_survives
from tests.loop.runs import report

QUICK = {"validation: persistent workers", "combined: max_size"}
GENERATIONS = 3


def assert_continues(reference: Outcome, case: Case, root: Path, snapshot: Saved, target: Path) -> None:
    """Resume from `snapshot`, and twice more out of the resumed runs, under other seeds; nothing may differ."""
    for generation in range(GENERATIONS):
        where = f"generation {generation}: {snapshot.kind}, epoch {snapshot.epoch}, batch {snapshot.batch}"
        folder = only(root, snapshot, target / str(generation))
        last = generation == GENERATIONS - 1
        callbacks = [resumer(folder)] if last else every_batch(folder)
        resumed = fit(case, callbacks, ckpt_path="auto", seed=1234 + generation + snapshot.step)
        assert resumed.trace == reference.trace[len(reference.trace) - len(resumed.trace) :], where
        assert trained(resumed.trace, 0, 0) == trained(reference.trace, snapshot.epoch, snapshot.batch), where
        assert resumed.digest == reference.digest, where
        # Draws of such a dataset for its order and for its samples look the same.
        lost = [one.why for one in report(folder).not_restored]
        assert [why for why in lost if "IterableDataset draws from the global random streams" not in why] == [], where
        later = [s for s in saved(folder) if s.kind not in ("stopped", "finished") and s.step > snapshot.step]
        if last or not later:
            return
        root, snapshot = folder, later[min(1, len(later) - 1)]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_every_loader_resumes_exactly(name: str, tmp_path: Path) -> None:
    """The callback leaves the run as it is; early, middle and late boundaries resume it, quickly the middle one."""
    case = CASES[name]
    reference, snapshots = taken(case, tmp_path / "run", every=2 if name in QUICK else 1)
    half = len(snapshots) // 2
    some = snapshots[half : half + 1] if name in QUICK else snapshots[1 :: max(1, half // 4)]
    for number, snapshot in enumerate(some):
        assert_continues(reference, case, tmp_path / "run", snapshot, tmp_path / str(number))


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    server = Trainers()
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3 * len(CASES)))
def test_randomised_kills(number: int, tmp_path: Path, trainers: Trainers) -> None:
    """Each case three times, with one to three kills at random instants; every life has another seed."""
    draw = random.Random(number)
    kills = tuple((draw.randint(1, 20), draw.uniform(0, 0.05)) for _ in range(draw.randint(1, 3)))
    assert_survives(Plan(sorted(CASES)[number % len(CASES)], kills, {}), tmp_path, trainers)
