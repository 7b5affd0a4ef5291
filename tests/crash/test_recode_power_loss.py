"""Power loss at every point of an encoded copy: each snapshot on the further tier is whole and bit for bit the same."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_engine.copy.codec_selector import EncodeStats
from ckpt_engine.copy.make_room import collect, prune
from ckpt_engine.copy.transfer import RunText, adopt_run, copy_snapshot
from ckpt_engine.store import container, names
from ckpt_engine.store.container import digest
from ckpt_engine.store.decode import decoder_of
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.manifest import DataFile, Entry, Manifest, Piece, SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import policy_from
from ckpt_engine.store.storage.local import LocalStorage
from tests.crash.explorer import Explorer
from tests.crash.life import QuietDisk
from tests.crash.powerloss import Killed, RecordingDisk
from tests.support.bounds import bounds
from tests.support.copies import copy_encoded

_Copy = Callable[[Repository, Repository, str], object]
POLICY = policy_from({"last": 2})
SIZES = {"frozen": 9000, "model": 5000}


def _bytes(step: int, name: str) -> bytes:
    """Four letters by chance, which are half as many bytes in full and fewer as a difference."""
    letters = bytearray(random.Random(name).choices(b"acgt", k=SIZES[name]))
    letters[::500] = bytes([0 if name == "frozen" else step]) * len(letters[::500])
    return bytes(letters)


def _near(root: Path) -> Repository:
    """A place with four snapshots, which nothing happens to."""
    repository = Repository(LocalStorage(root, disk=QuietDisk()))
    repository.create_if_absent()
    for step in range(1, 5):
        header = container.build_header([(name, "U8", (size,), size) for name, size in SIZES.items()])
        offset, entries, body = len(header), {}, header
        for name, size in SIZES.items():
            data = _bytes(step, name)
            entries[name] = Entry("uint8", (size,), (Piece(0, offset, size, digest(data), size),), "U8")
            offset += size
            body += data
        snapshot = f"{step:08d}-s{step:010d}-{step:08x}"
        info = SnapshotInfo(snapshot, step, step, None, "manual", 1.0, sum(SIZES.values()))
        files = (DataFile(names.data_name(snapshot), len(body)),)
        repository.storage.put(files[0].name, [memoryview(body)])
        repository.commit(Manifest(info, repository.run_id, {"size": 1}, {}, files, entries, {}))
    return repository


def _encoded(near: Repository, far: Repository, snapshot: str) -> object:
    return copy_encoded(near, far, snapshot, lambda _: "zstd", EncodeStats())


def _differences(near: Repository, far: Repository, snapshot: str) -> object:
    return copy_encoded(near, far, snapshot, lambda _: "delta", EncodeStats())


def _live(near: Repository, storage: LocalStorage, mark: Callable[[str], None], upto: int, copy: _Copy) -> None:
    with acquire(storage) as lease:
        far = adopt_run(RunText.of(near), storage)
        there = {parsed.id for parsed in far.ids()}
        for parsed in near.ids()[:upto]:
            if parsed.id not in there and all(parsed.id > one for one in there):
                copy(near, far, parsed.id)
                mark(f"saved {parsed.step}")
                prune(far, lease, POLICY)
        collect(far, lease)


class _World:
    def __init__(self, near: Repository) -> None:
        self.near = near
        self.copy: _Copy = _encoded

    def live(self, storage: LocalStorage, mark: Callable[[str], None], upto: int) -> None:
        _live(self.near, storage, mark, upto, self.copy)

    def check(self, root: Path, labels: list[str]) -> None:
        storage = LocalStorage(root, disk=QuietDisk())
        saved = {int(label.removeprefix("saved ")) for label in labels}
        self._check_all(Repository(storage), set(sorted(saved)[-1:]))
        self.live(storage, lambda _: None, 4)
        repository = Repository(storage)
        self._check_all(repository, {4})
        needed = {file.name for info in repository.list() for file in repository.read(info.id).files}
        assert {item.name for item in storage.list(names.DATA)} == needed

    def _check_all(self, repository: Repository, saved: set[int]) -> None:
        listing = repository.scan()
        assert not listing.damaged
        assert saved <= {info.step for info in listing.snapshots}, "acknowledged and lost"
        for info in listing.snapshots:
            manifest = repository.read(info.id)
            decoder = decoder_of(repository.storage.get_into, manifest)
            for name, entry in manifest.entries.items():
                found = bytearray(SIZES[name])
                for start, piece in entry.placed():
                    decoder.read(name, start, piece, memoryview(found)[start : start + piece.raw_nbytes])
                assert found == _bytes(info.step, name), f"wrong data of {name} in {info.id}"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _World:
    """The nearest tier. Every piece is a part of its own."""
    monkeypatch.setattr(*bounds("ENCODED", part_bytes=1))
    return _World(_near(tmp_path / "near"))


def _lived(world: _World, base: Path, upto: int, die_before: int | None = None) -> RecordingDisk:
    base.mkdir()
    disk = RecordingDisk(base)
    disk.die_before = die_before
    try:
        world.live(LocalStorage(base / "run", disk=disk), disk.mark, upto)
    except Killed:
        assert die_before is not None
    return disk


def test_power_loss_at_any_point_of_encoded_copies_leaves_a_sound_store(
    world: _World, tmp_path: Path, scratch: Path
) -> None:
    """Copies that refer to older ones while these are forgotten included; the next one finishes what was begun."""
    explorer = Explorer(scratch, world.check)
    explorer.explore(_lived(world, tmp_path / "disk", 3))
    assert explorer.bad == []
    assert explorer.checked > 30


def test_power_loss_at_any_point_of_differences_leaves_a_sound_store(
    world: _World, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for differences, while retention takes what they are made against; the third one is in full again."""
    monkeypatch.setattr(*bounds("ENCODED", most_bases=1))
    world.copy = _differences
    explorer = Explorer(scratch, world.check)
    disk = _lived(world, tmp_path / "disk", 3)
    explorer.explore(disk)
    assert explorer.bad == []
    assert explorer.checked > 30
    far = Repository(LocalStorage(tmp_path / "disk/run", disk=QuietDisk()))
    chains = [bool(far.read(parsed.id).entries["model"].pieces[0].base) for parsed in far.ids()]
    assert chains == [True, False]


