"""On a full disk the newest state survives: older snapshots give way to it, whatever the disk is full of."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.errors import SnapshotFailedError
from ckpt_engine.store import pins
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.disk import Disk
from ckpt_engine.store.storage.local import LocalStorage

WORDS = 50_000
SIZE = 4 * WORDS
OTHERS = 160_000
"""What is small in a run, the room that is left for it, and the temporary file."""


def _files(root: Path) -> list[int]:
    return [path.stat().st_size for path in root.rglob("*") if path.is_file()]


def _short_of_bytes(fitting: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has room for so many snapshots, and says so."""
    room = fitting * SIZE + OTHERS
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda _: max(0, room - sum(_files(root))))
    _refuse("write", errno.ENOSPC, lambda nbytes: sum(_files(root)) + nbytes > room, monkeypatch)


def _over_quota(fitting: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user may store so much, and the disk has more."""
    room = fitting * SIZE + OTHERS
    _refuse("write", errno.EDQUOT, lambda nbytes: sum(_files(root)) + nbytes > room, monkeypatch)


def _short_of_inodes(fitting: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are free, and no file can be made."""

    def is_over(_: int) -> bool:
        return len(_files(root / "data")) + len(_files(root / "snapshots")) >= 2 * fitting

    _refuse("create", errno.ENOSPC, is_over, monkeypatch)


def _refuse(name: str, code: int, is_over: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(Disk, name)

    def call(self: Disk, *args: Any) -> Any:
        if is_over(len(args[1]) if name == "write" else 0):
            raise OSError(code, os.strerror(code))
        return real(self, *args)

    monkeypatch.setattr(Disk, name, call)


KINDS = (_short_of_bytes, _over_quota, _short_of_inodes)
Full = Callable[[int, Path, pytest.MonkeyPatch], None]


def _save(ckpt: Checkpointer, *steps: int, loss: float = 1.0) -> None:
    for step in steps:
        state = {"w": torch.full((WORDS,), float(step))}
        ckpt.save(state, step=step, metrics={"loss": loss}).wait(60)


def _steps(root: Path) -> list[int]:
    return [info.step for info in Checkpointer(root).snapshots()]


@pytest.mark.parametrize("fitting", [2, 3])
@pytest.mark.parametrize("full", KINDS)
def test_each_snapshot_is_durable_and_as_many_stay_as_fit(
    full: Full, fitting: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The oldest goes first; that it does is said once."""
    full(fitting, tmp_path, monkeypatch)
    with Checkpointer(tmp_path, writer="thread", keep={"last": 5}) as ckpt:
        _save(ckpt, *range(1, 8))
    assert 1 <= len(_steps(tmp_path)) <= fitting and _steps(tmp_path)[-1] == 7
    found = Checkpointer(tmp_path).load()
    assert found is not None and found["w"][0] == 7
    assert sum("give way" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("full", KINDS)
def test_a_resumed_run_finds_a_full_disk(full: Full, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows its snapshots from the disk only."""
    with Checkpointer(tmp_path, writer="thread", keep={"last": 5}) as ckpt:
        _save(ckpt, 1, 2, 3)
    full(3, tmp_path, monkeypatch)
    with Checkpointer(tmp_path, writer="thread", keep={"last": 5}) as ckpt:
        ckpt.load()
        _save(ckpt, 4)
    assert _steps(tmp_path)[-2:] == [3, 4]


@pytest.mark.parametrize("full", KINDS)
def test_the_best_one_goes_last_and_a_pinned_one_never(
    full: Full, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pin is the user's word. The best one stays while others can go."""
    keep: Any = {"last": 5, "best": {"monitor": "loss"}}
    with Checkpointer(tmp_path, writer="thread", keep=keep) as ckpt:
        _save(ckpt, 1, 2)
        _save(ckpt, 3, loss=0.1)
        pins.pin(Repository(LocalStorage(tmp_path)), ckpt.snapshots()[0].id)
        full(4, tmp_path, monkeypatch)
        _save(ckpt, 4, 5, 6)
    steps = _steps(tmp_path)
    assert 1 in steps and 3 in steps and steps[-1] == 6 and 2 not in steps


@pytest.mark.parametrize("full", KINDS)
def test_one_durable_snapshot_always_stays(full: Full, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only one fits the newer one is refused, the end says what is lost, and nothing goes in vain."""
    full(1, tmp_path, monkeypatch)
    with pytest.raises(SnapshotFailedError, match="step 2 is lost"), Checkpointer(tmp_path, writer="thread") as ckpt:
        _save(ckpt, 1)
        ckpt.save({"w": torch.full((WORDS,), 2.0)}, step=2)
    assert _steps(tmp_path) == [1]


def test_nothing_goes_for_what_can_never_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older snapshots stay where removing all of them makes too little room."""
    _short_of_bytes(4, tmp_path, monkeypatch)
    with Checkpointer(tmp_path, writer="thread", keep={"last": 5}, on_error="warn") as ckpt:
        _save(ckpt, 1, 2, 3)
        with pytest.raises(SnapshotFailedError, match="No space left"):
            ckpt.save({"w": torch.zeros(9 * WORDS)}, step=4).wait(60)
    assert _steps(tmp_path) == [1, 2, 3]
