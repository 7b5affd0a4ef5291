"""How a writer with a snapshot in memory ends, who may read the snapshot, and what it does for others meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from ckpt_engine.copy.job import PersistJob
from ckpt_engine.copy.write_snapshot import Digests
from ckpt_engine.errors import NoUsableSnapshotError, WriterError
from ckpt_engine.observe.events import Notice, SnapshotCommitted
from ckpt_engine.restore.load import load
from ckpt_engine.restore.memory import MemoryStorage
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer import launch
from ckpt_engine.writer.control import Control, Question, ask
from ckpt_engine.writer.messages import Reply
from tests.support.files import open_files
from tests.writer.conftest import Writers
from tests.writer.staged import WAIT_SECONDS, Stage, check_all, settle
from tests.writer.test_memory import attach, attached, check_state, logged, run_trainer, step_in_memory, steps, trainer
from tests.writer.test_process import gone
from tests.writer.tiered import Run


def until(found: object, process: subprocess.Popen[bytes], root: Path) -> None:
    """Wait until a trainer has logged this name."""
    deadline = time.monotonic() + WAIT_SECONDS
    while found not in (logged(root) if root.with_suffix(".log").exists() else {}):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.02)
        assert process.poll() is None and time.monotonic() < deadline, root.with_suffix(".err").read_text()


def until_durable(root: Path, step: int) -> None:
    """Wait until the snapshot in memory is on a tier too."""
    for _ in range(int(WAIT_SECONDS * 20)):
        if asked(root, Question.STATUS)["held"] == {"step": step, "durable": True}:
            return
        threading.Event().wait(0.05)
    raise AssertionError(f"step {step} does not become durable")


def asked(root: Path, what: str) -> dict[str, object]:
    reply = ask(str(root), {"what": what, "who": "a test"}, WAIT_SECONDS)
    assert reply is not None and reply.fds == ()
    return reply.body


def test_a_writer_that_lingers_ends_by_itself(tmp_path: Path) -> None:
    """No trainer comes: after `linger` the writer, its memory and its name are gone; the snapshot is on the disk."""
    root = tmp_path / "run"
    log = run_trainer(root, "die-holding", "1", TEST_LINGER="0.5")
    assert gone(log["writer"])
    assert attach(str(root), WAIT_SECONDS) is None
    assert steps(root) == [1]


def test_a_writer_that_holds_nothing_ends_at_once(tmp_path: Path) -> None:
    """There is nothing to wait for."""
    root = tmp_path / "run"
    log = run_trainer(root, "die-empty", TEST_LINGER="3600")
    assert gone(log["writer"])


def test_a_termination_signal_ends_lingering_but_not_the_rescue(tmp_path: Path) -> None:
    """A machine that shuts down need not wait for `linger`; the snapshot in memory becomes durable before the end."""
    root, gate = tmp_path / "run", tmp_path / "gate"
    log = run_trainer(root, "die-in-persist", str(gate), TEST_LINGER="3600")
    place = attached(root)  # it knows that its trainer is gone
    place.release(bye=False)  # like a process that dies
    os.kill(log["writer"], signal.SIGTERM)
    gate.touch()
    assert gone(log["writer"])
    assert steps(root) == [1, 3]
    log = run_trainer(root, "die-holding", "7", TEST_LINGER="3600")
    place = attached(root)
    until_durable(root, 7)
    os.kill(log["writer"], signal.SIGTERM)
    assert gone(log["writer"])
    assert step_in_memory(place) == 7  # who has the memory keeps it
    place.release()


def test_a_job_that_is_ended_leaves_no_writer_lingering(tmp_path: Path) -> None:
    """A writer that got SIGTERM serves as long as its trainer lives, and then ends without `linger`."""
    root = tmp_path / "run"
    with trainer(root, "wait", TEST_LINGER="3600") as process:
        until("kept", process, root)
        os.kill(logged(root)["writer"], signal.SIGTERM)
        assert asked(root, Question.SAVE) == {"trainer": True}
        until("what", process, root)
    assert gone(logged(root)["writer"])
    assert steps(root) == [1]


def test_the_next_writer_takes_over_the_name(tmp_path: Path, processes: Writers, stage: Stage) -> None:
    """The old writer ends then; a process that reads from its memory keeps that memory."""
    log = run_trainer(processes.root, "die-holding", "1", TEST_LINGER="3600")
    place = attached(processes.root)
    client = processes.start(memory=True, lease_wait_seconds=WAIT_SECONDS)
    assert gone(log["writer"])
    assert asked(processes.root, Question.STATUS)["pid"] == client.pid
    assert step_in_memory(place) == 1
    place.release()  # says `bye` to the new one, which does not go
    stage.share(client)
    client.hold(stage.job(2))
    assert client.close(WAIT_SECONDS)
    # It may have had to wait for the lease, and says so then.
    assert not [m for m in client.poll() if isinstance(m, Notice) and "takes no requests" in m.message]
    assert steps(processes.root) == [1, 2]


def test_a_writer_whose_name_is_taken_goes_on_without(processes: Writers, stage: Stage) -> None:
    """Another process has the name and keeps it: a notice says so, and snapshots are taken all the same."""
    other = Control(str(processes.root), lambda _: Reply({"ok": False}))
    other.open(WAIT_SECONDS)
    client = processes.start(memory=True)
    assert client.wait(WAIT_SECONDS)
    (notice,) = client.poll()
    assert isinstance(notice, Notice) and "takes no requests" in notice.message
    stage.share(client)
    client.hold(stage.job(1))
    assert client.close(WAIT_SECONDS)
    other.close(WAIT_SECONDS)
    assert steps(processes.root) == [1]


def test_a_name_that_has_become_free_is_taken_when_it_matters(tmp_path: Path) -> None:
    """A writer that had to go on without it serves its memory all the same."""
    root = tmp_path / "run"
    other = Control(str(root), lambda _: Reply({"ok": False}))
    other.open(WAIT_SECONDS)
    with trainer(root, "wait") as process:
        until("kept", process, root)
        assert asked(root, Question.STATUS) == {"ok": False}
        other.close(WAIT_SECONDS)
    deadline = time.monotonic() + WAIT_SECONDS
    while (place := attach(str(root), WAIT_SECONDS)) is None:
        assert time.monotonic() < deadline
    assert step_in_memory(place) == 1
    place.release()
    assert gone(logged(root)["writer"])


def test_requests_reach_the_trainer(tmp_path: Path) -> None:
    """The trainer gets `save` and `stop`, and who asks; while it lives, its writer stays and serves no memory."""
    root = tmp_path / "run"
    with trainer(root, "wait") as process:
        until("kept", process, root)
        assert asked(root, Question.SAVE) == {"trainer": True}
        until("what", process, root)
        assert logged(root)["what"] == "save"
        assert asked(root, Question.STOP) == {"trainer": True}
        while logged(root)["what"] != "stop":
            assert process.poll() is None
        assert logged(root)["who"] == "a test"
        assert asked(root, Question.SNAPSHOT) == {"snapshot": None, "why": "its trainer is alive"}
        assert attach(str(root), WAIT_SECONDS) is None
        assert asked(root, Question.BYE) == {"ok": False}
        assert "error" in asked(root, "dance")
        deadline = time.monotonic() + WAIT_SECONDS
        while (status := asked(root, Question.STATUS))["held"] is None:  # it was sent, and may not have been taken in
            assert time.monotonic() < deadline
        assert status["trainer"] is True and status["held"] == {"step": 1, "durable": False}
    place = attached(root)  # at once: the system says that the trainer is gone before its writer notices
    assert asked(root, Question.SAVE) == {"trainer": False}
    assert step_in_memory(place) == 1
    place.release()
    assert gone(logged(root)["writer"])


def test_a_place_that_cannot_be_written_is_gone_without(tmp_path: Path) -> None:
    """What is rescued goes to the first tier that takes it."""
    root, near = tmp_path / "far", tmp_path / "near"
    log = run_trainer(root, "die-away", str(near))
    place = attached(near)
    assert step_in_memory(place) == 2
    place.release()
    assert gone(log["writer"])
    assert steps(root) == [1, 2]


@pytest.mark.long
def test_a_rescue_that_fails_is_tried_again(tmp_path: Path) -> None:
    """What killed the trainer may have hit the disk too, for a while; the snapshot is served meanwhile."""
    root = tmp_path / "run"
    log = run_trainer(root, "die-blocked")
    place = attached(root)
    assert step_in_memory(place) == 1
    assert steps(root) == []
    (root / "data").unlink()
    until_durable(root, 1)
    place.release(bye=False)
    attached(root).release()
    assert gone(log["writer"])
    assert steps(root) == [1]


@pytest.mark.long
def test_a_snapshot_that_no_tier_takes_ends_with_its_reader(tmp_path: Path) -> None:
    """The disk stays broken: once a reader of the snapshot in memory says that it is done, the writer ends."""
    root = tmp_path / "run"
    log = run_trainer(root, "die-blocked")
    place = attached(root)
    place.release()
    assert gone(log["writer"])
    assert steps(root) == []


def test_memory_that_changes_afterwards_is_noticed_and_mended(tmp_path: Path) -> None:
    """The digests are those of the moment when the trainer was gone: damage costs the one copy, not the snapshot."""
    root = tmp_path / "run"
    log = run_trainer(root, "die-mixed")
    place = attached(root)
    storage = place.repository.storage
    assert isinstance(storage, MemoryStorage)
    until_durable(root, 2)
    for link, target in open_files(log["writer"]).items():
        if "arena" in target:
            with contextlib.suppress(FileNotFoundError):  # that of the reply is closed a moment later
                fd = os.open(link, os.O_RDWR)
                os.pwrite(fd, b"\xee" * 8, 500_000)
                os.close(fd)
    with pytest.raises(NoUsableSnapshotError, match="do not match their digest"):
        load([place.repository])
    found = load([place.repository, Repository(LocalStorage(root))])
    assert found is not None
    assert [(r.entry, r.bad) for r in found.repairs] == [("model.weight", "memory")]
    check_state(found.state, 2)
    place.release()
    assert gone(log["writer"])


def test_a_snapshot_that_changes_under_its_digests_is_not_written() -> None:
    """Two looks at the same image that differ: it is no snapshot."""
    digests = Digests()
    assert digests.settle(["a", "b"]) == ["a", "b"]
    with pytest.raises(WriterError, match="changed"):
        digests.settle(["a", "c"])


def test_a_trainer_that_goes_on_sleeps_until_its_lingering_writer_ends(
    processes: Writers, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it has hung up, and what is asked of it afterwards, does not wake the thread that waits for it for ever."""
    heard = []

    class Counted(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            heard.append(found := super().select(timeout))
            return found

    monkeypatch.setattr(selectors, "DefaultSelector", Counted)
    client = processes.start(memory=True, linger_seconds=3600.0)
    stage.share(client)
    client.hold(stage.job(1))
    assert client.close(WAIT_SECONDS, keeps=True)
    before = len(heard)
    until_durable(processes.root, 1)
    os.kill(client.pid, signal.SIGTERM)
    client._listener.join(WAIT_SECONDS)
    assert not client._listener.is_alive()
    assert len(heard) - before <= 4


@pytest.mark.long
def test_a_trainer_that_hangs_up_and_lives_is_not_rescued(
    processes: Writers, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on using its memory: whatever is there by now is no snapshot."""
    monkeypatch.setattr(launch, "ENTRY", Path(__file__).with_name("impatient_writer.py"))
    client = processes.start(memory=True, linger_seconds=3600.0)
    stage.share(client)
    client.hold(stage.job(1))
    client._channel._sock.shutdown(socket.SHUT_RDWR)
    assert gone(client.pid)
    assert steps(processes.root) == []


def test_memory_of_a_run_that_was_removed_is_left_out(tmp_path: Path) -> None:
    """To remove the folder is to start the run again, though the writer of the old run still lingers."""
    root = tmp_path / "run"
    log = run_trainer(root, "die-holding", "1")
    place = attached(root)
    with acquire(LocalStorage(root), wait_seconds=WAIT_SECONDS):
        assert steps(root) == [1]  # its writer has done with the folder
    shutil.rmtree(root)
    disk = Repository(LocalStorage(root))
    assert load([place.repository, disk]) is None
    place.release()
    assert gone(log["writer"])


def test_holding_and_closing(writers: Writers, stage: Stage) -> None:
    """Both kinds of writer make a snapshot that was only in memory durable at the end, once, and say so."""
    client = writers.start(memory=True)
    stage.share(client)
    client.hold(stage.job(1))
    assert client.flushed
    assert client.close(WAIT_SECONDS)
    assert client.flushed
    assert [m.step for m in client.poll() if isinstance(m, SnapshotCommitted)] == [1]
    assert [i.step for i in check_all(writers.root)] == [1]


def test_what_was_submitted_is_not_written_twice(writers: Writers, stage: Stage) -> None:
    """The newest is durable: closing has nothing to add."""
    client = writers.start(memory=True)
    stage.share(client)
    client.submit(stage.job(1))
    assert client.close(WAIT_SECONDS)
    assert [i.step for i in check_all(writers.root)] == [1]


def test_what_could_not_be_written_is_tried_again_at_the_end(writers: Writers, stage: Stage) -> None:
    """It is still in memory."""
    client = writers.start(memory=True)
    stage.share(client)
    data = writers.root / "data"
    data.write_text("in the way")
    client.submit(stage.job(1))
    settle(client)
    data.unlink()
    assert client.close(WAIT_SECONDS)
    assert [i.step for i in check_all(writers.root)] == [1]


def test_holds_do_not_queue_behind_a_persist(run: Run) -> None:
    """While a job is persisted only the newest snapshot in memory waits, however many are sent."""
    client = run.start(memory=True)
    run.weather[run.near].gate.clear()
    client.submit(run.stage.job(1))
    assert run.weather[run.near].reached.wait(WAIT_SECONDS)
    other = Stage(slot=1)
    other.share(client)
    for step in range(2, 300):
        client.hold(other.job(step))
    assert not client._queue._todo
    newest = client._queue.held.newest
    assert newest is not None and newest.job.step == 299
    run.weather[run.near].gate.set()
    run.close()
    assert steps(run.near) == [1, 299]
    other.close()


def test_a_snapshot_of_an_unknown_slot_is_reported_and_costs_nothing(writers: Writers, stage: Stage) -> None:
    """The snapshot that was in memory before stays there."""
    client = writers.start(memory=True)
    stage.share(client)
    client.hold(stage.job(1))
    client.hold(_elsewhere(stage.job(1)))
    assert client.close(WAIT_SECONDS)
    assert [m.message for m in client.poll() if isinstance(m, Notice)] == [
        "step 1 is not kept in memory: slot 99 was never sent"
    ]
    assert [i.step for i in check_all(writers.root)] == [1]


def _elsewhere(job: PersistJob) -> PersistJob:
    return dataclasses.replace(job, slot=99)
