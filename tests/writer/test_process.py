"""The writer process: how it starts, what it ignores, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine import Checkpointer
from ckpt_engine.copy.job import JobDone, RankConfig, WriterConfig
from ckpt_engine.errors import LeaseHeldError, WaitTimeoutError, WriterError
from ckpt_engine.observe.events import Event, Notice, WriterLost
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.storage import open_storage
from ckpt_engine.writer import client, launch
from ckpt_engine.writer.client import Message
from ckpt_engine.writer.launch import ThreadWriter, open_client
from tests.support import interpreters
from tests.support.files import open_files
from tests.support.writers import writers_of
from tests.writer.conftest import Writers
from tests.writer.staged import WAIT_SECONDS, Stage, check_all, outcome, settle

REPOSITORY = Path(__file__).resolve().parents[2]


def gone(pid: int) -> bool:
    """Whether a process that is not our child ends in time."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], WAIT_SECONDS)[0])
    finally:
        os.close(fd)


def run_trainer(root: Path, *plan: str, status: int = -signal.SIGKILL) -> dict[str, Any]:
    """Run a trainer to its end; what it logged."""
    log = root.with_suffix(".log")
    errors = root.with_suffix(".err")
    with errors.open("w") as stderr:  # a file: a forked child would keep a pipe open
        done = interpreters.run(
            [sys.executable, "-m", "tests.writer.trainer", str(root), str(log), *plan],
            cwd=REPOSITORY,
            timeout=WAIT_SECONDS,
            stdout=stderr,
            stderr=stderr,
        )
    assert done.returncode == status, errors.read_text()
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return {key: value for row in rows for key, value in row.items()}


