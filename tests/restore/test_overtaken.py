"""Two jobs, one place: who takes the lease goes on from the newest snapshot, or stops; other lines are left alone."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.errors import OvertakenError
from ckpt_engine.observe.events import Event, LogSink, Notice
from ckpt_engine.restore.load import TIDY_FROM
from ckpt_engine.store.branches import branches
from ckpt_engine.store.lease import LocalLease, acquire
from ckpt_engine.store.lease_holder import Lease, LeaseHolder
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.local import LocalStorage
from tests.ranks.runs import on_all, open_ranks

WAIT_SECONDS = 60.0


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((100,), float(step)), "step": step}


def save(ckpt: Checkpointer, *steps: int) -> None:
    for step in steps:
        ckpt.save(state(step), step=step).wait(WAIT_SECONDS)


def job(root: Path | str, **options: Any) -> Checkpointer:
    return Checkpointer(root, **{"keep": {"last": 2}, "writer": "thread", **options})


def there(root: Path | str) -> list[SnapshotInfo]:
    with Checkpointer(root) as ckpt:
        return ckpt.snapshots()


def steps(root: Path | str) -> list[int]:
    return [info.step for info in there(root)]


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_a_job_that_was_overtaken_stops_with_an_error_and_harms_nothing(tmp_path: Path, writer: str) -> None:
    """It loaded step 1, another job went on to step 9 meanwhile: its first save names both, and the way on."""
    with job(tmp_path) as ckpt:
        save(ckpt, 1)
    late = job(tmp_path, writer=writer)
    assert late.load()["step"] == 1  # type: ignore[index]
    with job(tmp_path) as other:
        other.load()
        save(other, *range(2, 10))
    for _ in range(2):
        with pytest.raises(OvertakenError, match=r"step 9 .*it had step 1.*load") as error:
            late.save(state(2), step=2)
        assert error.value.code == "CKPT702"
    with pytest.raises(OvertakenError):
        late.engine.start()
    assert steps(tmp_path) == [8, 9]
    assert late.load()["step"] == 9  # type: ignore[index]
    save(late, 10)
    late.close()
    assert steps(tmp_path) == [9, 10]


def test_nothing_seen_is_overtaken_too(tmp_path: Path) -> None:
    """Who found no snapshot and finds some with the lease stops as well: it may have meant to go on from them."""
    late = job(tmp_path)
    assert late.load() is None
    with job(tmp_path) as other:
        save(other, 1, 2)
    with pytest.raises(OvertakenError, match="there was nothing"):
        late.save(state(1), step=1)
    late.close()
    assert steps(tmp_path) == [1, 2]


def test_a_start_that_does_not_resume_leaves_the_old_line_alone_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names the steps, the branch and the way to go on; retention never touches them."""
    with job(tmp_path) as ckpt:
        save(ckpt, 38, 39)
    with caplog.at_level(logging.WARNING), job(tmp_path) as fresh:
        save(fresh, 1, 2, 3)
    old, new = there(tmp_path)[:2], there(tmp_path)[2:]
    assert [[info.step for info in one] for one in (old, new)] == [[38, 39], [2, 3]]
    branch = branches(old)[0].id
    said = [record.getMessage() for record in caplog.records if "starts fresh" in record.getMessage()]
    assert len(said) == 1
    for text in ("2 snapshots", "up to step 39", f"--branch {branch}", "call load() before the first save()"):
        assert text in said[0]
    with job(tmp_path) as again:
        assert again.load()["step"] == 3  # type: ignore[index]
        save(again, 4, 5)
    assert steps(tmp_path) == [38, 39, 4, 5]


def test_a_fresh_start_in_an_empty_place_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is nothing to protect, and a resume has nothing to say either."""
    with caplog.at_level(logging.WARNING):
        for last in (2, 4):
            with job(tmp_path) as ckpt:
                ckpt.load()
                save(ckpt, last - 1, last)
    assert not caplog.records
    assert steps(tmp_path) == [3, 4]


def test_going_back_to_an_older_step_begins_a_branch(tmp_path: Path) -> None:
    """`load(step)` of what others went on from leaves all of that, and names where it began."""
    with job(tmp_path, keep={"last": 3}) as ckpt:
        save(ckpt, 1, 2, 3)
    with job(tmp_path) as fork:
        assert fork.load(2)["step"] == 2  # type: ignore[index]
        save(fork, 30, 40, 50)
    found = there(tmp_path)
    assert [info.step for info in found] == [1, 2, 3, 40, 50]
    assert found[-1].parent == found[1].id
    with job(tmp_path) as tip:
        assert tip.load(3)["step"] == 3  # type: ignore[index]
        save(tip, 4, 5)
    assert steps(tmp_path) == [40, 50, 4, 5]


def test_going_back_within_one_process_begins_a_branch(tmp_path: Path) -> None:
    """The process's own newer snapshots stay then, too."""
    with job(tmp_path, keep={"last": 3}) as ckpt:
        save(ckpt, 1, 2, 3)
        assert ckpt.load(1)["step"] == 1  # type: ignore[index]
        save(ckpt, 10, 20, 30, 40)
    assert steps(tmp_path) == [1, 2, 3, 20, 30, 40]