def _killed(world: _World, tmp_path: Path, scratch: Path, step: int) -> list[str]:
    """Killed at every `step`-th point. The steps below meet the one between the rename of a data file and its sync."""
    explorer = Explorer(scratch, world.check)
    total = len(_lived(world, tmp_path / "whole", 3).operations)
    shutil.rmtree(tmp_path / "whole")
    for die_before in range(1, total, step):
        disk = _lived(world, tmp_path / "disk", 3, die_before)
        died = len(disk.operations)
        disk.dead, disk.die_before = False, None
        world.live(LocalStorage(tmp_path / "disk/run", disk=disk), disk.mark, 3)
        explorer.explore(disk, died)
        shutil.rmtree(tmp_path / "disk")
    return explorer.bad


def test_a_kill_during_an_encoded_copy_and_then_a_power_loss_leave_a_sound_store(
    world: _World, tmp_path: Path, scratch: Path
) -> None:
    """The next writer goes on where it was, whatever happens to it meanwhile."""
    assert _killed(world, tmp_path, scratch, 53) == []


def test_a_kill_during_a_plain_copy_and_then_a_power_loss_leave_a_sound_store(
    world: _World, tmp_path: Path, scratch: Path
) -> None:
    """What is found there may not survive until it is synced."""
    world.copy = copy_snapshot
    assert _killed(world, tmp_path, scratch, 33) == []


@pytest.mark.slow
def test_a_kill_at_every_point_of_a_copy_of_differences_leaves_a_sound_store(
    world: _World, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed at every point of its work, and the store stays sound."""
    monkeypatch.setattr(*bounds("ENCODED", most_bases=1))
    world.copy = _differences
    assert _killed(world, tmp_path, scratch, 1) == []


@pytest.mark.slow
def test_a_kill_at_every_point_of_an_encoded_copy_leaves_a_sound_store(
    world: _World, tmp_path: Path, scratch: Path
) -> None:
    """The process is killed at every point of its work, and the store stays sound."""
    assert _killed(world, tmp_path, scratch, 1) == []


def test_the_check_notices_a_manifest_that_comes_first(
    world: _World, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest that is written before its last part leaves states with half a snapshot."""
    put = LocalStorage.put
    kept: list[tuple[str, bytes]] = []

    def late(self: LocalStorage, name: str, blocks: list[memoryview], *, exclusive: bool = True) -> None:
        if self.root == str(tmp_path / "disk/run") and name.startswith(names.DATA):
            kept.append((name, b"".join(blocks)))
            return
        put(self, name, blocks, exclusive=exclusive)
        if name.startswith(names.MANIFESTS):
            for one, data in kept:
                put(self, one, [memoryview(data)])
            kept.clear()

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "put", late)
        patch.setattr(Repository, "still_has", lambda *_: True)
        disk = _lived(world, tmp_path / "disk", 2)
    explorer = Explorer(scratch, world.check)
    explorer.explore(disk, stop_at_bad=True)
    assert explorer.bad
