"""SIGTERM to one rank of a `Trainer` ends all of them after the same step, with one last snapshot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.accelerate.ranks.lives import Life, Lives, kill, require_continuation, require_same_end
from tests.ranks.launch import REPOSITORY, writers_of
from tests.ranks.stopped import gone

SIZE = 2
RARELY = {"every_n_steps": 10**9}
PATIENCE_SECONDS = 240.0


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_sigterm_to_one_rank_loses_nothing(victim: int, lives_in: Callable[..., Lives]) -> None:
    """Every rank says 143; the next life goes on with the next batch."""
    reference = lives_in("reference", options=RARELY).whole()
    lives = lives_in("stopped", options=RARELY)
    first = lives.start(pace=0.05, lets_end=True, ranks={str(victim): {"stops_in": 3}})
    assert lives.join() == [143] * SIZE, first.log()
    require_stopped(first, lives)
    last = lives.whole()
    trained = [len(life.batches(rank)) for life in lives.lives for rank in range(SIZE)]
    assert trained[:SIZE] == trained[:1] * SIZE
    assert sum(trained) == sum(len(reference.batches(rank)) for rank in range(SIZE)), "a batch was trained twice"
    assert require_continuation(last, reference) == lives.snapshots()[0][0]
    require_same_end(last, reference)


@pytest.mark.slow
@pytest.mark.parametrize("dispatches", [False, True])
def test_a_stop_at_the_end_of_an_epoch(dispatches: bool, lives_in: Callable[..., Lives]) -> None:
    """All ranks go on to the first batch of the next one, also those that fetch nothing themselves."""
    arguments = {"accelerator_config": {"dispatch_batches": dispatches}}
    reference = lives_in("reference", options=RARELY, arguments=arguments).whole()
    lives = lives_in("stopped", options=RARELY, arguments=arguments)
    first = lives.start(lets_end=True, pace=0.05, ranks={"0": {"stops_in": 6}})
    assert lives.join() == [143] * SIZE, first.log()
    require_stopped(first, lives)
    assert lives.snapshots() == [(9, "signal")]
    last = lives.whole()
    assert require_continuation(last, reference) == 9
    require_same_end(last, reference)


def require_stopped(life: Life, lives: Lives) -> None:
    """Every rank has said 143, and there is one snapshot, of the last step."""
    step = max(line["step"] for line in life.batches(0)) + 1
    assert [life.exit(rank) for rank in range(life.size)] == [143] * life.size, life.log()
    assert lives.snapshots()[-1] == (step, "signal"), life.log()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_under_torchrun(lives_in: Callable[..., Lives]) -> None:
    """As users start it: SIGTERM to a rank, to the other, to the launcher; kill -9; then to its end."""
    reference = lives_in("reference", options=RARELY).whole()
    lives = lives_in("torchrun", options=RARELY)
    for target in ("1", "0", "launcher"):
        with torchrun(lives, pace=0.05) as (life, process):
            life.reach(2)
            processes = [*life.pids, *writers_of(life.pids)]
            os.kill(process.pid if target == "launcher" else life.pids[int(target)], signal.SIGTERM)
            assert process.wait(PATIENCE_SECONDS) == 1, life.log()
            require_stopped(life, lives)
            assert "SIGKILL" not in life.log(), life.log()
            assert gone(processes), life.log()
    with torchrun(lives, pace=0.0) as (last, process):
        assert process.wait(PATIENCE_SECONDS) == 0, last.log()
    for life in lives.lives:
        require_continuation(life, reference)
    require_same_end(last, reference)


@contextmanager
def torchrun(lives: Lives, **changes: float) -> Iterator[tuple[Life, subprocess.Popen[bytes]]]:
    """A life that torchrun has started, once its ranks are there; it does not outlive the test."""
    life = Life(lives.job(**changes), SIZE, lives.folder / f"log{len(lives.lives)}")
    lives.lives.append(life)
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(SIZE), "--standalone"]
    with life._log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *command, "-m", "tests.accelerate.ranks.train", json.dumps(life.job)],
            stdout=log,
            stderr=log,
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    try:
        life.until(lambda: process.poll() is not None or all(life.lines(rank) for rank in range(SIZE)))
        life.pids = [life.lines(rank)[0]["pid"] for rank in range(SIZE)]
        yield life, process
    finally:
        if process.poll() is None:
            kill(life.pids)
            process.kill()
            process.wait(PATIENCE_SECONDS)
