"""Power loss at every point of slimming: each snapshot is there whole, or without the component, and never neither."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_engine.copy import drop_components
from ckpt_engine.copy.make_room import prune
from ckpt_engine.store import container, names
from ckpt_engine.store.container import digest
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.manifest import DataFile, Entry, Manifest, Piece, SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import policy_from
from ckpt_engine.store.storage.local import LocalStorage
from tests.crash.explorer import Explorer
from tests.crash.life import QuietDisk
from tests.crash.powerloss import Killed, RecordingDisk

POLICY = policy_from({"last": 9, "components": {"optimizer": {"last": 1}}})
SIZES = {"model": 5000, "optimizer": 9000}


def _bytes(step: int, component: str) -> bytes:
    return (f"{component} {step:08d} ".encode() * 1000)[: SIZES[component]]


def _save(repository: Repository, step: int) -> None:
    snapshot = names.snapshot_id(repository.next_seq(), step)
    parsed = names.parse_id(snapshot)
    assert parsed is not None
    header = container.build_header([(name, "U8", (size,), size) for name, size in SIZES.items()])
    offset, entries, body = len(header), {}, header
    for name, size in SIZES.items():
        data = _bytes(step, name)
        entries[name] = Entry("uint8", (size,), (Piece(0, offset, size, digest(data), size),), "U8")
        offset += size
        body += data
    info = SnapshotInfo(snapshot, parsed.seq, step, None, "manual", 1.0, sum(SIZES.values()), components=SIZES)
    files = (DataFile(names.data_name(snapshot), len(body)),)
    tree = {name: {"$": "tensor", "entry": name} for name in SIZES}
    repository.storage.put(files[0].name, [memoryview(body)])
    repository.commit(Manifest(info, repository.run_id, {"size": 1}, {}, files, entries, tree))


def _live(storage: LocalStorage, mark: Callable[[str], None], steps: range) -> None:
    repository = Repository(storage)
    with acquire(storage) as lease:
        repository.create_if_absent()
        for step in steps:
            _save(repository, step)
            mark(f"saved {step}")
            prune(repository, lease, POLICY)


def _check(root: Path, labels: list[str]) -> None:
    storage = LocalStorage(root, disk=QuietDisk())
    saved = {int(label.removeprefix("saved ")) for label in labels}
    _check_all(Repository(storage), saved)
    _live(storage, lambda _: None, range(90, 91))
    repository = Repository(storage)
    _check_all(repository, {*saved, 90})
    steps = [info.step for info in repository.list()]
    assert len(steps) == len(set(steps)), "both forms are left"
    assert [info.step for info in repository.list() if "optimizer" in info.components] == [90]
    needed = {file.name for info in repository.list() for file in repository.read(info.id).files}
    assert {item.name for item in storage.list(names.DATA)} == needed


def _check_all(repository: Repository, saved: set[int]) -> None:
    listing = repository.scan()
    assert not listing.damaged
    assert saved <= {info.step for info in listing.snapshots}, "acknowledged and lost"
    for info in listing.snapshots:
        manifest = repository.read(info.id)
        assert set(manifest.entries) == set(manifest.tree) == set(info.components)
        assert set(SIZES) - set(manifest.entries) == set(manifest.lacks)
        for name, entry in manifest.entries.items():
            (piece,) = entry.pieces
            found = bytearray(piece.nbytes)
            repository.storage.get_into(manifest.files[piece.file].name, piece.offset, memoryview(found))
            assert found == _bytes(info.step, name), f"wrong data of {name} in {info.id}"


def _lived(base: Path, die_before: int | None = None) -> RecordingDisk:
    base.mkdir()
    disk = RecordingDisk(base)
    disk.die_before = die_before
    try:
        _live(LocalStorage(base / "run", disk=disk), disk.mark, range(1, 4))
    except Killed:
        assert die_before is not None
    return disk


def test_power_loss_at_any_point_of_slimming_leaves_a_sound_store(tmp_path: Path, scratch: Path) -> None:
    """No state without one whole form of each saved snapshot; the next retention finishes what was begun."""
    explorer = Explorer(scratch, _check)
    explorer.explore(_lived(tmp_path / "disk"))
    assert explorer.bad == []
    assert explorer.checked > 40


def _killed(tmp_path: Path, scratch: Path, step: int) -> list[str]:
    explorer = Explorer(scratch, _check)
    total = len(_lived(tmp_path / "whole").operations)
    shutil.rmtree(tmp_path / "whole")
    for die_before in range(1, total, step):
        disk = _lived(tmp_path / "disk", die_before)
        died = len(disk.operations)
        disk.dead, disk.die_before = False, None
        _live(LocalStorage(tmp_path / "disk/run", disk=disk), disk.mark, range(80, 81))
        explorer.explore(disk, died)
        shutil.rmtree(tmp_path / "disk")
    return explorer.bad


def test_a_kill_during_slimming_and_then_a_power_loss_leave_a_sound_store(tmp_path: Path, scratch: Path) -> None:
    """The successor finishes or undoes it, whatever happens to it meanwhile."""
    assert _killed(tmp_path, scratch, 29) == []


@pytest.mark.slow
def test_a_kill_at_every_point_of_slimming_leaves_a_sound_store(tmp_path: Path, scratch: Path) -> None:
    """The process is killed at every point of its work, and the store stays sound."""
    assert _killed(tmp_path, scratch, 1) == []


def test_the_check_notices_a_snapshot_that_is_forgotten_too_early(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forgetting the whole snapshot before the slim one is committed leaves states without either."""
    write = drop_components.write_slim

    def forgotten_first(repository: Repository, made: drop_components.Slim) -> None:
        repository.forget([made.whole.info.id])
        write(repository, made)

    monkeypatch.setattr("ckpt_engine.copy.make_room.write_slim", forgotten_first)
    explorer = Explorer(scratch, _check)
    explorer.explore(_lived(tmp_path / "disk"), stop_at_bad=True)
    assert explorer.bad
