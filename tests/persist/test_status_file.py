"""The status file is replaced whatever else goes on in its folder, and read by older and newer versions."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from ckpt_engine.store.container import seal
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer.run_records import WORKING, StatusFile, TierStatus, read_status


def test_a_sweep_of_the_folder_does_not_take_the_status_that_is_being_written(tmp_path: Path) -> None:
    """The writer removes what interrupted puts left while another of its threads says how things are."""
    storage, over = LocalStorage(tmp_path), threading.Event()

    def sweep() -> None:
        while not over.is_set():
            storage.sweep()

    thread = threading.Thread(target=sweep)
    thread.start()
    try:
        file = StatusFile(str(tmp_path), 1, "host")
        for _ in range(1000):
            file.write([])
    finally:
        over.set()
        thread.join(60)
    assert read_status(storage) is not None
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_what_a_killed_writer_leaves_of_a_status_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a status is no more than any other interrupted write, and is gone after the next collection."""

    class KilledError(BaseException):
        pass

    def die(*_: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die)
        with pytest.raises(KilledError):
            StatusFile(str(tmp_path), 1, "host").write([])
    assert len(list(tmp_path.iterdir())) == 1
    assert LocalStorage(tmp_path).sweep() > 0
    assert list(tmp_path.iterdir()) == []


def test_what_a_newer_writer_says_more_is_passed_over(tmp_path: Path) -> None:
    """`ckpt status` of this version shows what it knows."""
    StatusFile(str(tmp_path), 1, "host").write([TierStatus("/far", WORKING, newest="0-1-a")])
    path = tmp_path / "status.json"
    row = json.loads(path.read_text())
    row["mood"], row["tiers"][0]["mood"] = "fine", "fine"
    del row["digest"]
    path.write_bytes(seal(row))
    status = read_status(LocalStorage(tmp_path))
    assert status is not None
    assert (status.pid, [tier.newest for tier in status.tiers]) == (1, ["0-1-a"])
