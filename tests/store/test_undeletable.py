"""A place where this user may not delete takes snapshots; retention reports once what it would remove."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.copy.job import TierConfig, WriterConfig
from ckpt_engine.observe.events import (
    Notice,
    SnapshotFailed,
    SnapshotReplicated,
    SnapshotsForgotten,
    TierDegraded,
)
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer.launch import ThreadWriter, completed
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401 - fixtures
from tests.servers.s3 import S3Server
from tests.servers.wire import Wire
from tests.writer.staged import WAIT_SECONDS, Stage, outcome, settle

SIZE = 1 << 18


def _written(stage: Stage, config: WriterConfig, jobs: int) -> Any:
    """The outcomes of `jobs` snapshots, and everything that was reported; each is on further tiers before the next."""
    heard: list[Any] = []
    outcomes: list[Any] = []
    client = ThreadWriter.start(completed(config))
    try:
        stage.share(client)
        for step in range(1, jobs + 1):
            job = stage.job(step)
            client.submit(job)
            outcomes.append(outcome(client, job.job, heard))
            settle(client)
            deadline = time.monotonic() + WAIT_SECONDS
            while config.tiers and step not in [one.step for one in heard if isinstance(one, SnapshotReplicated)]:
                assert time.monotonic() < deadline
                client.wait(1.0)
                heard += client.poll()
    finally:
        assert client.close(WAIT_SECONDS)
        heard += client.poll()
    return outcomes, heard


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage(SIZE)
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A root in which files of snapshots can be made and neither removed nor renamed."""
    root = tmp_path / "run"
    below = [root / "data", root / "snapshots"]
    for one in below:
        one.mkdir(parents=True)
    try:
        subprocess.run(["chattr", "+a", *below], check=True, timeout=60, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user cannot make a folder append-only")
    yield root
    subprocess.run(["chattr", "-a", *below], check=True, timeout=60)


def _refusals(heard: list[Any]) -> list[str]:
    return [one.message for one in heard if isinstance(one, Notice) and "may remove nothing" in one.message]


def _assert_calm(outcomes: list[Any], heard: list[Any]) -> None:
    assert all(done.ok for done in outcomes)
    assert not [one for one in heard if isinstance(one, SnapshotFailed | TierDegraded | SnapshotsForgotten)]
    assert len([one for one in heard if isinstance(one, Notice) and one.level == "WARNING"]) == 1


def test_an_append_only_folder_takes_snapshots(stage: Stage, folder: Path) -> None:
    """Each is durable, and the first refusal is the only one that is reported, with the snapshots that would go."""
    outcomes, heard = _written(stage, WriterConfig(url=str(folder), keep={"last": 1}, drain_seconds=WAIT_SECONDS), 4)
    _assert_calm(outcomes, heard)
    infos = Repository(LocalStorage(folder)).list()
    assert [info.step for info in infos] == [1, 2, 3, 4]
    (text,) = _refusals(heard)
    assert infos[0].id in text and str(folder) in text and "Operation not permitted" in text


def test_a_quota_that_cannot_be_kept_there_refuses_the_next_snapshot(stage: Stage, folder: Path) -> None:
    """The limit holds, and the message says why nothing goes for it."""
    keep = {"last": 1, "quota": 2 * SIZE + 200_000}
    outcomes, _ = _written(stage, WriterConfig(url=str(folder), keep=keep, drain_seconds=WAIT_SECONDS), 3)
    assert [done.ok for done in outcomes] == [True, True, False]
    assert "none can be made" in outcomes[2].error.message and "Operation not permitted" in outcomes[2].error.message


@pytest.mark.long
def test_a_bucket_takes_snapshots_without_the_right_to_delete(
    stage: Stage, moto: S3Server, bucket: str, wire: Wire
) -> None:
    """As the nearest tier: one request for each snapshot finds out whether that has changed, and nothing else."""
    wire.rule("403", "DELETE")
    options = moto.options(wire.url, retry_seconds=5.0)
    config = WriterConfig(f"s3://{bucket}/run", options, {"last": 1}, drain_seconds=WAIT_SECONDS)
    outcomes, heard = _written(stage, config, 5)
    _assert_calm(outcomes, heard)
    assert len(_refusals(heard)) == 1 and "403 AccessDenied" in _refusals(heard)[0]
    assert wire.count("DELETE") == 4
    wire.clear()
    outcomes, heard = _written(stage, config, 1)
    assert [len(one.snapshots) for one in heard if isinstance(one, SnapshotsForgotten)] == [5]


@pytest.mark.long
def test_a_further_tier_without_the_right_to_delete_gets_every_snapshot(
    stage: Stage, moto: S3Server, bucket: str, wire: Wire, tmp_path: Path
) -> None:
    """It is not degraded for that."""
    wire.rule("403", "DELETE")
    options = moto.options(wire.url, retry_seconds=5.0)
    far = TierConfig(f"s3://{bucket}/run", options, {"last": 1}, every_n_steps=1)
    config = WriterConfig(str(tmp_path / "run"), keep={"last": 9}, tiers=(far,), drain_seconds=WAIT_SECONDS)
    outcomes, heard = _written(stage, config, 4)
    _assert_calm(outcomes, heard)
    assert len(_refusals(heard)) == 1
    assert len(Repository(open_storage(far.url, far.storage_options)).list()) == 4
