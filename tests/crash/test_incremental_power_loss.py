"""Power loss at every point of a writer whose snapshots refer to the data of older ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ckpt_engine.copy import drop_components
from ckpt_engine.copy.drop_components import is_compact
from ckpt_engine.copy.encoded_copy import Encoded
from ckpt_engine.copy.make_room import compact, prune
from ckpt_engine.store.container import digest
from ckpt_engine.store.decode import Decoder
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.manifest import Manifest, Piece
from ckpt_engine.store.names import manifest_name, parse_id
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import KeepAll
from ckpt_engine.store.storage.local import LocalStorage
from tests.crash.explorer import Explorer
from tests.crash.life import QuietDisk, check
from tests.crash.powerloss import RecordingDisk
from tests.crash.test_writer_power_loss import KEEP, _recorded, _Session
from tests.support.bounds import bounds
from tests.writer.staged import Stage

ROWS = 8


def table(step: int) -> bytes:
    """At each odd step one row changes; every 8 bytes say when it did last."""
    last = [max((at for at in range(1, step + 1, 2) if at // 2 % ROWS == row), default=0) for row in range(ROWS)]
    return b"".join(at.to_bytes(8, "little") * 128 for at in last)


class Table(Stage):
    """A table that stays, or changes in a row, and the number of the step."""

    def fill(self, step: int) -> None:
        super().fill(step)
        weight = self.layout.entries[0]
        self._memory[weight.offset : weight.offset + weight.nbytes] = table(step)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    monkeypatch.setattr("ckpt_engine.copy.encode_pieces.LEAST_ROWS", 2)
    monkeypatch.setattr(*bounds("PLAIN", least_bytes=0))
    made = Table(ROWS << 10)
    yield made
    made.close()


def _whole(repository: Repository, snapshots: set[str]) -> None:
    """Every snapshot is what it was when it was saved, bases included."""
    for snapshot in snapshots:
        manifest = repository.read(snapshot)
        if "model.weight" not in manifest.entries:
            continue  # saved by the check itself
        (piece,) = manifest.entries["model.weight"].pieces
        found = memoryview(bytearray(piece.raw_nbytes))
        Decoder(manifest, partial(_fetch, repository, manifest)).read("model.weight", 0, piece, found)
        assert bytes(found) == table(manifest.info.step), f"wrong data in {snapshot}"


def _fetch(repository: Repository, manifest: Manifest, entry: str, piece: Piece, out: memoryview) -> None:
    repository.storage.get_into(manifest.files[piece.file].name, piece.offset, out)
    assert digest(out) == piece.digest, f"damaged data of {entry}"


def _explorer(scratch: Path) -> Explorer:
    return Explorer(scratch, partial(check, check_whole=_whole))


def test_a_power_loss_while_snapshots_share_data_is_survived(
    tmp_path: Path, scratch: Path, stage: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unchanged, changed in a row, and forgotten bases: no bad state, nothing acknowledged is lost."""
    disk = _recorded(tmp_path)
    session = _Session(tmp_path / "disk" / "run", disk, stage, monkeypatch)
    assert session.run(range(5))
    assert session.failed == []
    newest = [path.read_text() for path in (tmp_path / "disk" / "run" / "snapshots").iterdir()]
    assert any('"bases"' in text for text in newest), "nothing was shared"
    explorer = _explorer(scratch)
    explorer.explore(disk)
    assert explorer.bad == []
    assert explorer.checked > 55


