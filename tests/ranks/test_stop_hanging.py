"""Two ranks, one of which hangs in a step when a stop request comes: what all have in memory becomes durable."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ranks.launch import Launcher, writers_of
from tests.ranks.stopped import SIZE, Lives, Traces, snapshots

AT = 7
GRACE_SECONDS = 8.0
OPTIONS: dict[str, Any] = {
    "tiers": [{"url": "memory", "every_n_steps": 1}],
    "preemption": {"grace": GRACE_SECONDS},
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    made = Launcher("tests.ranks.stop_plain")
    yield made
    made.close()


@pytest.fixture
def lives(launcher: Launcher, tmp_path: Path) -> Iterator[Lives]:
    made = Lives(launcher, "plain", tmp_path)
    yield made
    made.kill()


def hung(lives: Lives, folder: Path, **changes: Any) -> Traces:
    """A life whose rank 1 hangs in step `AT`; rank 0 waits for it inside of a collective."""
    options = {**OPTIONS, "tiers": [*OPTIONS["tiers"], str(folder / "run")]}
    life = lives.start(options=options, patient=True, pace=0.4, events={f"1/{AT}": "hang"}, **changes)
    life.until(lambda: life.lines(1)[-1:] == ["hangs"] and len(life.batches(0)) == AT)
    assert snapshots(folder) == []
    return life


def lose_the_machine(pids: list[int]) -> None:
    """Ranks and writers at once."""
    for one in [psutil.Process(pid) for pid in pids]:
        one.kill()


@pytest.mark.parametrize("signalled", [[0], [1], [0, 1]], ids=str)
def test_what_is_in_memory_is_durable_after_the_grace(signalled: list[int], lives: Lives, tmp_path: Path) -> None:
    """One signalled rank is enough, also one inside of a collective, where no handler runs."""
    life = hung(lives, tmp_path)
    processes = [*lives.pids, *writers_of(lives.pids)]
    began = time.monotonic()
    for rank in signalled:
        os.kill(lives.pids[rank], signal.SIGTERM)
    life.until(lambda: time.monotonic() > began + GRACE_SECONDS)
    lose_the_machine(processes)
    assert lives.join() == [-signal.SIGKILL] * SIZE
    # On a busy machine the newest one in memory need not be that of the last step.
    (step,) = {int(found) for found in re.findall(r"the writer makes the snapshot of step (\d+)", life.log())}
    assert 0 < step < AT
    assert [one for one, _ in snapshots(tmp_path)] == [step], life.log()
    assert f"the snapshot of step {step} is durable" in life.log()
    assert not list((tmp_path / "run" / "parts").glob("*"))
    rest = lives.start(options={}, pace=0.0)
    assert lives.join() == [0] * SIZE, rest.log()
    assert rest.log().count(f"resumed at step {step}") == 1


def test_a_step_that_ends_after_all_is_no_worse(lives: Lives, tmp_path: Path) -> None:
    """The writers have begun with what was in memory; then the ranks stop at their boundary as ever."""
    life = hung(lives, tmp_path)
    os.kill(lives.pids[1], signal.SIGSTOP)
    os.kill(lives.pids[0], signal.SIGTERM)
    life.until(lambda: "is durable\n" in life.log())
    os.kill(lives.pids[1], signal.SIGUSR1)  # wakes it up
    os.kill(lives.pids[1], signal.SIGCONT)
    assert lives.join() == [143] * SIZE, life.log()
    assert len({len(life.batches(rank)) for rank in range(SIZE)}) == 1
    rest = lives.start(options={}, pace=0.0)
    assert lives.join() == [0] * SIZE, rest.log()
    assert not list((tmp_path / "run" / "parts").glob("*"))


def test_a_frozen_rank_is_waited_for_as_long_as_a_collective_is(lives: Lives, tmp_path: Path) -> None:
    """Nothing else ends a step. What is durable was said before; the other rank ends with the error of torch."""
    life = lives.start(options={"every_n_steps": 2, "preemption": {"grace": 3.0}}, timeout=10)
    life.reach(4)
    os.kill(lives.pids[1], signal.SIGSTOP)
    try:
        os.kill(lives.pids[0], signal.SIGTERM)
        life.until(lambda: life.exit(0) is not None)
    finally:
        os.kill(lives.pids[1], signal.SIGKILL)
    assert lives.join()[0] != 0
    assert "too long for a snapshot at its end" in life.log()
    assert snapshots(tmp_path)
