"""The writer makes room before it writes, and the page about retention is true."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckpt_engine.config import load_config
from ckpt_engine.copy.job import WriterConfig
from ckpt_engine.observe.events import Notice, SnapshotFailed, SnapshotsForgotten
from ckpt_engine.store.retention_preflight import preflight
from ckpt_engine.store.retention_rules import policy_from
from ckpt_engine.store.storage.base import ObjectInfo
from ckpt_engine.store.storage.disk import Disk
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer.launch import ThreadWriter, completed
from tests.writer.staged import WAIT_SECONDS, Stage, check_all, outcome

PAGE = (Path(__file__).parents[2] / "docs/retention.md").read_text()
SIZE = 1 << 20


def _written(root: Path, keep: dict[str, Any], jobs: int) -> tuple[list[Any], list[Any]]:
    """The outcomes of `jobs` snapshots, and everything that was said."""
    stage = Stage(SIZE)
    heard: list[Any] = []
    outcomes: list[Any] = []
    client = ThreadWriter.start(completed(WriterConfig(url=str(root), keep=keep, drain_seconds=WAIT_SECONDS)))
    try:
        stage.share(client)
        for step in range(1, jobs + 1):
            job = stage.job(step)
            client.submit(job)
            outcomes.append(outcome(client, job.job, heard))
    finally:
        assert client.close(WAIT_SECONDS)
        heard += client.poll()
        stage.close()
    return outcomes, heard


def _most_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def test_a_writer_keeps_its_quota_by_forgetting_first(tmp_path: Path) -> None:
    """More snapshots than fit: each is written, and the oldest go before, not after."""
    outcomes, heard = _written(tmp_path / "run", {"last": 9, "quota": 3 * SIZE + 300_000}, 6)
    assert all(done.snapshot_id for done in outcomes)
    assert [info.step for info in check_all(tmp_path / "run")] == [4, 5, 6]
    assert _most_bytes(tmp_path / "run") <= 3 * SIZE + 300_000
    assert sum(len(event.snapshots) for event in heard if isinstance(event, SnapshotsForgotten)) == 3


def test_a_writer_refuses_what_cannot_fit_and_says_it_early(tmp_path: Path) -> None:
    """With a quota for one and a half snapshots the first is kept, with a notice, and the second is refused."""
    outcomes, heard = _written(tmp_path / "run", {"last": 2, "quota": SIZE + SIZE // 2}, 2)
    assert [done.snapshot_id is not None for done in outcomes] == [True, False]
    (failed,) = [event for event in heard if isinstance(event, SnapshotFailed)]
    assert failed.code == "CKPT301"
    assert any("not even two snapshots fit" in event.message for event in heard if isinstance(event, Notice))
    assert [info.step for info in check_all(tmp_path / "run")] == [1]
    assert _most_bytes(tmp_path / "run") <= SIZE + SIZE // 2


def test_a_writer_lists_each_folder_once_per_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data before manifests, and pins once more when manifests are gone; what is left of dead writers, at the start."""
    listed: list[str] = []
    look, sweep = LocalStorage.list, LocalStorage.sweep

    def list_(storage: LocalStorage, prefix: str) -> Iterator[ObjectInfo]:
        listed.append(prefix)
        return look(storage, prefix)

    def sweep_(storage: LocalStorage) -> int:
        listed.append("temporary files")
        return sweep(storage)

    monkeypatch.setattr(LocalStorage, "list", list_)
    monkeypatch.setattr(LocalStorage, "sweep", sweep_)
    _written(tmp_path / "run", {"last": 1}, 4)
    assert listed[-12:] == ["data/", "snapshots/", "pins/", "pins/"] * 3
    assert listed.count("temporary files") == 1


def test_what_a_failed_write_leaves_goes_before_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails, and does not even remove the temporary file."""
    sync, remove, failing = Disk.sync, Disk.remove, ["sync", "remove"]

    def sync_(disk: Disk, fd: int) -> None:
        if failing == ["sync", "remove"]:
            failing.remove("sync")
            raise OSError(errno.EIO, "bad disk")
        sync(disk, fd)

    def remove_(disk: Disk, path: str) -> None:
        if failing == ["remove"]:
            failing.clear()
            raise OSError(errno.EIO, "bad disk")
        remove(disk, path)

    make = Stage.job
    monkeypatch.setattr(Stage, "job", lambda self, step: (step == 2 and begin(), make(self, step))[1])

    def begin() -> None:
        monkeypatch.setattr(Disk, "sync", sync_)
        monkeypatch.setattr(Disk, "remove", remove_)

    outcomes, _ = _written(tmp_path / "run", {"last": 1}, 3)
    assert [done.ok for done in outcomes] == [True, False, True]
    assert failing == []
    assert list(tmp_path.rglob(".tmp-*")) == []


def test_the_yaml_and_the_warning_on_the_page_are_real() -> None:
    """Examples work and say what the program says."""
    example = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert example is not None
    config = load_config(yaml.safe_load(example[1]))
    policy_from(config.keep_rules(config.tiers[0]))
    short = preflight(policy_from({"last": 6}), 35_700_000_000, free_bytes=180 * 10**9)
    assert short is not None and short in PAGE