def is_put_off(pid: int, number: signal.Signals) -> bool:
    """Whether a process blocks a signal."""
    (line,) = (x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("SigBlk"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def test_jobs_of_a_killed_trainer_become_durable(tmp_path: Path) -> None:
    """After `kill -9` the writer finishes the job in flight and the queued ones, and is gone."""
    ends = run_trainer(tmp_path / "run", "die-after", "3")
    assert gone(ends["writer"])
    assert [i.step for i in check_all(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_trainer_that_just_ends_loses_nothing(tmp_path: Path, kind: str) -> None:
    """Without `close` a process finishes by itself, and a thread before the interpreter goes."""
    run_trainer(tmp_path / "run", "leave", kind, status=0)
    with acquire(open_storage(tmp_path / "run"), wait_seconds=WAIT_SECONDS):
        run = Checkpointer(tmp_path / "run")
        assert [i.step for i in run.snapshots()] == [1, 2]
        assert [float(run.load(step)["w"].mean()) for step in (1, 2)] == [1.0, 2.0]


def test_a_writer_that_waits_for_the_lease_goes_with_its_trainer(tmp_path: Path, processes: Writers) -> None:
    """A second trainer that is killed while its writer waits for the lease leaves no writer behind."""
    processes.start()
    command = [sys.executable, "-m", "tests.writer.trainer", str(processes.root), str(tmp_path / "log"), "leave"]
    trainer = interpreters.Popen([*command, "process"], cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    while not (waiting := writers_of(trainer.pid)) or not is_put_off(waiting[0].pid, signal.SIGTERM):
        assert trainer.poll() is None
        os.sched_yield()
    trainer.kill()
    trainer.wait(WAIT_SECONDS)
    assert gone(waiting[0].pid)


def test_a_forked_child_of_the_trainer_keeps_no_writer_alive(tmp_path: Path) -> None:
    """A loader worker that holds the trainer's socket open does not make the writer think the trainer lives."""
    ends = run_trainer(tmp_path / "run", "die-holding")
    try:
        assert gone(ends["writer"])
        os.kill(ends["holder"], 0)  # it was there all the time
    finally:
        os.kill(ends["holder"], signal.SIGKILL)
    assert [i.step for i in check_all(tmp_path / "run")] == [1]


def test_a_writer_whose_disk_hangs_ends_at_its_deadline(tmp_path: Path) -> None:
    """No orphan waits for ever: past `drain_seconds` the writer gives up."""
    ends = run_trainer(tmp_path / "run", "die-behind-a-gate", str(tmp_path / "never"), "1", "0.2")
    assert gone(ends["writer"])
    assert check_all(tmp_path / "run") == []


def test_sigterm_limits_a_draining_writer_to_the_job_at_hand(tmp_path: Path) -> None:
    """Without its trainer the writer heeds SIGTERM: the job in flight becomes durable, queued ones are dropped."""
    gate = tmp_path / "gate"
    ends = run_trainer(tmp_path / "run", "die-behind-a-gate", str(gate), "3", "60")
    deadline = time.monotonic() + WAIT_SECONDS
    while is_put_off(ends["writer"], signal.SIGTERM) or not gate.with_suffix(".reached").exists():
        assert time.monotonic() < deadline, "it has not noticed the trainer's end, or has begun no job"
        time.sleep(0.005)
    os.kill(ends["writer"], signal.SIGTERM)
    # It has heeded that once the queued jobs, and with them their slots, are let go.
    while sum("memfd:test-arena" in target for target in open_files(ends["writer"]).values()) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    gate.touch()
    assert gone(ends["writer"])
    assert [i.step for i in check_all(tmp_path / "run")] == [1]


def _status(pid: int, field: str) -> str:
    (line,) = (x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith(field))
    return line.split()[1]


def test_a_restarted_trainer_waits_for_the_writer_of_the_dead_one(
    tmp_path: Path, processes: Writers, stage: Stage
) -> None:
    """The orphan keeps the lease until its jobs are durable; `start` waits for that and then sees them all."""
    gate = tmp_path / "gate"
    ends = run_trainer(processes.root, "die-behind-a-gate", str(gate), "2", "60")
    with pytest.raises(LeaseHeldError, match="is being written by"):
        processes.start(lease_wait_seconds=0.0)
    gate.touch()
    client = processes.start(lease_wait_seconds=WAIT_SECONDS)
    assert gone(ends["writer"])
    stage.share(client)
    job = stage.job(3)
    client.submit(job)
    assert outcome(client, job.job).ok
    assert [i.step for i in check_all(processes.root)] == [1, 2, 3]


def test_a_killed_writer_is_noticed_and_replaced(processes: Writers, stage: Stage) -> None:
    """Open jobs are lost, `WriterLost` comes once, acknowledged snapshots stay; a new writer takes the same slots."""
    client = processes.start()
    stage.share(client)
    first = stage.job(1)
    client.submit(first)
    assert outcome(client, first.job).ok
    os.kill(client.pid, signal.SIGSTOP)
    second = stage.job(2)
    client.submit(second)
    os.kill(client.pid, signal.SIGKILL)
    heard: list[Message] = []
    done = outcome(client, second.job, heard)
    assert done.lost and done.error is not None
    assert "SIGKILL" in done.error.message
    heard += client.poll()
    assert [type(m) for m in heard] == [JobDone, WriterLost]
    assert not client.alive
    with pytest.raises(WriterError, match="SIGKILL"):
        client.submit(stage.job(3))
    stage.share(client)  # does nothing, quietly
    assert client.close(WAIT_SECONDS)
    assert client.poll() == []
    again = processes.start()
    stage.share(again)
    fourth = stage.job(4)
    again.submit(fourth)
    assert outcome(again, fourth.job).ok
    assert [i.step for i in check_all(processes.root)] == [1, 4]


def test_an_idle_writer_that_dies_is_noticed_too(processes: Writers) -> None:
    """`WriterLost` does not wait for a job."""
    client = processes.start()
    os.kill(client.pid, signal.SIGKILL)
    assert client.wait(WAIT_SECONDS)
    (lost,) = client.poll()
    assert isinstance(lost, WriterLost)


def test_signals_to_the_whole_job_leave_the_writer_alone(processes: Writers, stage: Stage) -> None:
    """SIGINT, SIGTERM and SIGHUP are the trainer's business, and the writer is in a session of its own."""
    client = processes.start()
    stage.share(client)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(client.pid, number)
    job = stage.job(1)
    client.submit(job)
    assert outcome(client, job.job).ok
    assert os.getsid(client.pid) == client.pid


def test_a_stopped_writer_never_blocks_the_trainer(processes: Writers, stage: Stage) -> None:
    """Submitting goes on at once even when the socket is full; everything arrives later."""
    client = processes.start()
    stage.share(client)
    os.kill(client.pid, signal.SIGSTOP)
    big = {"x": "x" * (4 << 20)}
    jobs = [stage.job(step, notes=big) for step in (1, 1, 1)]
    for job in jobs:
        client.submit(job)
    assert client.poll() == []
    os.kill(client.pid, signal.SIGCONT)
    for job in jobs:
        assert outcome(client, job.job).ok
    assert len(check_all(processes.root)) == 3


def test_a_writer_that_stays_stopped_is_named_once(
    processes: Writers, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else says why all snapshots are busy; the line says how it goes on."""
    monkeypatch.setattr(launch, "_LOOK_SECONDS", 0.02)
    client = processes.start()
    os.kill(client.pid, signal.SIGSTOP)
    assert client.wait(WAIT_SECONDS)
    (said,) = client.poll()
    assert isinstance(said, Notice)
    assert said.message.endswith(f"no snapshot becomes durable; `kill -CONT {client.pid}` resumes it")
    assert not client.wait(0.2)
    os.kill(client.pid, signal.SIGCONT)
    stage.share(client)
    job = stage.job(1)
    client.submit(job)
    assert outcome(client, job.job).ok


def test_what_is_printed_to_a_closed_descriptor_does_not_reach_the_writer(tmp_path: Path) -> None:
    """A daemon may have closed its standard streams, and libraries in C print all the same."""
    kept = os.dup(0)
    os.close(0)
    try:
        with Checkpointer(tmp_path / "run") as ckpt:
            ckpt.engine.start()
            os.write(0, b"a library says something\n")
            ckpt.save({"weights": [1.0]}, step=1).wait(WAIT_SECONDS)
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_closing_too_early_leaves_the_writer_to_finish(
    tmp_path: Path, processes: Writers, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the time given to `close` is over, open jobs count as failed here, and the writer goes on by itself."""
    gate = tmp_path / "gate"
    monkeypatch.setattr(launch, "ENTRY", Path(__file__).with_name("gated_writer.py"))
    monkeypatch.setenv("TEST_GATE", str(gate))
    client = processes.start()
    stage.share(client)
    job = stage.job(1)
    client.submit(job)
    assert not client.close(0.05)
    done = outcome(client, job.job)
    assert done.error is not None
    assert isinstance(done.error.exception(), WaitTimeoutError)
    gate.touch()
    assert client.close(WAIT_SECONDS)
    assert [i.step for i in check_all(processes.root)] == [1]


def test_a_forked_child_cannot_use_the_client(processes: Writers, stage: Stage) -> None:
    """A loader worker that inherits the client, and even closes it, changes nothing for the trainer."""
    client = processes.start()
    stage.share(client)
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            assert client.poll() == []
            assert not client.alive
            assert client.close(1.0)
            with contextlib.suppress(WriterError):
                client.submit(stage.job(1))
                status = 2
            status = 0 if status == 1 else status
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    job = stage.job(2)
    client.submit(job)
    assert outcome(client, job.job).ok


def test_the_writer_loads_neither_torch_nor_numpy(
    processes: Writers, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of their libraries is mapped, even after a job."""
    monkeypatch.setattr(launch, "subprocess", subprocess)  # as a user starts it, and no fork
    client = processes.start(keep={"last": 1})
    stage.share(client)
    job = stage.job(1)
    client.submit(job)
    assert outcome(client, job.job).ok
    maps = Path(f"/proc/{client.pid}/maps").read_text()
    assert "xxhash" in maps
    assert "torch" not in maps
    assert "numpy" not in maps


def test_persist_imports_no_torch() -> None:
    """Importing every module of the package in a fresh interpreter loads neither torch nor the schema of options."""
    code = """
        import pkgutil, sys, importlib, ckpt_engine.writer as package
        names = [m.name for m in pkgutil.iter_modules(package.__path__) if m.name != "__main__"]
        for name in names: importlib.import_module(f"ckpt_engine.writer.{name}")
        assert len(names) > 8
        assert not {"torch", "numpy", "pydantic", "lightning", "accelerate"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=WAIT_SECONDS, cwd=REPOSITORY)


SCRIPT = """
    import os, sys
    with open(COUNT, "a") as file: file.write("run\\n")
    sys.path[:0] = [REPOSITORY, *PACKAGES]
    from ckpt_engine.copy.job import WriterConfig
    from ckpt_engine.writer.launch import open_client
    from tests.writer.staged import Stage, outcome
    stage = Stage()
    client = open_client(WriterConfig(ROOT), thread=False, emit=lambda event: sys.exit(str(event)))
    stage.share(client)
    job = stage.job(7)
    client.submit(job)
    assert outcome(client, job.job).ok
    assert client.close(60)
"""


def test_any_script_can_start_a_writer(tmp_path: Path) -> None:
    """A script without a main guard, in a folder full of modules with the standard library's names, with packages it
    found by itself, run by an interpreter that has none of them installed: the writer starts, and the script ran once.
    """
    for name in ("json", "socket", "selectors", "threading", "ckpt_engine", "xxhash"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "train.py"
    packages = [folder for folder in sys.path if folder.endswith("site-packages")]
    values = {"COUNT": str(tmp_path / "count"), "REPOSITORY": str(REPOSITORY), "PACKAGES": packages, "ROOT": "run"}
    header = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    script.write_text(header + textwrap.dedent(SCRIPT))
    bare = getattr(sys, "_base_executable", sys.executable)
    done = subprocess.run(
        [bare, str(script)], cwd=tmp_path, timeout=WAIT_SECONDS, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "count").read_text() == "run\n"
    assert [i.step for i in check_all(tmp_path / "run")] == [7]


def test_a_writer_that_does_not_answer_is_given_up(processes: Writers, monkeypatch: pytest.MonkeyPatch) -> None:
    """`start` has an end even if the new process hangs, and does not leave it behind."""
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(launch, "ENTRY", Path(__file__).with_name("mute_writer.py"))
    with pytest.raises(WriterError, match="does not answer"):
        processes.start()


@pytest.mark.parametrize("interpreter", ["", "/nonexistent/python", "/bin/false"])
def test_a_thread_takes_over_where_no_process_can_start(
    tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch, interpreter: str
) -> None:
    """No interpreter, a missing one, or one that ends at once: snapshots are written all the same, with a warning."""
    monkeypatch.setattr(sys, "executable", interpreter)
    events: list[Event] = []
    client = open_client(WriterConfig(str(tmp_path / "run")), thread=False, emit=events.append)
    assert isinstance(client, ThreadWriter)
    (notice,) = events
    assert isinstance(notice, Notice)
    assert "thread" in notice.message
    stage.share(client)
    job = stage.job(1)
    client.submit(job)
    assert outcome(client, job.job).ok
    assert client.close(WAIT_SECONDS)


def test_a_writer_that_breaks_down_says_why(processes: Writers, stage: Stage) -> None:
    """A message that is not of the protocol ends the writer; its traceback reaches the trainer."""
    client = processes.start()
    client._send({"kind": "dance"})
    assert client.wait(WAIT_SECONDS)
    (lost,) = client.poll()
    assert isinstance(lost, WriterLost)
    assert "'dance'" in lost.message


def test_many_jobs_leave_nothing_behind(processes: Writers, stage: Stage) -> None:
    """Neither process gains descriptors or memory from job to job."""
    _watch_growth(processes, stage, jobs=50)


@pytest.mark.slow
def test_very_many_jobs_leave_nothing_behind(processes: Writers, stage: Stage) -> None:
    """The pools of the allocator fill over some 5,500 jobs; over the 1,000 after the first 7,000 nothing grows."""
    _watch_growth(processes, stage, jobs=1000, before=7000, most_bytes=512 << 10)


def _watch_growth(processes: Writers, stage: Stage, jobs: int, before: int = 20, most_bytes: int = 2 << 20) -> None:
    client = processes.start(keep={"last": 2})
    stage.share(client)
    pids = (os.getpid(), client.pid)
    for number in range(before + jobs):
        if number == before:
            settle(client)
            then = [(_files(pid), _anonymous_bytes(pid)) for pid in pids]
        job = stage.job(number)
        client.submit(job)
        assert outcome(client, job.job).ok
    settle(client)
    for pid, (files, memory) in zip(pids, then, strict=True):
        assert _files(pid) <= files  # some of what earlier tests have left may be gone by now
        assert _anonymous_bytes(pid) - memory < most_bytes
    assert len(check_all(processes.root)) <= 3


def _files(pid: int) -> int:
    """Descriptors, without those of the run's files."""
    return sum("/run/" not in target for target in open_files(pid).values())


def _anonymous_bytes(pid: int) -> int:
    return int(_status(pid, "RssAnon")) * 1024


@pytest.mark.slow
def test_a_trainer_that_has_closed_and_lives_on_leaves_the_lease_free(processes: Writers, stage: Stage) -> None:
    """Not as long as parts of other ranks could come, two minutes: its script may train again in the same place."""
    client = processes.start(ranks=RankConfig(0, 2, "session", 1, 120.0), drain_seconds=600.0)
    stage.share(client)
    client.submit(stage.job(1))
    client.close(0.0, failed=True)
    acquire(open_storage(processes.root), wait_seconds=60.0).release()
