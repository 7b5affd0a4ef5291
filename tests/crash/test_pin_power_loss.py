"""A snapshot that is pinned while retention removes it: wherever retention is stopped, the pin holds."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from ckpt_engine.copy.make_room import prune
from ckpt_engine.store import names, pins
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import KeepLast
from ckpt_engine.store.storage.local import LocalStorage
from tests.crash.explorer import Explorer
from tests.crash.life import QuietDisk, Run, _check_whole
from tests.crash.powerloss import Killed, RecordingDisk


class _PinnedMeanwhile(Repository):
    """Somebody pins a snapshot at the last moment, each time one is about to be removed."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.storage)
        self._run = run

    def forget(self, ids: Iterable[str]) -> None:
        gone = sorted(ids)
        alive = {parsed.id for parsed in self.ids()}
        for snapshot in [one for one in gone if one in alive][:1]:
            self._run.pin(snapshot)
        super().forget(gone)


def _lived(base: Path, die_before: int | None = None, *, tidy: bool = False) -> RecordingDisk:
    base.mkdir()
    disk = RecordingDisk(base)
    disk.die_before = die_before
    run = Run(LocalStorage(base / "run", disk=disk), disk.mark, disk)
    try:
        with acquire(run.storage) as lease:
            run.repository.create_if_absent()
            saved = [run.save(step) for step in (10, 20)]
            saved.append(run.save(30, also=(names.data_name(saved[0]), 10)))
            prune(_PinnedMeanwhile(run), lease, KeepLast(1), tidy=tidy)
    except Killed:
        assert die_before is not None
    return disk


def _check(root: Path, labels: list[str]) -> None:
    """After the next retention every acknowledged pin has its snapshot, whole; a listed snapshot always is."""
    storage = LocalStorage(root, disk=QuietDisk())
    repository = Repository(storage)
    pinned = {label.removeprefix("pinned ") for label in labels if label.startswith("pinned ")}
    _check_whole(repository, {info.id for info in repository.list()})
    assert pinned <= pins.pinned_ids(storage), "a pin is lost"
    with acquire(storage) as lease:
        repository.create_if_absent()
        prune(repository, lease, KeepLast(1))
        assert prune(repository, lease, KeepLast(1)).collected.removed == ()
    left = Repository(storage)
    kept = {info.id for info in left.list()}
    assert pinned <= kept, f"pinned and lost: {pinned - kept}"
    _check_whole(left, kept)


@pytest.mark.parametrize("tidy", [True, False])
def test_a_pin_made_during_retention_survives_a_power_loss(tmp_path: Path, scratch: Path, tidy: bool) -> None:
    """The power may go at any point of the retention."""
    explorer = Explorer(scratch, _check)
    explorer.explore(_lived(tmp_path / "disk", tidy=tidy))
    assert explorer.bad == []
    assert explorer.checked > 35


def _killed(tmp_path: Path, scratch: Path) -> list[str]:
    """Killed at each point, retention again, and a power loss at each point of that."""
    explorer = Explorer(scratch, _check)
    total = len(_lived(tmp_path / "whole").operations)
    shutil.rmtree(tmp_path / "whole")
    for die_before in range(1, total):
        disk = _lived(tmp_path / "disk", die_before)
        died = len(disk.operations)
        disk.dead, disk.die_before = False, None
        run = Run(LocalStorage(tmp_path / "disk/run", disk=disk), disk.mark, disk)
        with acquire(run.storage) as lease:
            run.repository.create_if_absent()
            prune(run.repository, lease, KeepLast(1))
        explorer.explore(disk, died)
        shutil.rmtree(tmp_path / "disk")
    return explorer.bad


@pytest.mark.slow
def test_a_pin_made_during_retention_survives_a_kill_and_a_power_loss(tmp_path: Path, scratch: Path) -> None:
    """The pin survives whatever the next process is doing when the power goes."""
    assert _killed(tmp_path, scratch) == []


def test_the_check_notices_a_pin_that_cannot_bring_its_snapshot_back(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, retention that is stopped at the wrong moment costs a pinned snapshot."""
    disk = _lived(tmp_path / "disk")
    monkeypatch.setattr(pins, "orphans", lambda repository: [])
    explorer = Explorer(scratch, _check)
    explorer.explore(disk, stop_at_bad=True)
    assert explorer.bad
    assert "pinned and lost" in explorer.bad[0]
