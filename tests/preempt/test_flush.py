"""A step that is longer than the grace: what was only in memory becomes durable before the machine is gone."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ckpt_engine import Checkpointer
from ckpt_engine.observe.events import MemoryFlushed, Requested, SnapshotFailed, SnapshotStaged
from ckpt_engine.preempt.stop_plan import StopChoice
from ckpt_engine.preempt.stop_requests import Stop, StopNotice
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from tests.preempt.long_step import GRACE_SECONDS
from tests.preempt.test_watch import MB, Bench, bench, until  # noqa: F401 - a fixture
from tests.support import interpreters

REPOSITORY = Path(__file__).parents[2]
PATIENCE_SECONDS = 90.0
AT = 9


class Job:
    """A training process and its writer."""

    def __init__(self, loop: str, folder: Path) -> None:
        self.root, self.trace, self.log = folder / "run", folder / "trace", folder / "log"
        with self.log.open("wb") as log:
            self.process = interpreters.Popen(
                [sys.executable, "-m", "tests.preempt.long_step", loop, str(self.root), str(self.trace), str(AT)],
                cwd=REPOSITORY,
                stdout=log,
                stderr=log,
            )

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.005)

    def hangs(self) -> bool:
        return self.trace.exists() and self.trace.read_text().endswith("hangs\n")

    def steps(self) -> list[int]:
        return [one.step for one in Repository(open_storage(self.root)).ids()]

    def lose_the_machine(self) -> None:
        """Trainer, writer and whatever else there is, at once."""
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
            for one in (self.process, *children):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        self.process.wait(PATIENCE_SECONDS)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[[str], Job]]:
    made: list[Job] = []

    def start(loop: str) -> Job:
        made.append(Job(loop, tmp_path))
        return made[-1]

    yield start
    for one in made:
        one.lose_the_machine()


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["plain", "accelerate", "lightning"])
def test_the_step_before_a_step_that_is_too_long_is_durable(loop: str, job: Callable[[str], Job]) -> None:
    """SIGTERM, and at the end of the grace everything is killed, the writer too: one step is lost, not nine."""
    one = job(loop)
    one.until(one.hangs)
    assert max(one.steps(), default=0) < AT - 1
    os.kill(one.process.pid, signal.SIGTERM)
    end = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < end:
        time.sleep(0.01)
    one.lose_the_machine()
    log = one.log.read_text()
    assert one.steps()[-1] == AT - 1, log
    assert f"the writer makes the snapshot of step {AT - 1} in memory durable now" in log
    assert f"the snapshot of step {AT - 1} is durable\n" in log
    with Checkpointer(one.root) as ckpt:
        assert ckpt.load() is not None
        assert ckpt.loaded is not None and ckpt.loaded.info.step == AT - 1


@pytest.mark.long
def test_what_is_in_memory_is_written_when_the_step_is_too_long(
    bench: Callable[..., Bench],  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As late as it can be, because a snapshot at the end of the step would be newer; and it is watched."""
    caplog.set_level(logging.INFO)
    one = bench(signals=[], grace="1000 s")
    one.committed(4, seconds=800.0)
    one.ledger.emit(SnapshotStaged("", 7, 0.5, MB, durable=False))
    one.held = 7
    one.watch.boundary(7)
    one.watch.start()
    one.watch.emit(Requested("stop", "ann"))  # 1000 s of 1000
    until(one.looked.is_set)
    assert one.flushed == 1 and one.watch.run.flush.is_pending
    assert "the writer makes the snapshot of step 7 in memory durable now" in caplog.text
    stop = one.watch.stop
    assert stop is not None
    assert [(fly.step) for fly in one.watch.run.facts(stop, 0.0).in_flight] == [7]
    one.newest = 7
    until(lambda: "the snapshot of step 7 is durable\n" in caplog.text)


@pytest.mark.parametrize("left_seconds", [0.25, 2.0, 100.0])
def test_what_becomes_durable_before_the_end_is_said_before_the_end(
    left_seconds: float,
    bench: Callable[..., Bench],  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However little time is left: a machine that is switched off says nothing afterwards."""
    one = bench(signals=[])
    one.ledger.emit(SnapshotStaged("", 7, 0.0, MB, durable=False))
    one.held = 7
    one.watch.boundary(7)
    now = one.watch.run.now()
    half = now + left_seconds / 2.0

    def listen(seconds: float) -> None:
        one.passed += seconds
        if one.watch.run.now() >= half:
            one.newest = 7

    one.watch._listen = listen  # type: ignore[method-assign]
    one.watch._mind(Stop(StopNotice("ann", now), now + left_seconds))
    assert caplog.messages[-1] == "the snapshot of step 7 is durable"
    assert one.watch.run.now() < now + 0.9 * left_seconds


def test_a_boundary_that_comes_after_all_waits_for_what_is_written(bench: Callable[..., Bench]) -> None:  # noqa: F811
    """The plan counts the snapshot as in flight; that ends when the writer says that it is durable, or has failed."""
    one = bench(signals=[], grace="1000 s")
    one.ledger.emit(SnapshotStaged("", 7, 0.0, MB, durable=False))
    one.held = 7
    one.watch.boundary(7)
    assert one.watch.run.flush.begin() == 7 and one.watch.run.flush.is_pending
    one.watch.emit(Requested("stop", "ann"))
    assert one.watch.stop is not None
    assert one.watch.run.plan(one.watch.stop).choice in (StopChoice.FINISH, StopChoice.SNAPSHOT)
    one.committed(7)
    assert not one.watch.run.flush.is_pending
    one.held = 8
    one.watch.run.flush.begin()
    one.watch.emit(SnapshotFailed("", 8, "/run", "CKPT300", "the disk is gone"))
    assert not one.watch.run.flush.is_pending


def test_of_several_ranks_less_may_become_durable(bench: Callable[..., Bench]) -> None:  # noqa: F811
    """What all have is older than what this one has, or nothing: the writer says when the meeting is over."""
    one = bench(signals=[], grace="1000 s")
    one.held = 7
    one.watch.boundary(8)
    assert one.watch.run.flush.begin() == 7
    one.committed(5)
    now = one.watch.run.now()
    for earlier in (MemoryFlushed(6, now), MemoryFlushed(8, now - 1000.0)):
        one.watch.emit(earlier)
        assert one.watch.run.flush.is_pending, "that was an earlier meeting"
    one.watch.emit(MemoryFlushed(8, now))
    assert not one.watch.run.flush.is_pending


def test_a_writer_that_has_nothing_in_memory_is_no_reason_to_wait(
    bench: Callable[..., Bench],  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It may have been killed meanwhile: that is said, and nothing is watched."""
    one = bench(signals=[], grace="0.2 s")
    one.ledger.emit(SnapshotStaged("", 7, 0.0, MB, durable=False))
    one.watch.boundary(7)
    one.watch.start()
    one.watch.emit(Requested("stop", "ann"))
    until(lambda: "cannot be made durable before training ends" in caplog.text)
    assert not one.looked.is_set() and not one.watch.run.flush.is_pending
