"""The watch: what makes a run stop, until when, and what is said when the step that runs is too long."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.config.sections import Preemption
from ckpt_engine.observe.clock import SystemClock
from ckpt_engine.observe.durability import Ledger
from ckpt_engine.observe.events import Requested, SnapshotCommitted, SnapshotStaged
from ckpt_engine.preempt.loop_steps import LoopSteps
from ckpt_engine.preempt.memory_flush import MemoryFlush
from ckpt_engine.preempt.run_outlook import RunOutlook
from ckpt_engine.preempt.stop_plan import StopChoice
from ckpt_engine.preempt.watch import PreemptionWatch

PATIENCE_SECONDS = 60.0
MB = 1_000_000


class Bench:
    """A watch with a ledger of its own, and a nearest tier that tests fill."""

    def __init__(self, **options: Any) -> None:
        self.ledger = Ledger(["/run"], SystemClock())
        self.newest: int | None = None
        self.looked = threading.Event()
        self.held: int | None = None
        self.flushed = 0
        self.passed = 0.0
        """Seconds beyond those that have passed."""
        self.divided = False
        flush = MemoryFlush(self._flush, self.ledger, self.monotonic, 0.25)
        steps = LoopSteps(self.monotonic(), self.monotonic())
        run = RunOutlook(self.ledger, self.monotonic, 2, steps, flush, lambda: self.divided)
        self.watch = PreemptionWatch(Preemption(**options), self, run, self._look)

    def monotonic(self) -> float:
        return SystemClock.monotonic() + self.passed

    def _look(self) -> int | None:
        self.looked.set()
        return self.newest

    def _flush(self) -> int | None:
        self.flushed += 1
        return self.held

    def committed(self, step: int, seconds: float = 1.0, nbytes: int = MB) -> None:
        self.ledger.emit(SnapshotStaged("", step, 0.0, nbytes))
        self.ledger.emit(SnapshotCommitted("s", step, "/run", nbytes, nbytes, seconds, seconds, 0.0, 0.0))


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    """Makes watches whose threads end with the test."""
    made: list[Bench] = []
    others = threading.enumerate()

    def make(**options: Any) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield make
    for one in made:
        one.watch.close()
        left = [thread for thread in threading.enumerate() if thread not in others]
        assert [thread.name for thread in left if thread.name == "ckpt-preempt"] == []


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_signal_stops_the_run_within_its_grace(bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    """The deadline counts from the signal; the log says so at once, not at the end of the step."""
    one = bench(signals=["USR1"], grace="40 s")
    one.watch.start()
    assert one.watch.stop is None
    before = time.monotonic()
    os.kill(os.getpid(), signal.SIGUSR1)
    stop = one.watch.stop
    assert stop is not None and stop.notice.who == "SIGUSR1"
    assert before + 40.0 <= stop.deadline <= time.monotonic() + 40.0
    until(lambda: "SIGUSR1: a snapshot at the end of this step" in caplog.text)
    one.watch.close()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_the_stop_is_announced_before_what_is_done_about_it(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    """The training thread may be the first to see the stop: it logs the line, and the watch does not log it again."""
    one = bench(signals=[])
    one.watch.emit(Requested("stop", "ann"))
    one.watch.attend()
    assert caplog.text.count("ckpt stop by ann: a snapshot at the end of this step") == 1
    one.watch.start()
    one.watch.close()
    assert caplog.text.count("a snapshot at the end of this step") == 1


def test_a_source_stops_the_run_while_a_step_runs(bench: Callable[..., Bench], tmp_path: Path) -> None:
    """It is asked on a thread of its own, with the grace that it leaves; a shorter one wins."""
    file = tmp_path / "STOP"
    one = bench(signals=["USR1"], sources=[{"file": str(file), "every": 0.01, "grace": "2 min"}])
    one.watch.start()
    file.touch()
    until(lambda: one.watch.stop is not None)
    stop = one.watch.stop
    assert stop is not None and stop.notice.who == f"the file {file}" and stop.notice.exit_code == 143
    os.kill(os.getpid(), signal.SIGUSR1)
    sooner = one.watch.stop
    assert sooner is not None and sooner.deadline < stop.deadline and sooner.notice.who == "SIGUSR1"


def test_a_source_in_trouble_is_said_once_and_asked_again(
    bench: Callable[..., Bench], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on; when it answers again it counts again."""
    script = f"echo asked >> {tmp_path}/asked; test -e {tmp_path}/go || exit 3"
    one = bench(signals=[], sources=[{"command": ["sh", "-c", script], "every": 0.01}])
    one.watch.start()
    asked = tmp_path / "asked"
    until(lambda: asked.exists() and asked.read_text().count("asked") >= 3)
    assert one.watch.stop is None
    (tmp_path / "go").touch()
    until(lambda: one.watch.stop is not None)
    assert caplog.text.count("the command sh ended with 3") == 1


