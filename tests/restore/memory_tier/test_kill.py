"""`kill -9` at random moments with a memory tier: at most one iteration and the snapshot in flight are lost."""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from ckpt_engine import Checkpointer
from tests.restore.memory_tier.lives import Life, Run, Trainers, until

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
            last = before.lines()[-12:]
            assert lost <= most, f"{lost} steps lost from {place}: {last} {before.log()}\n---\n{after.log()}"
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


def die(life: Life, draw: random.Random) -> None:
    """A random moment: of the resume, of the start, of a step, of a copy, of a commit."""
    if draw.random() < 0.1:
        _pause(draw.uniform(0.0, 0.4))
    else:
        life.wait_for_steps(draw.randint(1, 12))
        _pause(draw.uniform(0.0, 0.03))
    life.kill()


def _pause(seconds: float) -> None:
    time.sleep(seconds)  # not to synchronise: to be at a random moment


def kill_some(run: Run, draw: random.Random, kills: int, lost: Lost) -> None:
    """Kill so many trainers of a run, or fewer if it is done before; then let one finish."""
    before: Life | None = None
    for number in range(kills):
        life = run.live(slow_after=20)
        if number == 0:
            life.wait_for_steps(4)  # a snapshot is in memory, so that one is resumed from whatever is drawn
        die(life, draw)
        assert run.trainers.join() in (-9, 0), life.log()
        if before is not None and life.resumed is not None:
            lost.add(run, before, life)
        if life.resumed is not None:
            before = life
        if life.steps("digest"):
            break
    finish(run, before, lost)


def finish(run: Run, before: Life | None, lost: Lost, *, most: int = MOST_LOST) -> Life:
    """The last trainer of a run is not killed."""
    last = run.live()
    assert run.trainers.join() == 0, last.log()
    if before is not None:
        lost.add(run, before, last, most=most)
    return last


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_killed_trainers_lose_one_iteration_and_nothing_else(lazy: bool, tmp_path: Path, trainers: Trainers) -> None:
    """Three kills at moments that differ from test to test; then the run is the one that was never killed.

    There are no durable snapshots but those that the writers rescue.
    """
    lost = Lost()
    run = Run(trainers, tmp_path, steps=60, width=256, lazy=lazy, durable_every=10**6)
    kill_some(run, random.Random(), 3, lost)
    run.assert_exact(run.reference())
    assert sum(count for (place, _), count in lost.rows.items() if "memory" in place) > 0, lost.table()
    run.assert_no_writer_left(60.0)


def test_a_killed_writer_costs_nothing_and_the_next_one_keeps_what_comes(tmp_path: Path, trainers: Trainers) -> None:
    """Training goes on; when the trainer dies too, later, its snapshot is in the memory of the second writer."""
    lost = Lost()
    run = Run(trainers, tmp_path, steps=80, pace=0.005)
    life = kill_writer_then_trainer(run, random.Random())
    last = finish(run, life, lost)
    run.assert_exact(run.reference())
    assert last.resumed is not None
    assert last.resumed[1] == "memory", last.log()
    run.assert_no_writer_left(60.0)


def kill_writer_then_trainer(run: Run, draw: random.Random) -> Life:
    life = run.live(slow_after=40)
    life.wait_for_steps(draw.randint(1, 12))
    _pause(draw.uniform(0.0, 0.03))
    first = life.writer()
    assert life.kill_writer()
    until(lambda: life.over or life.writer() not in (None, first), life.log)
    # Training has not waited for the new writer, which keeps what it got since.
    begun = max(life.steps("begin"))
    until(lambda: life.over or max(life.steps("kept"), default=0) > begun, life.log)
    known = len(life.steps("begin"))
    life.wait_for_steps(known + draw.randint(3, 8))
    life.kill()
    assert run.trainers.join() in (-9, 0), life.log()
    return life


def test_with_both_killed_the_durable_tier_has_the_run(tmp_path: Path, trainers: Trainers) -> None:
    """The disk alone is enough: its pages are dropped from the cache before."""
    lost = Lost()
    run = Run(trainers, tmp_path, steps=200)
    kill_both(run, random.Random(), lost)
    run.assert_exact(run.reference())


