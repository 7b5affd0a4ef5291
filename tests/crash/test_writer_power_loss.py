"""The writer itself, on a recorded disk: its order of writes survives a power loss at any point."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ckpt_engine.copy.job import WriterConfig, to_json
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer.memory_snapshots import Ids, MessageDecoder
from ckpt_engine.writer.messages import Body, Kind
from ckpt_engine.writer.persister import Persister
from tests.crash.explorer import Explorer
from tests.crash.life import check
from tests.crash.powerloss import Killed, RecordingDisk
from tests.writer.staged import Stage, check_one

KEEP = 2


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage(8 << 10)
    yield made
    made.close()


class _Session:
    """A writer that lives until it is killed, and notes on the disk what it has acknowledged."""

    def __init__(self, root: Path, disk: RecordingDisk, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "ckpt_engine.writer.persister.open_storage", lambda url, options: LocalStorage(url, disk=disk)
        )
        self._disk = disk
        self._stage = stage
        self.failed: list[str] = []
        self._config = WriterConfig(str(root), keep={"last": KEEP})

    def run(self, steps: range) -> bool:
        """Persist a snapshot for each step; whether the writer lived to do it."""
        writer, intake = Persister(self._config, self._hear, Ids()), MessageDecoder()
        try:
            self._drive(writer, intake, steps)
            lived = True
        except Killed:
            lived = False
        writer.close()
        intake.close()  # only now: the traceback of a kill still refers to the arena
        return lived

    def _drive(self, writer: Persister, intake: MessageDecoder, steps: range) -> None:
        writer.prepare(writer.open())
        intake.take(*self._stage.message())
        for step in steps:
            order = intake.take({"kind": Kind.PERSIST, "job": to_json(self._stage.job(step))})
            assert order is not None
            writer.persist(order)

    def _hear(self, body: Body) -> None:
        if body["kind"] != Kind.DONE:
            return
        done = body["done"]
        if done["error"]:
            self.failed.append(done["error"]["message"])
            return
        # From now on retention may remove all older ones; one that a killed writer has not acknowledged counts, too.
        for old in sorted(path.stem for path in Path(self._config.url, "snapshots").glob("*.json"))[:-KEEP]:
            self._disk.mark(f"forgetting {old}")
        self._disk.mark(f"saved {done['snapshot_id']}")


def _whole(repository: Repository, snapshots: set[str]) -> None:
    assert isinstance(repository.storage, LocalStorage)
    for info in repository.list():
        if info.id in snapshots:
            check_one(repository, Path(repository.storage.root), info)


def _recorded(tmp_path: Path, die_before: int | None = None) -> RecordingDisk:
    base = tmp_path / "disk"
    base.mkdir()
    disk = RecordingDisk(base)
    disk.die_before = die_before
    return disk


def test_a_power_loss_during_any_operation_of_the_writer_is_survived(
    tmp_path: Path, scratch: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four snapshots with retention: no bad state, nothing acknowledged is lost."""
    disk = _recorded(tmp_path)
    session = _Session(tmp_path / "disk" / "run", disk, stage, monkeypatch)
    assert session.run(range(4))
    assert session.failed == []
    explorer = Explorer(scratch, partial(check, check_whole=_whole))
    explorer.explore(disk)
    assert explorer.bad == []
    assert explorer.checked > 40


@pytest.mark.parametrize(
    "points", [(10, 38, 65), pytest.param(range(3, 80, 2), marks=pytest.mark.slow)], ids=["few", "every second"]
)
def test_a_writer_that_continues_after_a_killed_one_survives_a_power_loss(
    tmp_path: Path, scratch: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch, points: Iterable[int]
) -> None:
    """Killed at several points; the next writer of the run takes over, and then the power fails."""
    explorer = Explorer(scratch, partial(check, check_whole=_whole))
    for die_before in points:
        disk = _recorded(tmp_path, die_before)
        session = _Session(tmp_path / "disk" / "run", disk, stage, monkeypatch)
        assert not session.run(range(6))
        died = len(disk.operations)
        disk.dead, disk.die_before = False, None
        assert session.run(range(10, 12))
        assert session.failed == []
        explorer.explore(disk, died)
        shutil.rmtree(tmp_path / "disk")
    assert explorer.bad == []


def test_a_writer_that_does_not_sync_is_noticed(
    tmp_path: Path, scratch: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same exploration of a writer whose files are not synced finds a bad state."""
    monkeypatch.setattr(RecordingDisk, "sync", lambda self, fd: None)
    disk = _recorded(tmp_path)
    _Session(tmp_path / "disk" / "run", disk, stage, monkeypatch).run(range(2))
    explorer = Explorer(scratch, partial(check, check_whole=_whole))
    explorer.explore(disk, stop_at_bad=True)
    assert explorer.bad
