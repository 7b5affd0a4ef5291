"""Two ranks that get stop requests at awkward moments: all stop after the same step, and nothing hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launch import Launcher, writers_of
from tests.ranks.stopped import BATCHES, SIZE, Lives, Traces, gone, snapshots

TERM = signal.SIGTERM


def assert_stopped(lives: Lives, traces: Traces) -> None:
    """Each rank says 143, and no process is left."""
    processes = [*lives.pids, *writers_of(lives.pids)]
    assert lives.join() == [143] * SIZE, traces.log()
    assert gone(processes), traces.log()


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Launcher]]:
    made: dict[str, Launcher] = {}
    yield made
    for one in made.values():
        one.close()


def server_of(servers: dict[str, Launcher], loop: str) -> Launcher:
    if loop not in servers:
        servers[loop] = Launcher(f"tests.ranks.stop_{loop}")
    return servers[loop]


def test_a_signal_to_one_rank_stops_all(servers: dict[str, Launcher], tmp_path: Path) -> None:
    """Of a plain loop: after the same step, with one last snapshot. More of it is in the slow suite."""
    lives = Lives(server_of(servers, "plain"), "plain", tmp_path)
    first = lives.start(pace=0.02, epochs=10_000)  # nothing but the signal ends it
    first.reach(2)
    os.kill(lives.pids[1], TERM)
    assert_stopped(lives, first)
    step = len(first.batches(0))
    assert len(first.batches(1)) == step
    assert snapshots(tmp_path) == [(step, "signal")]


@pytest.fixture(params=["lightning", "accelerate", "plain"])
def lives(request: pytest.FixtureRequest, servers: dict[str, Launcher], tmp_path: Path) -> Iterator[Lives]:
    """Of Lightning, of Accelerate and of a plain loop."""
    made = Lives(server_of(servers, request.param), request.param, tmp_path)
    yield made
    made.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_awkward_moments(lives: Lives, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """In the first step; right after a resume; twice; while a snapshot is in flight. The lives add up."""
    account = lives.reference(tmp_path_factory.mktemp("reference"))
    first = lives.start(pace=0.3)
    first.reach(1)
    os.kill(lives.pids[1], TERM)
    assert_stopped(lives, first)
    account.add(first)
    second = lives.start(pace=0.1)
    second.reach(1)
    os.kill(lives.pids[0], TERM)
    second.until(lambda: "SIGTERM: a snapshot" in second.log())
    for pid in lives.pids:
        os.kill(pid, TERM)
    assert_stopped(lives, second)
    account.add(second)
    third = lives.start(options={"every_n_steps": 1})
    third.reach(3)
    for pid in lives.pids:
        os.kill(pid, TERM)
    assert_stopped(lives, third)
    if lives.loop == "lightning":
        assert third.log().count("received_sigterm: True") == SIZE
    account.add(third)
    found = snapshots(tmp_path)
    assert found[-1] == (account.step, "signal")
    assert [reason for _, reason in found].count("signal") == 3
    last = lives.start(pace=0.0)
    assert lives.join() == [0] * SIZE, last.log()
    account.add(last, ends=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_loader_workers_that_die_of_it(lives: Lives, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Who signals whole process groups (torchrun, Slurm) ends the workers of all ranks: the step is the last one."""
    account = lives.reference(tmp_path_factory.mktemp("reference"), workers=2)
    first = lives.start(pace=0.5, workers=2)
    # The first four batches are asked for at once and may come in any order: then one rank could have the next one.
    first.reach(6)
    for pid in lives.pids:
        os.killpg(pid, TERM)
    assert_stopped(lives, first)
    account.add(first)
    assert snapshots(tmp_path) == [(account.step, "signal")], first.log()
    last = lives.start(pace=0.0, workers=2)
    assert lives.join() == [0] * SIZE, last.log()
    account.add(last, ends=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_in_the_last_step(lives: Lives, tmp_path: Path) -> None:
    """The run is complete then: its final state is saved, and only the rank with the signal ends with its status."""
    life = lives.start(pace=0.3, epochs=1)
    life.reach(BATCHES // 3)
    os.kill(lives.pids[1], TERM)
    assert lives.join() == [0, 143], life.log()
    assert snapshots(tmp_path) == [(BATCHES // 3, "end")]
    again = lives.start(epochs=1)
    assert lives.join() == [0, 0], again.log()
    assert again.batches(0) == again.batches(1) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_in_a_validation(
    servers: dict[str, Launcher], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A validation that has begun is finished and counts; the stop comes after the steps that follow it."""
    options: dict[str, Any] = {"validates": True, "arguments": {"val_check_interval": 4}}
    lives = Lives(server_of(servers, "lightning"), "lightning", tmp_path)
    account = lives.reference(tmp_path_factory.mktemp("reference"), **options)
    for victim in range(SIZE):
        life = lives.start(**options)
        life.until(lambda life=life: any(line.startswith("validates 1") for line in life.lines(0)))
        os.kill(lives.pids[victim], TERM)
        assert_stopped(lives, life)
        assert all(line != "validates 4" or "validates 4" in life.lines(1) for line in life.lines(0))
        account.add(life)
        assert snapshots(tmp_path)[-1] == (account.step, "signal")
    last = lives.start(pace=0.0, **options)
    assert lives.join() == [0] * SIZE, last.log()
    account.add(last, ends=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_whose_writer_hangs_is_not_waited_for_beyond_the_grace(lives: Lives, tmp_path: Path) -> None:
    """Its share does not come: the others say so and end in time, with what was durable before."""
    grace = 6.0
    options = {"every_n_steps": 2, "preemption": {"grace": grace}}
    life = lives.start(options=options)
    life.reach(4)
    (writer,) = writers_of([lives.pids[1]])
    os.kill(writer, signal.SIGSTOP)
    try:
        os.kill(lives.pids[0], TERM)
        assert lives.join() == [143] * SIZE, life.log()
        assert len({len(life.batches(rank)) for rank in range(SIZE)}) == 1
        assert "too late" in life.log()
        assert all(step < len(life.batches(0)) for step, _ in snapshots(tmp_path))
    finally:
        os.kill(writer, signal.SIGCONT)
    assert gone([writer])
