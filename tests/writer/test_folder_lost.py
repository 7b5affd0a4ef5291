"""The only tier's folder is removed, renamed or replaced while a run trains: later snapshots are at its path again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.errors import SnapshotFailedError
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer import primary_tier

WAIT_SECONDS = 60.0


def _state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), float(step))}


def _save(ckpt: Checkpointer, *steps: int) -> None:
    for step in steps:
        ckpt.save(_state(step), step=step).wait(WAIT_SECONDS)


def _removed(root: Path) -> None:
    shutil.rmtree(root)


def _renamed(root: Path) -> None:
    root.rename(root.with_name("moved"))


def _parent_renamed(root: Path) -> None:
    root.parent.rename(root.parent.with_name("moved"))


def _emptied(root: Path) -> None:
    shutil.rmtree(root)
    root.mkdir()


def _snapshots_removed(root: Path) -> None:
    shutil.rmtree(root / "snapshots")
    shutil.rmtree(root / "data")


def _replaced(root: Path) -> None:
    shutil.rmtree(root)
    shutil.copytree(root.with_name("older"), root)


def _swapped(root: Path) -> None:
    root.rename(root.with_name("moved"))
    shutil.copytree(root.with_name("older"), root, copy_function=shutil.copy)


def _lease_removed(root: Path) -> None:
    (root / "lease.json").unlink()


CHANGES = (
    _removed,
    _renamed,
    _parent_renamed,
    _emptied,
    _snapshots_removed,
    _replaced,
    _swapped,
    _lease_removed,
)


@pytest.mark.parametrize("change", CHANGES)
def test_later_snapshots_are_at_the_configured_path(
    change: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a lease, so that no other writer comes in between; the newest is what the next process resumes from."""
    root = tmp_path / "parent" / "run"
    with Checkpointer(root, writer="thread") as ckpt:
        _save(ckpt, 1)
    shutil.copytree(root, root.with_name("older"))
    with Checkpointer(root, writer="thread", keep={"last": 3}) as ckpt:
        ckpt.load()
        _save(ckpt, 2, 3)
        change(root)
        _save(ckpt, 4, 5)
        with pytest.raises(Exception, match="is being written"):
            acquire(LocalStorage(root))
    assert Checkpointer(root).snapshots()[-1].step == 5
    found = Checkpointer(root).load()
    assert found is not None and torch.equal(found["w"], _state(5)["w"])
    said = [record for record in caplog.records if "while it was written" in record.message]
    assert len(said) == (change is not _snapshots_removed)


@pytest.mark.cells(4)
@pytest.mark.parametrize("change", [one for one in CHANGES if one is not _lease_removed])
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_a_last_snapshot_that_is_removed_before_the_end_is_lost(
    change: Callable[[Path], None], writer: Literal["thread", "process"], tmp_path: Path
) -> None:
    """It was durable, and is not any more: no later snapshot brings that to light, so the end looks."""
    root = tmp_path / "parent" / "run"
    with Checkpointer(root, writer="thread") as ckpt:
        _save(ckpt, 1)
    shutil.copytree(root, root.with_name("older"))
    keep = {"last": 9}  # else the writer removes step 1 while the folder is being changed
    with pytest.raises(SnapshotFailedError, match="3 is lost"), Checkpointer(root, writer=writer, keep=keep) as ckpt:
        ckpt.load()
        _save(ckpt, 2, 3)
        change(root)


def test_the_folder_of_another_run_is_left_alone(tmp_path: Path) -> None:
    """It has come to the same path: nothing of it is changed, and each snapshot says so."""
    with Checkpointer(tmp_path / "other", writer="thread") as other:
        _save(other, 7)
    ckpt = Checkpointer(tmp_path / "run", writer="thread", on_error="warn")
    _save(ckpt, 1)
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(tmp_path / "other", tmp_path / "run")
    for step in (2, 3):
        with pytest.raises(SnapshotFailedError, match="holds another run"):
            _save(ckpt, step)
    ckpt.close()
    assert [info.step for info in Checkpointer(tmp_path / "run").snapshots()] == [7]


def test_a_folder_whose_disk_is_gone_is_not_made_on_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unmounted disk: snapshots would fill the one that its mount point is on. Mounted again it is used again."""
    root = tmp_path / "disk" / "run"
    ckpt = Checkpointer(root, writer="thread", on_error="warn")
    _save(ckpt, 1)
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    monkeypatch.setattr(primary_tier, "device_of", lambda _: -1)
    with pytest.raises(SnapshotFailedError, match="and the folder would be made on another one"):
        _save(ckpt, 2)
    assert not root.exists()
    (tmp_path / "unmounted").rename(tmp_path / "disk")
    _save(ckpt, 3)
    ckpt.close()
    assert [info.step for info in Checkpointer(root).snapshots()] == [1, 3]