def test_requests_come_as_events(bench: Callable[..., Bench]) -> None:
    """A stop that somebody asks for ends with 0; a save is remembered until a snapshot was taken."""
    one = bench(signals=[])
    one.watch.emit(Requested("save", "ann on node7"))
    assert one.watch.stop is None
    assert one.watch.save_asked_by == "ann on node7"
    one.watch.emit(Requested("stop", "ann on node7"))
    stop = one.watch.stop
    assert stop is not None and (stop.notice.who, stop.notice.exit_code) == ("ckpt stop by ann on node7", 0)


def test_the_plan_knows_what_was_measured(bench: Callable[..., Bench]) -> None:
    """State and speed from the ledger, the step from the boundary."""
    one = bench(grace="1000 s")
    one.committed(4, seconds=200.0)
    one.watch.boundary(9)
    one.watch.emit(Requested("stop", "ann"))
    stop = one.watch.stop
    assert stop is not None
    plan = one.watch.run.plan(stop)
    assert (plan.choice, plan.step) == (StopChoice.SNAPSHOT, 9)
    assert plan.seconds == pytest.approx(250.0)
    assert one.watch.run.durable() == "step 4 is durable on /run, 5 steps behind"


def test_what_was_written_past_a_full_first_tier_counts_as_durable(bench: Callable[..., Bench]) -> None:
    """The line at the end and the outlook name the tier that took its place, not the steps that the first one lacks."""
    one = bench()
    one.committed(4)
    one.watch.boundary(9)
    one.ledger.emit(SnapshotStaged("", 9, 0.0, MB))
    one.ledger.emit(SnapshotCommitted("s", 9, "/far", MB, MB, 1.0, 1.0, 0.0, 0.0))
    assert one.watch.run.durable() == "step 9 is durable on /far"
    found = one.watch.outlook()
    assert (found["durable_step"], found["work_at_risk_steps"]) == (9, 0)


def test_where_nodes_have_roots_of_their_own_it_says_that_only_a_part_is_durable(bench: Callable[..., Bench]) -> None:
    """Whether the others have theirs is not known: the disk of one may be full."""
    one = bench()
    one.committed(4)
    one.watch.boundary(5)
    one.divided = True
    assert one.watch.run.durable() == "step 4 is durable on /run (the part of this node), 1 step behind"


def test_a_too_long_step_is_reported_in_time(bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    """As soon as a snapshot at its end would be late: what is durable, and what is lost."""
    one = bench(signals=[], grace="1000 s")
    one.committed(4, seconds=900.0)
    one.watch.boundary(7)
    one.watch.start()
    one.watch.emit(Requested("stop", "ann"))  # a new one needs 1100 s
    until(lambda: "too long for a snapshot at its end" in caplog.text)
    assert "the snapshot of step 4 is durable on /run already" in caplog.text
    assert "3 steps are lost" in caplog.text
    assert not one.looked.is_set()


def test_the_last_complete_snapshot_is_watched_until_it_is_durable(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    """The training thread hears nothing in the middle of a step, so the tier itself is asked."""
    caplog.set_level(logging.INFO)
    one = bench(signals=[], grace="1000 s")
    one.committed(4, seconds=500.0)
    one.ledger.emit(SnapshotStaged("", 6, 0.0, MB))
    one.watch.boundary(7)
    one.watch.start()
    one.watch.emit(Requested("stop", "ann"))  # 625 s in flight and as much for a new one
    until(one.looked.is_set)
    assert "the snapshot of step 6 in flight will be durable on /run within" in caplog.text
    assert "the snapshot of step 6 is durable\n" not in caplog.text
    one.newest = 6
    until(lambda: "the snapshot of step 6 is durable\n" in caplog.text)


def test_a_run_that_reaches_its_boundary_gets_no_warning(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From there on the training thread decides."""
    one = bench(signals=[], grace="1 min")
    waits, wait = list[float](), one.watch._wake.wait

    def listen(seconds: float) -> list[int]:
        waits.append(seconds)
        return wait(seconds)

    monkeypatch.setattr(one.watch._wake, "wait", listen)
    one.watch.start()
    one.watch.emit(Requested("stop", "ann"))
    one.watch.attend()
    one.passed = 3600.0
    for _ in range(2):  # at the first one it may have been on its way already
        looks = len(waits)
        one.watch._wake.ring()
        until(lambda looks=looks: len(waits) > looks)
    assert "too long" not in caplog.text
