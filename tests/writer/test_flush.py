"""The newest snapshot in memory becomes durable on request while its trainer lives, and is never torn."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from ckpt_engine.observe.events import MemoryFlushed, Notice, SnapshotCommitted, from_json
from ckpt_engine.writer import launch
from ckpt_engine.writer.control import Question
from ckpt_engine.writer.launch import ThreadWriter
from ckpt_engine.writer.messages import Body, Kind
from tests.writer.conftest import Writers
from tests.writer.staged import WAIT_SECONDS, Stage, check_all, outcome
from tests.writer.test_memory import run_trainer, steps, trainer
from tests.writer.test_memory_ends import asked, until, until_durable
from tests.writer.test_process import gone


def flush(root: Path, step: int) -> None:
    """Ask for a flush until the writer knows that it has `step` in memory."""
    deadline = time.monotonic() + WAIT_SECONDS
    while asked(root, Question.FLUSH) != {"step": step}:
        assert time.monotonic() < deadline


def test_what_is_in_memory_becomes_durable_while_the_trainer_lives(tmp_path: Path) -> None:
    """Asked for twice it is written once; and when the trainer dies it is still the snapshot that is served."""
    root = tmp_path / "run"
    with trainer(root, "wait") as process:
        until("kept", process, root)
        flush(root, 1)
        assert asked(root, Question.FLUSH) == {"step": 1}
        until_durable(root, 1)
        assert steps(root) == [1]
        assert asked(root, Question.FLUSH) == {"step": 1}
    assert len(check_all(root)) == 1


def test_there_may_be_nothing_to_write(tmp_path: Path, processes: Writers) -> None:
    """A flush says why it does nothing: no snapshot is in memory yet, or the trainer is gone."""
    client = processes.start(memory=True)
    assert asked(processes.root, Question.FLUSH) == {"step": None, "why": "no snapshot is in memory"}
    assert client.close(WAIT_SECONDS)
    root = tmp_path / "other"
    log = run_trainer(root, "die-holding", "1", TEST_LINGER="3600")
    reply = asked(root, Question.FLUSH)
    assert reply["step"] is None and "trainer is gone" in str(reply["why"])
    assert asked(root, "bye") == {"ok": True}
    assert gone(log["writer"])


def test_a_slot_that_may_have_changed_meanwhile_is_not_committed(
    processes: Writers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A trainer that sent a newer snapshot may fill the older one's slot again: the older one is left out."""
    gate = tmp_path / "gate"
    monkeypatch.setattr(launch, "ENTRY", Path(__file__).with_name("gated_writer.py"))
    monkeypatch.setenv("TEST_GATE", str(gate))
    client = processes.start(memory=True)
    first, second = Stage(slot=0), Stage(slot=1)
    for one in (first, second):
        one.share(client)
    client.hold(first.job(1))
    flush(processes.root, 1)
    deadline = time.monotonic() + WAIT_SECONDS
    while not gate.with_suffix(".reached").exists():
        assert time.monotonic() < deadline, "the writer did not come to its gate"
        client.wait(0.01)
    client.hold(second.job(2))
    first.fill(3)
    gate.touch()
    heard: list[object] = []
    while not any(isinstance(message, Notice) for message in heard):
        assert client.wait(WAIT_SECONDS)
        heard += client.poll()
    (notice,) = [message for message in heard if isinstance(message, Notice)]
    assert notice.message == "the snapshot of step 1 was dropped: a newer one has taken its place"
    assert steps(processes.root) == []
    flush(processes.root, 2)
    until_durable(processes.root, 2)
    assert client.close(WAIT_SECONDS)
    assert steps(processes.root) == [2]
    assert len(check_all(processes.root)) == 1
    first.close()
    second.close()


def test_jobs_and_what_is_in_memory_keep_their_order(
    processes: Writers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A snapshot in memory is written after the jobs before it, with a higher number; one that is a job too, once."""
    gate = tmp_path / "gate"
    monkeypatch.setattr(launch, "ENTRY", Path(__file__).with_name("gated_writer.py"))
    monkeypatch.setenv("TEST_GATE", str(gate))
    client = processes.start(memory=True)
    first, second = Stage(slot=0), Stage(slot=1)
    for one in (first, second):
        one.share(client)
    job = first.job(1)
    client.submit(job)
    flush(processes.root, 1)
    client.hold(second.job(2))
    flush(processes.root, 2)
    gate.touch()
    heard: list[object] = []
    assert outcome(client, job.job, heard).error is None  # type: ignore[arg-type]
    until_durable(processes.root, 2)
    while len([one for one in heard if isinstance(one, SnapshotCommitted)]) < 2:  # the event follows the commit
        assert client.wait(WAIT_SECONDS)
        heard += client.poll()
    assert [one.step for one in heard if isinstance(one, SnapshotCommitted)] == [1, 2]
    assert [info.step for info in check_all(processes.root)] == [1, 2]
    first.close()
    second.close()


def test_a_flush_that_is_asked_for_as_one_ends_gets_an_answer(tmp_path: Path, stage: Stage) -> None:
    """The first one has failed, and the trainer asks again as soon as it hears of its end."""
    threads = Writers(ThreadWriter, tmp_path / "run")
    client = threads.start(memory=True)
    worker, over, twice = client._queue, list[int](), threading.Event()
    emit = worker._hooks.emit

    def hear(body: Body) -> bool:
        log = from_json(body["event"]) if body["kind"] == Kind.EVENT else None
        if isinstance(log, MemoryFlushed):
            over.append(log.step)
            if len(over) == 1:
                assert worker.flush() == 1
            else:
                twice.set()
        return bool(emit(body))

    worker._hooks.emit = hear
    stage.share(client)
    client.hold(stage.job(1))
    assert worker.flush() == 1
    assert twice.wait(WAIT_SECONDS)
    assert over == [1, 1]
    threads.close()
