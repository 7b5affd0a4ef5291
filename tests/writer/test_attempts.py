"""The record of a run's attempts distinguishes how each one ends, and a damaged record stops no run."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from ckpt_engine.errors import CorruptError, LeaseHeldError
from ckpt_engine.observe.events import CLOSED, FAILED, GONE, MACHINE, PROCESS, UNKNOWN, AttemptsFound, Event, Notice
from ckpt_engine.store import names
from ckpt_engine.store.lease_holder import LeaseHolder
from ckpt_engine.store.sealed_json import seal
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer import attempts
from ckpt_engine.writer.attempts import (
    Attempt,
    AttemptHistory,
    AttemptRecord,
    encode_attempts,
    parse_attempts,
    read_attempts,
)
from ckpt_engine.writer.pulse import SpentTimes
from tests.writer.conftest import Writers
from tests.writer.staged import WAIT_SECONDS, Stage, outcome
from tests.writer.test_process import run_trainer


def heard(writers: Writers) -> tuple[AttemptsFound | None, list[Event]]:
    """What the next writer says of earlier attempts, and all that it says."""
    client = writers.start(lease_wait_seconds=WAIT_SECONDS)
    events = [event for event in client.poll() if isinstance(event, Event)]
    return next((event for event in events if isinstance(event, AttemptsFound)), None), events


@pytest.mark.parametrize(("failed", "end"), [(False, CLOSED), (True, FAILED)])
def test_how_a_trainer_ends_is_recorded(writers: Writers, failed: bool, end: str) -> None:
    """The trainer says whether it ended by itself or by an error, and the record has it."""
    client = writers.start()
    assert [one.end for one in read_attempts(LocalStorage(writers.root)).attempts] == [None]
    assert client.close(WAIT_SECONDS, failed=failed)
    assert [one.end for one in read_attempts(LocalStorage(writers.root)).attempts] == [end]


def test_a_trainer_that_is_killed_without_its_writer_is_a_process_failure(processes: Writers) -> None:
    """The writer lives on, says so, and the next one tells; also of a run that has no snapshot yet."""
    run_trainer(processes.root, "die-after", "0")
    found, _ = heard(processes)
    assert found is not None
    assert found.failures == (PROCESS,)
    assert [one.end for one in read_attempts(LocalStorage(processes.root)).attempts] == [GONE, None]


def test_a_writer_that_is_killed_goes_on_in_the_row_of_its_trainer(processes: Writers, stage: Stage) -> None:
    """Only the trainer's end ends an attempt."""
    client = processes.start()
    os.kill(client.pid, signal.SIGKILL)
    stage.share(client)
    assert client.wait(WAIT_SECONDS)
    found, _ = heard(processes)
    assert found is not None
    assert (found.lasted, found.seconds > 0.0) == ((), True)
    assert len(read_attempts(LocalStorage(processes.root)).attempts) == 1


def test_an_attempt_without_an_end_has_lost_its_machine(tmp_path: Path, processes: Writers) -> None:
    """An attempt of one rank without an end counts as a failure of the machine, as its memory is lost."""
    processes.root.mkdir()
    rows = [Attempt("there", "other", 1e9, 60.0)] * 2 + [Attempt("there", "other", 1e9, 5.0, FAILED, ranks=4)]
    (processes.root / names.ATTEMPTS).write_bytes(encode_attempts(AttemptHistory(tuple(rows))))
    found, _ = heard(processes)
    assert found is not None
    assert (found.lasted, found.failures) == ((60.0, 60.0, 5.0), (MACHINE, MACHINE, UNKNOWN))
    assert found.seconds == pytest.approx(0.0, abs=30.0)
    assert found.spent["unknown"] == 125.0


def test_the_first_attempt_has_nothing_to_tell(processes: Writers) -> None:
    """A first attempt sends no event about earlier ones."""
    assert heard(processes) == (None, [])


def test_old_attempts_are_dropped_but_for_what_their_time_went_into() -> None:
    """The file stays small, and the sum is right."""
    rows = [Attempt("host", "", float(number)) for number in range(attempts.MOST + 10)]
    kept = parse_attempts(encode_attempts(AttemptHistory(tuple(rows))), "here")
    assert kept.attempts == tuple(rows[10:])
    times = {"startup": 1.0, "training": 5.0, "replay": 2.0, "slowdown": 0.7, "slowdown_error": 0.1}
    many = range(attempts.MOST + 10)
    long = [Attempt("host", "", 10.0 * n, 9.0, GONE, started=10.0 * n, times=times) for n in many]
    history = AttemptHistory(tuple(long))
    again = parse_attempts(encode_attempts(history), "here")
    assert asdict(again.spent) == pytest.approx(asdict(history.spent))
    assert again.spent.wall == pytest.approx(10.0 * len(long) - 1.0)
    assert again.spent.productive == pytest.approx(4.5 * len(long))


def test_what_the_trainer_says_of_its_time_is_recorded_when_it_is_gone(tmp_path: Path) -> None:
    """What the writer does after the end of its trainer does not count as time of the trainer."""
    said = [SpentTimes(1.0, 5, {"training": 3.0}), SpentTimes(1.0, 9, {"training": 4.0})]
    before = time.monotonic()
    me = LeaseHolder.current()
    record = AttemptRecord(LocalStorage(tmp_path), me, 1, lambda: None, lambda _: None, lambda: said[0])
    record.begin()
    said.pop(0)
    record.note(gone=True)
    frozen = time.monotonic()
    said.pop()
    threading.Event().wait(0.05)
    record.end(GONE)
    (row,) = read_attempts(LocalStorage(tmp_path)).attempts
    assert (row.started, row.step, row.times) == (1.0, 9, {"training": 4.0})
    assert row.seconds <= frozen - before


