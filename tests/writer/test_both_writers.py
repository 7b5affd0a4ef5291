"""What a writer promises, as a process and as a thread."""

from __future__ import annotations

import errno
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.copy.job import JobDone
from ckpt_engine.errors import ForeignError, LeaseHeldError, NotAFolderError, StorageFullError, WriterError
from ckpt_engine.observe.events import Notice, SnapshotCommitted, SnapshotFailed, SnapshotsForgotten, WriterLost
from ckpt_engine.store.lease_holder import LeaseHolder
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.disk import Disk
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer.client import Message
from ckpt_engine.writer.launch import ThreadWriter
from tests.writer.conftest import Writers
from tests.writer.staged import WAIT_SECONDS, Stage, arena, check_all, outcome, settle


def test_jobs_become_durable_in_order(writers: Writers, stage: Stage) -> None:
    """Each job ends as a whole snapshot of its own step, and events come before the outcome they belong to."""
    client = writers.start()
    stage.share(client)
    heard: list[Message] = []
    for step in (3, 14, 15):
        job = stage.job(step, notes={"a": [1]}, parent="p")
        client.submit(job)
        assert outcome(client, job.job, heard).ok
    infos = check_all(writers.root)
    assert [(i.step, i.seq, i.epoch, i.parent) for i in infos] == [(3, 1, 0, "p"), (14, 2, 1, "p"), (15, 3, 1, "p")]
    assert infos[0].components == {"model": 64 << 10, "loop": 8}
    assert infos[0].nbytes == (64 << 10) + 8
    assert [type(m) for m in heard] == [SnapshotCommitted, JobDone] * 3
    committed = [m for m in heard if isinstance(m, SnapshotCommitted)]
    assert [m.snapshot for m in committed] == [i.id for i in infos]
    assert all(m.latency_seconds > 0 and m.cpu_seconds > 0 and m.tier == str(writers.root) for m in committed)


def test_numbers_go_on_after_a_restart(writers: Writers, stage: Stage) -> None:
    """A second writer on the same run continues the sequence and the run's id."""
    for step in (1, 2):
        client = writers.start()
        stage.share(client)
        job = stage.job(step)
        client.submit(job)
        assert outcome(client, job.job).ok
        assert client.close(WAIT_SECONDS)
    assert [i.seq for i in check_all(writers.root)] == [1, 2]


def test_retention_keeps_what_keep_says(writers: Writers, stage: Stage) -> None:
    """Snapshots beyond `keep` are forgotten after each commit, and their data is gone."""
    client = writers.start(keep={"last": 2, "every_n_steps": 4})
    stage.share(client)
    heard: list[Message] = []
    for step in range(1, 9):
        job = stage.job(step)
        client.submit(job)
        assert outcome(client, job.job, heard).ok
    settle(client)
    heard += client.poll()
    assert [i.step for i in check_all(writers.root)] == [4, 7, 8]
    assert len(list((writers.root / "data").iterdir())) == 3
    forgotten = [m for m in heard if isinstance(m, SnapshotsForgotten)]
    assert sum(len(m.snapshots) for m in forgotten) == 5
    assert all(m.freed_bytes > 64 << 10 for m in forgotten)


def test_a_failed_job_is_reported_and_the_next_one_works(writers: Writers, stage: Stage) -> None:
    """An error inside a job fails that job only, with its cause."""
    client = writers.start()
    stage.share(client)
    bad = [stage.job(1, slot=99), stage.job(2, values={}), stage.job(3, notes={"x": float("nan")})]
    heard: list[Message] = []
    for job in bad:
        client.submit(job)
        done = outcome(client, job.job, heard)
        assert not done.ok
        assert done.snapshot_id is None
        assert done.error is not None
        assert isinstance(done.error.exception(), WriterError)
    assert [type(m) for m in heard] == [SnapshotFailed, JobDone] * 3
    good = stage.job(4)
    client.submit(good)
    assert outcome(client, good.job).ok
    assert [i.step for i in check_all(writers.root)] == [4]
    assert len(list((writers.root / "data").iterdir())) == 1


@pytest.mark.parametrize("memory", [False, True])
def test_a_job_with_an_impossible_step_fails_alone(writers: Writers, stage: Stage, memory: bool) -> None:
    """Whatever a caller has let through: the writer lives, and correct jobs queued around it become durable."""
    client = writers.start(memory=memory)
    stage.share(client)
    steps: list[Any] = [1, -1, 1.0, "2", None, True, [], 2]
    jobs = [replace(stage.job(number), step=step) for number, step in enumerate(steps, 1)]
    for job in jobs:
        client.submit(job)
    settle(client)
    heard = client.poll()
    assert [one.ok for one in heard if isinstance(one, JobDone)] == [True, *[False] * 6, True]
    failed = [m for m in heard if isinstance(m, SnapshotFailed)]
    assert len(failed) == 6 and all("is no step" in one.message for one in failed)
    assert client.alive and not [m for m in heard if isinstance(m, WriterLost)]
    assert [i.step for i in Repository(LocalStorage(writers.root)).list()] == [1, 2]


