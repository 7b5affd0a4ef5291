"""Power loss at every point of a run that keeps a catalog: a listing never depends on it, and no data goes by it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_engine.copy.make_room import prune
from ckpt_engine.errors import StorageMissingError
from ckpt_engine.store import catalog, names
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import policy_from
from ckpt_engine.store.storage.base import ObjectInfo
from ckpt_engine.store.storage.local import LocalStorage
from tests.crash.explorer import Explorer
from tests.crash.life import QuietDisk
from tests.crash.powerloss import Killed, RecordingDisk
from tests.store.samples import save

POLICY = policy_from({"last": 4})


class Timeless(LocalStorage):
    """All objects have one version: what protects a catalog here are names and sizes alone."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return (ObjectInfo(item.name, item.nbytes, "v") for item in super().list(prefix))


class Bare(Timeless):
    """The same without its catalog."""

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        if name == names.CATALOG:
            raise StorageMissingError("hidden")
        return super().get(name, start, nbytes)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "EVERY", 2)
    monkeypatch.setattr(catalog, "FEW", 0)


def _live(storage: LocalStorage, mark: Callable[[str], None], steps: range) -> None:
    with acquire(storage) as lease:
        repository = Repository(storage)
        repository.create_if_absent()
        for step in steps:
            save(repository, step, shared=[names.data_name(one.id) for one in repository.ids()[-1:]])
            mark(f"saved {step}")
            prune(repository, lease, POLICY)


def _check(root: Path, labels: list[str]) -> None:
    storage = Timeless(root, disk=QuietDisk())
    saved = [int(label.removeprefix("saved ")) for label in labels]
    _check_all(storage, saved)
    _live(storage, lambda _: None, range(90, 91))
    _check_all(storage, [90])


def _check_all(storage: Timeless, saved: list[int]) -> None:
    listing = Repository(storage).scan()
    assert listing == Repository(Bare(storage.root)).scan()
    assert not listing.damaged
    assert not saved or saved[-1] in {info.step for info in listing.snapshots}, "acknowledged and lost"
    there = {item.name: item.nbytes for item in storage.list(names.DATA)}
    for info in listing.snapshots:
        files = Repository(storage).read(info.id).files
        assert all(there.get(file.name) == file.nbytes for file in files), f"{info.id} lost data"


def _lived(base: Path, die_before: int | None = None) -> RecordingDisk:
    base.mkdir()
    disk = RecordingDisk(base)
    disk.die_before = die_before
    try:
        _live(Timeless(base / "run", disk=disk), disk.mark, range(1, 9))
    except Killed:
        assert die_before is not None
    return disk


def test_power_loss_at_any_point_leaves_the_same_listing_with_and_without(tmp_path: Path, scratch: Path) -> None:
    """That is so while the catalog is replaced, and while what it names is forgotten and collected."""
    explorer = Explorer(scratch, _check)
    disk = _lived(tmp_path / "disk")
    assert (tmp_path / "disk/run" / names.CATALOG).exists()
    explorer.explore(disk)
    assert explorer.bad == []
    assert explorer.checked > 70


@pytest.mark.slow
def test_a_kill_at_any_point_and_then_a_power_loss(tmp_path: Path, scratch: Path) -> None:
    """The successor goes on with whatever catalog there is."""
    explorer = Explorer(scratch, _check)
    total = len(_lived(tmp_path / "whole").operations)
    for die_before in range(1, total, 11):
        disk = _lived(tmp_path / "disk", die_before)
        died = len(disk.operations)
        disk.dead, disk.die_before = False, None
        _live(Timeless(tmp_path / "disk/run", disk=disk), disk.mark, range(80, 82))
        explorer.explore(disk, died)
        shutil.rmtree(tmp_path / "disk")
    assert explorer.bad == []


def test_the_check_notices_a_catalog_that_lies(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalog that says something else than the manifests makes states bad: listings do read it."""
    encode = catalog.encode

    def forged(run: str, cards: Iterator[catalog.CatalogEntry]) -> bytes:
        return encode(run, (replace(card, info=replace(card.info, reason="forged")) for card in cards))

    monkeypatch.setattr(catalog, "encode", forged)
    explorer = Explorer(scratch, _check)
    explorer.explore(_lived(tmp_path / "disk"), stop_at_bad=True)
    assert explorer.bad