def test_how_often_it_took_snapshots_is_recorded_when_that_changes(tmp_path: Path) -> None:
    """With the reason; not each small change, and the newest ones if there are many."""
    record = AttemptRecord(LocalStorage(tmp_path), LeaseHolder.current(), 1, lambda: None, lambda _: None)
    record.begin()
    for steps in (None, 10, 12, 14, 16, 8):
        record.paced({} if steps is None else {"interval_steps": steps, "why": f"every {steps} steps"})
    record.end(CLOSED)
    (row,) = read_attempts(LocalStorage(tmp_path)).attempts
    assert [(steps, why) for _, steps, why in row.intervals] == [(n, f"every {n} steps") for n in (10, 16, 8)]
    for number in range(30):
        record.paced({"interval_steps": 2**number, "why": "x" * 10_000})
    record.end(CLOSED)
    (row,) = read_attempts(LocalStorage(tmp_path)).attempts
    assert [steps for _, steps, _ in row.intervals] == [2**number for number in range(22, 30)]
    assert len((tmp_path / names.ATTEMPTS).read_bytes()) < 4096


def test_a_record_of_an_older_version_is_read(tmp_path: Path) -> None:
    """All its time counts as unknown, as it does not say what the time went into."""
    row = {"host": "", "process": "", "began": 100.0, "seconds": 50.0, "end": CLOSED, "ranks": 1}
    history = parse_attempts(seal({"attempts": [row]}) + b"\n", "here")
    assert (history.spent.unknown, history.spent.wall) == (50.0, 50.0)


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"attempts": 5}',
        b'{"attempts": [5]}',
        b'{"attempts": [{"host": 1, "process": "", "began": 1}]}',
        b'{"attempts": [{"host": "", "process": "", "began": 1e999}]}',
        b'{"attempts": [{"host": "", "process": "", "began": 1, "seconds": -1}]}',
        b'{"attempts": [{"host": "", "process": "", "began": 1, "end": "well"}]}',
        b'{"attempts": [{"host": "", "process": "", "began": 1, "ranks": 0}]}',
        b'{"attempts": [{"host": "", "process": "", "began": 1, "started": "x"}]}',
        b'{"attempts": [{"host": "", "process": "", "began": 1, "step": 0.5}]}',
        b'{"attempts": [{"host": "", "process": "", "began": 1, "times": [1]}]}',
        b'{"attempts": [{"host": "", "process": "", "began": 1, "times": {"training": -1e12}}]}',
        b'{"attempts": [{"host": "", "process": "", "began": 1, "intervals": 5}]}',
        b'{"attempts": [{"host": "", "process": "", "began": 1, "intervals": [[1, 2]]}]}',
        b'{"attempts": [{"host": "", "process": "", "began": 1, "intervals": [[1, 0, "x"]]}]}',
        b'{"attempts": [{"host": "", "process": "", "began": 1, "intervals": [[1, 2, 3]]}]}',
        b'{"attempts": [], "before": 5}',
        b'{"attempts": [], "before": {"down": 1e999}}',
        encode_attempts(AttemptHistory((Attempt("host", "", 1.0),))).replace(b"host", b"hose"),
    ],
)
def test_what_is_no_record_is_refused(text: bytes) -> None:
    """A record of any content is refused with a hint, as other programs may write to the store."""
    with pytest.raises(CorruptError) as refused:
        parse_attempts(text, "here")
    assert refused.value.hint


def test_a_damaged_record_is_said_once_and_begun_again(processes: Writers, stage: Stage) -> None:
    """Snapshots do not depend on it."""
    processes.root.mkdir()
    (processes.root / names.ATTEMPTS).write_bytes(b"{?")
    client = processes.start()
    assert [type(event) for event in client.poll()] == [Notice]
    assert len(read_attempts(LocalStorage(processes.root)).attempts) == 1
    stage.share(client)
    job = stage.job(1)
    client.submit(job)
    assert outcome(client, job.job, []).ok


def test_the_heartbeat_says_how_long_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record grows without any snapshot."""
    monkeypatch.setattr(attempts, "BEAT_SECONDS", 0.001)
    said: list[float] = []
    several = threading.Event()
    storage = LocalStorage(tmp_path)

    def check() -> None:
        said.extend(one.seconds for one in read_attempts(storage).attempts)
        if len(said) >= 3:
            several.set()

    record = AttemptRecord(storage, LeaseHolder.current(), 1, check, said.append)  # type: ignore[arg-type]
    record.begin()
    assert several.wait(WAIT_SECONDS)
    record.end(CLOSED)
    assert sorted(set(said)) == said
    assert read_attempts(storage).attempts[0].seconds > said[-1]


def test_no_heartbeat_is_left_at_the_end(tmp_path: Path) -> None:
    """Test suites look for threads that a training has left."""
    others = set(threading.enumerate())
    for _ in range(200):
        record = AttemptRecord(LocalStorage(tmp_path), LeaseHolder.current(), 1, lambda: None, lambda _: None)
        record.begin()
        record.end(None)
        assert "ckpt-attempt" not in [thread.name for thread in threading.enumerate() if thread not in others]


def test_a_lost_lease_ends_the_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is of the one who has the lease now."""
    monkeypatch.setattr(attempts, "BEAT_SECONDS", 0.001)

    def check() -> None:
        raise LeaseHeldError("lost")

    record = AttemptRecord(LocalStorage(tmp_path), LeaseHolder.current(), 1, check, lambda _: None)
    record.begin()
    record.end(CLOSED)
    assert not (tmp_path / names.ATTEMPTS).exists()