def test_a_broken_folder_fails_jobs_until_it_is_mended(writers: Writers, stage: Stage) -> None:
    """When data cannot be written the job fails; once it can, the next one is durable."""
    client = writers.start()
    stage.share(client)
    in_the_way = writers.root / "data"
    in_the_way.write_text("not a folder")
    job = stage.job(1)
    client.submit(job)
    done = outcome(client, job.job)
    assert done.error is not None
    assert isinstance(done.error.exception(), NotAFolderError)
    in_the_way.unlink()
    job = stage.job(2)
    client.submit(job)
    assert outcome(client, job.job).ok
    assert [i.step for i in check_all(writers.root)] == [2]


def test_a_commit_that_fails_leaves_no_data(writers: Writers, stage: Stage) -> None:
    """When the manifest cannot be made the data file is removed again, so that a full disk is not made fuller."""
    client = writers.start()
    stage.share(client)
    job = stage.job(1, notes={"x": float("nan")})
    client.submit(job)
    assert not outcome(client, job.job).ok
    assert list((writers.root / "data").iterdir()) == []


def test_data_that_cannot_be_removed_is_removed_later(writers: Writers, stage: Stage) -> None:
    """If even cleaning up fails, that is said, and done before the next job writes."""
    client = writers.start()
    stage.share(client)
    in_the_way = writers.root / "snapshots"
    in_the_way.write_text("not a folder")
    heard: list[Message] = []
    job = stage.job(1)
    client.submit(job)
    assert not outcome(client, job.job, heard).ok
    assert [m for m in heard if isinstance(m, Notice) and "cannot remove" in m.message]
    in_the_way.unlink()
    job = stage.job(2)
    client.submit(job)
    assert outcome(client, job.job).ok
    assert len(check_all(writers.root)) == len(list((writers.root / "data").iterdir())) == 1


def test_a_second_writer_is_refused_and_names_the_first(writers: Writers) -> None:
    """Two trainers on one run: the second gets the error the writer got, with its class and text."""
    client = writers.start(holder=LeaseHolder(4242, "here", 0.0, "python train.py"))
    with pytest.raises(LeaseHeldError, match=r"process 4242 .*python train.py") as caught:
        writers.start(lease_wait_seconds=0.0)
    assert caught.value.code == "CKPT500"
    assert caught.value.hint
    assert client.close(WAIT_SECONDS)
    writers.start()


def test_a_folder_with_other_files_is_refused_untouched(writers: Writers) -> None:
    """Nothing is written to a folder that is not ours."""
    writers.root.mkdir()
    (writers.root / "thesis.tex").touch()
    with pytest.raises(ForeignError, match=r"thesis.tex"):
        writers.start()
    assert [p.name for p in writers.root.iterdir()] == ["thesis.tex"]


def test_a_file_as_the_root_is_refused(writers: Writers) -> None:
    """The error has the class the storage gave it."""
    writers.root.touch()
    with pytest.raises(NotAFolderError):
        writers.start()


def test_what_dead_writers_left_is_removed(writers: Writers, stage: Stage) -> None:
    """Half-written files and data without a manifest are gone once the first job is done."""
    client = writers.start()
    stage.share(client)
    job = stage.job(1)
    client.submit(job)
    assert outcome(client, job.job).ok
    assert client.close(WAIT_SECONDS)
    orphan = writers.root / "data" / "00000009-s0000000009-0123abcd-r00000.safetensors"
    orphan.write_bytes(b"x" * 100)
    (writers.root / "data" / f".tmp-0123456789abcdef-{orphan.name}").write_bytes(b"x" * 100)
    client = writers.start()
    stage.share(client)
    job = stage.job(2)
    client.submit(job)
    assert outcome(client, job.job).ok
    assert len(list((writers.root / "data").iterdir())) == 2
    assert len(check_all(writers.root)) == 2


def test_a_slot_can_be_replaced_and_forgotten(writers: Writers, stage: Stage) -> None:
    """A bigger slot takes the number of a smaller one; a forgotten slot can no longer be persisted."""
    client = writers.start()
    stage.share(client)
    first = stage.job(1)
    client.submit(first)
    bigger = Stage(256 << 10)
    bigger.jobs = 10
    bigger.share(client)
    assert outcome(client, first.job).ok
    second = bigger.job(2)
    client.submit(second)
    assert outcome(client, second.job).ok
    client._send(arena(gone=(0,)))
    third = bigger.job(3)
    client.submit(third)
    done = outcome(client, third.job)
    assert done.error is not None
    assert "never sent" in done.error.message
    assert [i.nbytes for i in check_all(writers.root)] == [(64 << 10) + 8, (256 << 10) + 8]
    bigger.close()