def test_a_fallback_to_an_older_snapshot_goes_on_with_its_line(tmp_path: Path) -> None:
    """What is damaged is no history to protect: retention removes it as soon as there are newer ones."""
    with job(tmp_path) as ckpt:
        save(ckpt, 1, 2)
    newest = there(tmp_path)[-1]
    data = next(tmp_path.glob(f"data/{newest.id}*"))
    data.write_bytes(data.read_bytes()[:-1] + b"\x01")
    with job(tmp_path) as ckpt:
        assert ckpt.load()["step"] == 1  # type: ignore[index]
        save(ckpt, 3, 4)
    assert steps(tmp_path) == [3, 4]


def test_snapshots_without_a_line_are_one_that_the_first_resume_continues(tmp_path: Path) -> None:
    """As earlier versions wrote them: a resume goes on with them, a fresh start leaves them alone."""
    from tests.store.samples import save as save_unnamed

    repository = Checkpointer(tmp_path).engine._restorer.places()[0]
    for step in (1, 2, 3):
        save_unnamed(repository, step)
    with job(tmp_path) as fresh:
        save(fresh, 7, 8, 9)
    assert steps(tmp_path) == [1, 2, 3, 8, 9]
    with job(tmp_path) as resumed:
        resumed.load(3)
        save(resumed, 4, 5)
    assert steps(tmp_path) == [8, 9, 4, 5]


def test_a_further_tier_leaves_the_line_of_another_job_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two jobs on two machines resume the same snapshot from the tier that both copy to: each one's newest stay, and
    that is said once."""
    far = tmp_path / "far"

    def on(machine: str) -> Checkpointer:
        return Checkpointer(tiers=[str(tmp_path / machine), str(far)], keep={"last": 2}, writer="thread")

    with on("a") as ckpt:
        save(ckpt, 1)
    with on("b") as late:
        assert late.load()["step"] == 1  # type: ignore[index]
        with on("a") as first:
            first.load()
            save(first, *range(2, 8))
        save(late, 20, 30, 40)
    said = [record.getMessage() for record in caplog.records if "snapshots of another job" in record.getMessage()]
    assert len(said) == 1
    assert "up to step 7" in said[0]
    assert {6, 7, 30, 40} <= set(steps(far))


def lease_of_the_dead(storage: Storage) -> Lease:
    """The lease of a run whose trainer is gone, still with its writer."""
    gone = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True, timeout=60)
    return acquire(storage, LeaseHolder(int(gone.stdout), socket.gethostname(), 0.0, "train.py"))


@pytest.mark.cells(1)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["folder", "objects"])
def test_a_load_waits_for_the_writer_of_a_dead_trainer(tmp_path: Path, kind: str, size: int) -> None:
    """What that still makes durable is what the run goes on from, instead of being overtaken by it."""
    url = str(tmp_path) if kind == "folder" else f"memory://{tmp_path.name}/run"
    storage = open_storage(url)

    def life() -> list[Checkpointer]:
        options: dict[str, Any] = {"keep": {"last": 2}}
        return open_ranks(url, size, **options) if size > 1 else [job(url, **options)]

    def save_all(ranks: list[Checkpointer], *wanted: int) -> None:
        on_all(lambda rank: save(ranks[rank], *wanted), size)

    def close_all(ranks: list[Checkpointer]) -> None:
        on_all(lambda rank: ranks[rank].close(), size)

    first = life()
    save_all(first, 1, 2)
    close_all(first)
    newest = list(storage.list("snapshots/"))[-1].name
    manifest = storage.get(newest)
    storage.delete(newest)
    lease, late = lease_of_the_dead(storage), life()

    class Finishes(LogSink):
        def emit(self, event: Event) -> None:
            if isinstance(event, Notice) and "its writer is still writing" in event.message:
                storage.put(newest, [memoryview(manifest)])
                lease.release()

    late[0].engine.events = Finishes()
    assert [loaded["step"] for loaded in on_all(lambda rank: late[rank].load(), size)] == [2] * size
    save_all(late, 3)
    close_all(late)
    assert steps(url) == [2, 3]


def test_a_load_does_not_wait_for_a_writer_that_was_killed_too(tmp_path: Path) -> None:
    """The lease still names its trainer, and is free."""
    with job(tmp_path) as ckpt:
        save(ckpt, 1)
    lease = lease_of_the_dead(LocalStorage(tmp_path))
    assert isinstance(lease, LocalLease)
    os.close(lease._fd)
    lease._fd = -1
    with job(tmp_path) as late:
        assert late.load()["step"] == 1  # type: ignore[index]
        save(late, 2)


@pytest.mark.long
def test_attempts_that_have_left_nothing_are_not_named_for_ever(tmp_path: Path) -> None:
    """After many restarts a line names about as many attempts as have snapshots, and retention still sees them all."""
    for number in range(1, TIDY_FROM + 6):
        with job(tmp_path, keep={"last": 1, "every_n_steps": 10}) as ckpt:
            ckpt.load()
            save(ckpt, number)
    found = there(tmp_path)
    assert [info.step for info in found] == [10, 20, 21]
    assert len(found[-1].line.before) < TIDY_FROM
    with job(tmp_path, keep={"last": 1}) as ckpt:
        ckpt.load()
        save(ckpt, 30)
    assert steps(tmp_path) == [30]