@pytest.mark.slow
def test_a_power_loss_while_chains_are_shortened_is_survived(
    tmp_path: Path, scratch: Path, stage: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deltas that replace several deltas, and pieces written whole again, under retention: no state is bad."""
    monkeypatch.setattr(*bounds("PLAIN", most_bases=2))
    monkeypatch.setattr(*bounds("PLAIN", most_share=0.5))
    disk = _recorded(tmp_path)
    session = _Session(tmp_path / "disk" / "run", disk, stage, monkeypatch)
    assert session.run(range(14))
    assert session.failed == []
    explorer = _explorer(scratch)
    explorer.explore(disk)
    assert explorer.bad == []
    assert explorer.checked > 200


@pytest.mark.slow
def test_a_writer_that_continues_after_a_killed_one_shares_its_data(
    tmp_path: Path, scratch: Path, stage: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at several points; the next one refers to what it finds, and then the power fails."""
    explorer = _explorer(scratch)
    for die_before in (21, 33, 47, 60, 72, 85):
        disk = _recorded(tmp_path, die_before)
        session = _Session(tmp_path / "disk" / "run", disk, stage, monkeypatch)
        assert not session.run(range(8))
        died = len(disk.operations)
        disk.dead, disk.die_before = False, None
        assert session.run(range(10, 13))
        assert session.failed == []
        explorer.explore(disk, died)
        shutil.rmtree(tmp_path / "disk")
    assert explorer.bad == []


def test_a_manifest_before_its_data_is_noticed(
    tmp_path: Path, scratch: Path, stage: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same exploration of a writer that commits before what it refers to is durable finds a bad state."""
    monkeypatch.setattr(RecordingDisk, "sync", lambda self, fd: None)
    disk = _recorded(tmp_path)
    _Session(tmp_path / "disk" / "run", disk, stage, monkeypatch).run(range(3))
    explorer = _explorer(scratch)
    explorer.explore(disk, stop_at_bad=True)
    assert explorer.bad


def test_a_collector_that_forgets_references_is_noticed(
    tmp_path: Path, scratch: Path, stage: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the files of others were not counted as needed, retention would leave snapshots without their data."""

    def own_only(self: Repository, snapshot: str) -> tuple[str, ...]:
        return tuple(file.name for file in self.read(snapshot).files if snapshot in file.name)

    real = Repository.remember

    def remember(self: Repository, manifest: Manifest) -> None:
        real(self, manifest)
        self._files[manifest.info.id] = tuple(f.name for f in manifest.files if manifest.info.id in f.name)

    monkeypatch.setattr(Repository, "files_of", own_only)
    monkeypatch.setattr(Repository, "remember", remember)
    disk = _recorded(tmp_path)
    session = _Session(tmp_path / "disk" / "run", disk, stage, monkeypatch)
    session.run(range(5))
    monkeypatch.undo()
    explorer = _explorer(scratch)
    explorer.explore(disk, stop_at_bad=True)
    assert explorer.bad


def test_a_base_that_goes_while_a_snapshot_is_written_is_never_committed_on(
    tmp_path: Path, stage: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else removes the older snapshot after the draft: the snapshot fails, and the next one is whole."""
    disk = _recorded(tmp_path)
    session = _Session(tmp_path / "disk" / "run", disk, stage, monkeypatch)
    assert session.run(range(2))
    real = Encoded.stands
    asked: list[bool] = []

    def stands(self: Encoded) -> bool:
        asked.append(True)
        if len(asked) == 2:  # the last look, before the commit
            repository = self.repository
            repository.forget([parsed.id for parsed in repository.ids()])
            repository.storage.delete(*(item.name for item in repository.storage.list("data/")))
        return real(self)

    monkeypatch.setattr(Encoded, "stands", stands)
    assert session.run(range(4, 6))
    assert len(session.failed) == 1 and "removed while it was written" in session.failed[0]
    root = tmp_path / "disk" / "run"
    (left,) = (root / "snapshots").iterdir()
    assert left.name == Path(manifest_name(left.stem)).name
    monkeypatch.setattr(Encoded, "stands", real)
    check(root, [], check_whole=_whole)


def _compacting(tmp_path: Path, stage: Table, monkeypatch: pytest.MonkeyPatch) -> RecordingDisk:
    """A writer's life, and then each snapshot is compacted."""
    disk = _recorded(tmp_path)
    root = tmp_path / "disk" / "run"
    assert _Session(root, disk, stage, monkeypatch).run(range(4))
    storage = LocalStorage(root, disk=disk)
    repository = Repository(storage)
    with acquire(storage) as lease:
        for info in repository.list():
            if not is_compact(repository.read(info.id)):
                disk.mark(f"forgetting {info.id}")
                new = compact(repository, lease, info.id)
                disk.mark(f"saved {new}")
    return disk


def _one_of_each(root: Path, labels: list[str]) -> None:
    """A snapshot has one form or both, all of them whole; retention leaves one form, and no data without a snapshot."""
    storage = LocalStorage(root, disk=QuietDisk())
    saved = [parsed.seq for label in labels if (parsed := parse_id(label.removeprefix("saved ")))]
    for _ in range(2):
        repository = Repository(storage)
        listing = repository.scan()
        assert not listing.damaged
        _whole(repository, {info.id for info in listing.snapshots})
        found = [info.seq for info in listing.snapshots]
        assert set(sorted(saved)[-KEEP:]) <= set(found), "a snapshot is in neither form"
        with acquire(storage) as lease:
            repository.create_if_absent()
            prune(repository, lease, KeepAll())
    assert len(found) == len(set(found)), "both forms are left"
    needed = {name for info in listing.snapshots for name in repository.files_of(info.id)}
    assert {item.name for item in storage.list("data/")} == needed


def test_a_power_loss_while_snapshots_are_compacted_is_survived(
    tmp_path: Path, scratch: Path, stage: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was, or both, or the new one: never neither, and never wrong."""
    disk = _compacting(tmp_path, stage, monkeypatch)
    explorer = Explorer(scratch, _one_of_each)
    explorer.explore(disk)
    assert explorer.bad == []
    assert explorer.checked > 38


def test_forgetting_before_the_new_form_is_written_is_noticed(
    tmp_path: Path, scratch: Path, stage: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compaction in the wrong order has a bad state, which the exploration finds."""
    real = drop_components.write_slim

    def write(repository: Repository, made: drop_components.Slim) -> None:
        repository.forget([made.whole.info.id])
        real(repository, made)

    monkeypatch.setattr("ckpt_engine.copy.make_room.write_slim", write)
    disk = _compacting(tmp_path, stage, monkeypatch)
    explorer = Explorer(scratch, _one_of_each)
    explorer.explore(disk, stop_at_bad=True)
    assert explorer.bad
