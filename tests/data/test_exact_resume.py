"""A resumed loop delivers bitwise the batches of the uninterrupted one, for every kind of loader and every boundary."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.data.exactness import Level
from tests.data.loader_kinds import KINDS, Kind, shared
from tests.data.loop import Boundary, Run, train

QUICK = [pytest.param(kind, id=str(kind)) for kind in KINDS if not kind.slow]
ALL = [pytest.param(kind, id=str(kind)) for kind in KINDS]


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    """Without the level, which a resume may lower, and without what StatefulDataLoader says about its workers' ends.

    When it learns of those depends on timing.
    """
    timed = state["mode"] == "native" and state.get("workers")
    return {k: v for k, v in state.items() if k != "exactness" and not (timed and k == "native")}


def check(kind: Kind, reference: Run, boundary: Boundary, seed: int) -> Run:
    """Resume at `boundary` and compare everything that follows with the reference run."""
    resumed = train(kind.make, seed=seed, resume=boundary, at_end="finish_epoch")
    at = (boundary.where, boundary.epoch, boundary.seen)
    assert resumed.batches == reference.after(boundary.seen), at
    assert resumed.end == reference.end, at
    assert resumed.restoration is not None
    assert resumed.restoration.exactness.level in (Level.EXACT, kind.level), resumed.restoration
    following = [b for b in reference.boundaries if b.seen > boundary.seen]
    again = [b for b in resumed.boundaries if b.seen > boundary.seen]
    assert [(b.where, b.epoch, b.seen) for b in again] == [(b.where, b.epoch, b.seen) for b in following], at
    for ours, theirs in zip(again, following, strict=True):
        assert ours.rng == theirs.rng
        assert comparable(ours.data) == comparable(theirs.data), (at, ours.where, ours.seen)
    return resumed


@pytest.mark.cells(9)
@pytest.mark.parametrize("kind", QUICK)
def test_following_changes_nothing_and_resume_is_exact(kind: Kind) -> None:
    """A run equals one without us; resumes early, late, between and at the end of epochs equal the run.

    So do the states met on the way, hence a resume of a resume is exact wherever a resume is.
    """
    alone, reference = train(kind.make, follow=False), train(kind.make)
    assert reference.batches == alone.batches
    assert reference.end == alone.end
    boundaries = reference.boundaries
    half = len(boundaries) // 2
    for number in shared(kind, (0, 2, half - 1, half, half + 2)):
        check(kind, reference, boundaries[number], seed=100 + number)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_three_chained_resumes_are_exact_from_every_boundary(kind: Kind) -> None:
    """Every boundary of two epochs, and from each two more resumes out of the resumed runs."""
    alone, reference = train(kind.make, follow=False), train(kind.make)
    assert reference.batches == alone.batches
    assert reference.end == alone.end
    for number, boundary in enumerate(reference.boundaries):
        for hop in (1, 3, 0):
            resumed = check(kind, reference, boundary, seed=1000 + 10 * number + hop)
            if len(resumed.boundaries) <= hop:
                break
            boundary = resumed.boundaries[hop]
