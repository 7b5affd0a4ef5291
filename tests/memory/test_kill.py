"""`kill -9` at random moments with a memory tier: at most one iteration and the snapshot in flight are lost."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.memory.lives import Life, Run, Trainers

MOST_LOST = 2
"""The iteration that was under way, and the one whose snapshot was just being taken."""


class Lost:
    """Counts what each kill has lost, by the place that served the resume."""

    def __init__(self) -> None:
        self.rows: Counter[tuple[str, int]] = Counter()

    def add(self, run: Run, before: Life, after: Life, *, most: int = MOST_LOST) -> None:
        """Compare what the killed trainer had begun with where the next one goes on."""
        assert after.resumed is not None, after.log()
        step, place, said = after.resumed
        begun = max(before.steps("begin"), default=before.resumed[0] if before.resumed else 0)
        trained = bool(before.steps("begin"))
        lost = begun - step
        place = "durable tier" if place not in ("memory", "nowhere") else place
        if trained:
            assert lost <= most, f"{lost} steps lost from {place}: {before.log()}\n---\n{after.log()}"
            self.rows[place, lost] += 1
        else:
            # Killed before its first step: what it had resumed from is still there.
            assert lost <= 0, f"{lost} steps lost without training: {before.log()}\n---\n{after.log()}"
            self.rows[f"{place}, not trained yet", 0] += 1
        if place == "memory" and said is not None and trained:
            assert said in (lost, lost + 1), f"said {said}, lost {lost}: {after.log()}"

    def table(self) -> str:
        rows = [f"  {place:<28} {lost:>4}   {count:>5}" for (place, lost), count in sorted(self.rows.items())]
        return "\n".join(
            ["", "  resumed from                 lost   kills", *rows, f"  all {sum(self.rows.values()):>37}"]
        )


def die(life: Life, draw: random.Random, *, who: str = "trainer") -> None:
    """A random moment: of the resume, of the start, of a step, of a copy, of a commit."""
    if draw.random() < 0.1:
        _pause(draw.uniform(0.0, 0.4))
    else:
        life.wait_for_steps(draw.randint(1, 12))
        _pause(draw.uniform(0.0, 0.03))
    if who == "both":
        life.kill_writer()
    life.kill()


def _pause(seconds: float) -> None:
    import time

    time.sleep(seconds)  # not to synchronise: to be at a random moment


def finish(run: Run) -> None:
    """The last life trains to the end."""
    life = run.live()
    assert run.trainers.join() == 0, life.log()
    run.assert_exact(run.reference())


def kill_some(run: Run, draw: random.Random, kills: int, lost: Lost) -> None:
    """Kill so many trainers of a run, or fewer if it is done before."""
    before: Life | None = None
    for _ in range(kills):
        life = run.live()
        die(life, draw)
        assert run.trainers.join() in (-9, 0), life.log()
        if before is not None and life.resumed is not None:
            lost.add(run, before, life)
        if life.resumed is not None:
            before = life
        if life.steps("digest"):
            return
    last = run.live()
    assert run.trainers.join() == 0, last.log()
    if before is not None:
        lost.add(run, before, last)


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_killed_trainers_lose_one_iteration_and_nothing_else(lazy: bool, tmp_path: Path, trainers: Trainers) -> None:
    """Three kills at moments that differ from test to test; then the run is the one that was never killed."""
    lost = Lost()
    run = Run(trainers, tmp_path, steps=60, width=256, lazy=lazy)
    kill_some(run, random.Random(), 3, lost)
    run.assert_exact(run.reference())
    assert sum(count for (place, _), count in lost.rows.items() if "memory" in place) > 0, lost.table()
    run.assert_no_writer_left(30.0)