def test_a_slot_smaller_than_promised_fails_the_job(writers: Writers, stage: Stage) -> None:
    """Mapping beyond the end of a file would kill the writer; it looks at the file first."""
    client = writers.start()
    stage.share(client)
    stage.attach(client, stage.nbytes * 2)
    job = stage.job(1)
    client.submit(job)
    done = outcome(client, job.job)
    assert done.error is not None
    assert "instead of" in done.error.message
    assert client.alive


def test_closing_finishes_what_is_queued(writers: Writers, stage: Stage) -> None:
    """After `close` every job is answered and the writer is gone; a closed client takes no more jobs."""
    client = writers.start(keep={"last": 1})
    stage.share(client)
    other = Stage(slot=1)
    other.attach(client)
    client.submit(stage.job(1))
    other.jobs = 1
    client.submit(other.job(2))
    assert client.close(WAIT_SECONDS)
    assert [m.job for m in client.poll() if isinstance(m, JobDone) and m.ok] == [1, 2]
    assert not client.alive
    assert client.close(WAIT_SECONDS)
    with pytest.raises(WriterError):
        client.submit(stage.job(3))
    assert not any(isinstance(m, WriterLost | Notice) for m in client.poll())
    assert [i.step for i in check_all(writers.root)] == [2]
    other.close()


def test_no_draw_from_the_global_random_streams(writers: Writers, stage: Stage) -> None:
    """A run is the same with and without a writer: Python's and numpy's global generators do not move."""
    np = pytest.importorskip("numpy")
    before = random.getstate(), np.random.get_state()[2], bytes(np.random.get_state()[1])
    client = writers.start(keep={"last": 1})
    stage.share(client)
    for step in (1, 2):
        job = stage.job(step)
        client.submit(job)
        assert outcome(client, job.job).ok
    assert client.close(WAIT_SECONDS)
    assert before == (random.getstate(), np.random.get_state()[2], bytes(np.random.get_state()[1]))


def test_what_is_not_json_is_refused_at_once(writers: Writers, stage: Stage) -> None:
    """`submit` raises in the trainer, the client expects no outcome of that job, and the writer goes on."""
    client = writers.start()
    stage.share(client)
    with pytest.raises(WriterError, match="not JSON"):
        client.submit(stage.job(1, metrics={"loss": object()}))
    assert not client._open
    job = stage.job(2, metrics={"loss": float("nan")})
    client.submit(job)
    assert outcome(client, job.job).ok


def test_a_full_disk_is_reported_and_used_again_once_there_is_space(
    tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job fails with the storage's own error and leaves nothing; garbage goes before the next one is written, which
    is durable once there is space.
    """
    threads = Writers(ThreadWriter, tmp_path / "run")
    client = threads.start()
    stage.share(client)
    first = stage.job(0)
    client.submit(first)
    assert outcome(client, first.job).ok
    real_write, written = Disk.write, [0]

    def write(disk: Disk, fd: int, data: memoryview, offset: int) -> int:
        if offset >= 32 << 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written[0] += 1
        return real_write(disk, fd, data[: 32 << 10], offset)

    with monkeypatch.context() as full:
        full.setattr(Disk, "write", write)
        for step in (1, 2):
            job = stage.job(step)
            client.submit(job)
            done = outcome(client, job.job)
            assert done.error is not None
            assert isinstance(done.error.exception(), StorageFullError)
            assert len(list((threads.root / "data").iterdir())) == 1
    assert written[0]
    (threads.root / "data" / "00000001-s0000000009-0123abcd-r00000.safetensors").touch()
    job = stage.job(3)
    client.submit(job)
    assert outcome(client, job.job).ok
    assert [i.step for i in check_all(threads.root)] == [0, 3]
    assert len(list((threads.root / "data").iterdir())) == 2
    threads.close()


def test_retention_that_fails_is_no_failure_of_the_snapshot(
    tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot is acknowledged and the trouble with older ones is a warning; the next commit tries again."""
    threads = Writers(ThreadWriter, tmp_path / "run")
    client = threads.start(keep={"last": 1})
    stage.share(client)

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "the disk says no")

    heard: list[Message] = []
    with monkeypatch.context() as broken:
        broken.setattr(LocalStorage, "delete", refuse)
        for step in (1, 2):
            job = stage.job(step)
            client.submit(job)
            assert outcome(client, job.job, heard).ok
        settle(client)
    heard += client.poll()
    (notice,) = (m for m in heard if isinstance(m, Notice))
    assert "the disk says no" in notice.message
    assert len(check_all(threads.root)) == 2
    job = stage.job(3)
    client.submit(job)
    assert outcome(client, job.job, heard).ok
    settle(client)
    assert [i.step for i in check_all(threads.root)] == [3]
    assert not any(isinstance(m, SnapshotFailed) for m in heard)
    threads.close()


def test_a_relative_root_is_the_one_of_the_trainer(
    writers: Writers, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer works elsewhere, and still writes where the trainer meant."""
    monkeypatch.chdir(tmp_path)
    client = writers.start(url="run")
    stage.share(client)
    job = stage.job(1)
    client.submit(job)
    assert outcome(client, job.job).ok
    assert len(check_all(tmp_path / "run")) == 1
