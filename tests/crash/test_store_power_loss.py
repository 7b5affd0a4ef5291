"""Power loss at every point of a run's life leaves a sound store; every broken rule is noticed."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_engine.copy.make_room import collect, plan_prune
from ckpt_engine.errors import StorageMissingError
from ckpt_engine.store import names
from ckpt_engine.store.lease_holder import Lease
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention import plan
from ckpt_engine.store.retention_rules import KeepLast
from ckpt_engine.store.storage.disk import translating, write_blocks
from ckpt_engine.store.storage.local import LocalStorage
from tests.crash.explorer import Explorer
from tests.crash.life import FOREIGN, FailingDisk, Run, live, recover
from tests.crash.powerloss import Change, Killed, RecordingDisk


def _recorded(tmp_path: Path, make_run: type[Run], disk: RecordingDisk, storage: type[LocalStorage]) -> Run:
    return make_run(storage(tmp_path / "disk" / "run", disk=disk), disk.mark, disk)


def _add_foreign(root: Path, disk: RecordingDisk) -> None:
    for name, content in FOREIGN.items():
        (root / name).write_bytes(content)
        disk.adopt(root / name, content)


def _lived(
    tmp_path: Path,
    make_disk: type[RecordingDisk] = FailingDisk,
    make_run: type[Run] = Run,
    storage: type[LocalStorage] = LocalStorage,
    die_before: int | None = None,
) -> RecordingDisk:
    base = tmp_path / "disk"
    base.mkdir()
    disk = make_disk(base)
    disk.die_before = die_before
    run = _recorded(tmp_path, make_run, disk, storage)
    try:
        live(run, lambda: _add_foreign(base / "run", disk))
    except Killed:
        assert die_before is not None
    return disk


def test_power_loss_at_any_point_leaves_a_sound_store(tmp_path: Path, scratch: Path) -> None:
    """After a power loss at any point, with anything unsynced lost, landed or torn, there is no bad state."""
    explorer = Explorer(scratch)
    explorer.explore(_lived(tmp_path))
    assert explorer.bad == []
    assert explorer.checked > 75


def _killed_then_power_loss(tmp_path: Path, explorer: Explorer, die_before: int, *, stop_at_bad: bool = False) -> None:
    disk = _lived(tmp_path, die_before=die_before)
    died = len(disk.operations)
    disk.dead, disk.die_before = False, None
    disk.full = False
    recover(Run(LocalStorage(tmp_path / "disk" / "run", disk=disk), disk.mark, disk))
    explorer.explore(disk, died, stop_at_bad=stop_at_bad)
    shutil.rmtree(tmp_path / "disk")


def _all_points(tmp_path: Path) -> int:
    count = len(_lived(tmp_path).operations)
    shutil.rmtree(tmp_path / "disk")
    return count


@pytest.mark.slow
def test_a_kill_and_then_a_power_loss_leave_a_sound_store(tmp_path: Path, scratch: Path) -> None:
    """A process killed anywhere leaves names that are visible but not synced: its successor must not build on them."""
    explorer = Explorer(scratch)
    for die_before in range(1, _all_points(tmp_path), 13):
        _killed_then_power_loss(tmp_path, explorer, die_before)
    assert explorer.bad == []


@pytest.mark.slow
def test_a_kill_at_every_point_and_then_a_power_loss_leave_a_sound_store(tmp_path: Path, scratch: Path) -> None:
    """The process is killed at every point of its work, and the store stays sound."""
    explorer = Explorer(scratch)
    for die_before in range(1, _all_points(tmp_path)):
        _killed_then_power_loss(tmp_path, explorer, die_before)
    assert explorer.bad == []


class _NoFileSync(FailingDisk):
    def sync(self, fd: int) -> None:
        pass


class _NoFolderSync(FailingDisk):
    def sync_folder(self, path: str) -> None:
        pass


class _NoSyncOfNewFolders(FailingDisk):
    def sync_folder(self, path: str) -> None:
        if Path(path).name not in ("disk", "run"):
            super().sync_folder(path)


class _NoSyncAfterForget(FailingDisk):
    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.forgot = False

    def create(self, path: str) -> int:
        self.forgot = False
        return super().create(path)

    def remove(self, path: str) -> None:
        super().remove(path)
        self.forgot = self.forgot or names.parse_id(Path(path).stem) is not None

    def sync_folder(self, path: str) -> None:
        if not self.forgot:
            super().sync_folder(path)


class _InPlace(LocalStorage):
    def put(self, name: str, blocks, *, exclusive: bool = True) -> None:  # type: ignore[no-untyped-def]
        path = self.path(name)
        self.make_folder(path.rpartition("/")[0])
        if not exclusive:
            self.delete(name)
        with translating("write", path):
            fd = self._disk.create(path)
            try:
                write_blocks(self._disk, fd, blocks)
                self._disk.sync(fd)
            except OSError:
                self._disk.remove(path)
                raise
            finally:
                os.close(fd)
            self._disk.sync_folder(path.rpartition("/")[0])


class _ManifestFirst(Run):
    def write(self, manifest: Manifest, data: memoryview) -> None:
        self.repository.commit(manifest)
        self.storage.put(manifest.files[0].name, [data])


class _DataFirst(Run):
    def prune(self, count: int, lease: Lease) -> None:
        removed = plan_prune(self.repository, KeepLast(count)).remove
        kept = {file.name for info in self.repository.list() if info.id not in removed
                for file in self.repository.read(info.id).files}  # fmt: skip
        garbage = [item.name for item in self.storage.list(names.DATA) if names.data_owner(item.name)]
        self.storage.delete(*(name for name in garbage if name not in kept))
        self.repository.forget(removed)


class _NoPins(Run):
    def pin(self, snapshot: str, note: str = "") -> None:
        with suppress(StorageMissingError):  # it was removed although it is pinned
            super().pin(snapshot, note)

    def prune(self, count: int, lease: Lease) -> None:
        infos = self.repository.list()
        self.repository.forget(plan(infos, KeepLast(count)).remove)
        collect(self.repository, lease)


class _LoosePins(Run):
    def pin(self, snapshot: str, note: str = "") -> None:
        self.mark(f"pinned {snapshot}")
        super().pin(snapshot, note)


class _NoReachability(Run):
    def prune(self, count: int, lease: Lease) -> None:
        removed = plan_prune(self.repository, KeepLast(count)).remove
        self.repository.forget(removed)
        self.storage.delete(*(names.data_name(snapshot) for snapshot in removed))


@pytest.mark.cells(2)
@pytest.mark.parametrize(
    "broken",
    [
        {"make_disk": _NoFileSync},
        pytest.param({"make_disk": _NoFolderSync}, marks=pytest.mark.slow),
        pytest.param({"make_disk": _NoSyncOfNewFolders}, marks=pytest.mark.slow),
        {"make_disk": _NoSyncAfterForget},
        {"storage": _InPlace},
        pytest.param({"make_run": _ManifestFirst}, marks=pytest.mark.slow),
        {"make_run": _DataFirst},
        pytest.param({"make_run": _NoReachability}, marks=pytest.mark.slow),
        {"make_run": _NoPins},
        pytest.param({"make_run": _LoosePins}, marks=pytest.mark.slow),
    ],
    ids=lambda broken: next(iter(broken.values())).__name__.strip("_"),
)
def test_the_check_notices_every_broken_rule(tmp_path: Path, scratch: Path, broken: dict[str, type]) -> None:
    """The same exploration finds a bad state as soon as one rule of the store is broken."""
    explorer = Explorer(scratch)
    explorer.explore(_lived(tmp_path, **broken), stop_at_bad=True)
    assert explorer.bad


def test_an_unsynced_forget_of_a_killed_process_is_made_good(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the sync that a collection makes for its predecessor, a kill and a power loss lose data; with it none."""
    whole = _lived(tmp_path).operations
    shutil.rmtree(tmp_path / "disk")
    forgets = [i for i, op in enumerate(whole) if isinstance(op, Change) and _removes_a_manifest(op)]
    found = Repository.unreferenced
    without, sound = Explorer(scratch), Explorer(scratch)
    for forgot in forgets:
        with monkeypatch.context() as patch:
            patch.setattr(Repository, "unreferenced", lambda *of: replace(found(*of), owners=frozenset()))
            _killed_then_power_loss(tmp_path, without, forgot + 1, stop_at_bad=True)
        if without.bad:
            break
    assert without.bad
    _killed_then_power_loss(tmp_path, sound, forgot + 1)
    assert sound.bad == []


def _removes_a_manifest(change: Change) -> bool:
    return any(inode is None and names.manifest_id(path.partition("/")[2]) for path, inode in change.names.items())


def test_the_scenario_writes_around_the_page_cache_where_it_can(tmp_path: Path) -> None:
    """The recorded life has several writes per data file, so that torn files are among the states."""
    disk = _lived(tmp_path)
    sizes = {len(op.data) for op in disk.operations if hasattr(op, "data")}
    assert 8192 in sizes
    assert os.path.exists(tmp_path / "disk" / "run" / names.RECORD)  # noqa: PTH110