def kill_both(run: Run, draw: random.Random, lost: Lost) -> None:
    """Kill trainer and writer at once, after the first snapshot became durable; the next trainer has that, or more."""
    life = run.live(slow_after=60)
    until(lambda: _durable_steps(run) or life.over, life.log)
    life.wait_for_steps(len(life.steps("begin")) + draw.randint(1, 12))
    _pause(draw.uniform(0.0, 0.03))
    durable = _durable_steps(run)
    life.kill_writer()
    life.kill()
    assert run.trainers.join() in (-9, 0), life.log()
    drop_cache(Path(run.root))
    last = finish(run, life, lost, most=run.steps)
    assert last.resumed is not None
    step, place, _ = last.resumed
    assert place not in ("memory", "nowhere"), last.log()
    assert step >= max(durable), last.log()


def _durable_steps(run: Run) -> list[int]:
    """Steps of the snapshots on the disk, by the names of their manifests."""
    return [int(path.stem.split("-")[1][1:]) for path in Path(run.root).glob("snapshots/[0-9]*.json")]


def drop_cache(folder: Path) -> None:
    """Let the kernel forget what it has of the files, as far as it is on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


@pytest.mark.long
def test_without_a_restart_the_writer_leaves_a_durable_snapshot_and_goes(tmp_path: Path, trainers: Trainers) -> None:
    """It waits for `linger`, and the newest snapshot is on the disk."""
    run = Run(trainers, tmp_path, steps=1000, linger=1.0)
    life = run.live(slow_after=50)
    life.wait_for_steps(15)
    life.kill()
    trainers.join()
    run.assert_no_writer_left(run.linger + 60.0)
    with Checkpointer(run.root) as ckpt:
        newest = ckpt.snapshots()[-1]
    assert max(life.steps("begin")) - newest.step <= MOST_LOST
    assert newest.reason == "memory" or newest.step % run.durable_every == 0


@pytest.mark.long
def test_a_process_that_only_loads_does_not_take_the_memory_from_the_next_trainer(
    tmp_path: Path, trainers: Trainers, caplog: pytest.LogCaptureFixture
) -> None:
    """A look at the run after the crash, from memory; then the training is restarted, from memory too."""
    run = Run(trainers, tmp_path, steps=60)
    life = run.live(slow_after=20)
    life.wait_for_steps(10)
    life.kill()
    trainers.join()
    caplog.set_level(logging.INFO)
    with Checkpointer(tiers=["memory", run.root]) as ckpt:
        assert ckpt.load() is not None
        assert ckpt.loaded is not None
        assert ckpt.loaded.from_memory
    assert caplog.text.count("resumed from memory, ") == 1
    last = finish(run, life, Lost())
    assert last.resumed is not None
    assert last.resumed[1] == "memory", last.log()
    run.assert_no_writer_left(60.0)


def test_the_end_of_a_run_leaves_nothing_behind(tmp_path: Path, trainers: Trainers) -> None:
    """What was only in memory is durable after `close`, and the writer does not linger."""
    run = Run(trainers, tmp_path, steps=10, linger=3600.0)
    life = run.live(hang=0.2)
    life.wait_for_steps(10)
    life.writer()
    assert trainers.join() == 0, life.log()
    with Checkpointer(run.root) as ckpt:
        assert ckpt.snapshots()[-1].step == 10
    run.assert_no_writer_left(60.0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_random_moments(tmp_path: Path, trainers: Trainers) -> None:
    """150 trainers, 30 writers and then their trainers, 30 of both at once; prints what was lost."""
    alone, writers, both = Lost(), Lost(), Lost()
    draw = random.Random()
    for number in range(15):
        run = Run(
            trainers, tmp_path / f"a{number}", steps=150, width=draw.choice((64, 256, 1000)), lazy=number % 2 == 1
        )
        kill_some(run, draw, 10, alone)
        run.assert_exact(run.reference())
        run.assert_no_writer_left(60.0)
    for number in range(30):
        run = Run(trainers, tmp_path / f"w{number}", steps=60, width=256, lazy=number % 2 == 1, pace=0.005)
        finish(run, kill_writer_then_trainer(run, draw), writers)
        run.assert_exact(run.reference())
    for number in range(30):
        run = Run(trainers, tmp_path / f"b{number}", steps=200, width=256, lazy=number % 2 == 1)
        kill_both(run, draw, both)
        run.assert_exact(run.reference())
    for title, lost in (("trainer killed", alone), ("writer, later its trainer", writers), ("both at once", both)):
        print(f"\n{title}:{lost.table()}")
    assert sum(sum(lost.rows.values()) for lost in (alone, writers, both)) >= 200
