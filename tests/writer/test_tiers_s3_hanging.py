"""An object store as the first tier that takes connections and never answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_engine.copy.job import SlotFreed, TierConfig, WriterConfig
from ckpt_engine.observe.events import SnapshotCommitted, TierDegraded, TierRecovered
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage, watchdog
from ckpt_engine.writer.client import Message
from ckpt_engine.writer.launch import ThreadWriter, completed
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401
from tests.servers.s3 import S3Server
from tests.servers.wire import Wire
from tests.writer.staged import WAIT_SECONDS, Stage, check_all, outcome, settle

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_descriptors_left() -> None:
    """The check of descriptors is left out: the client library keeps its connections."""


def test_a_store_that_accepts_and_never_answers_stops_no_training(
    moto: S3Server,  # noqa: F811
    bucket: str,  # noqa: F811
    wire: Wire,  # noqa: F811
    tmp_path: Path,
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Snapshots become durable on the next tier; the store is used again once it answers."""
    far = tmp_path / "far"
    options = moto.options(wire.url, retry_seconds=20.0, timeout_seconds=10.0)
    config = WriterConfig(f"s3://{bucket}/run", options, tiers=(TierConfig(str(far)),), drain_seconds=5.0)
    client = ThreadWriter.start(completed(config))
    stage.share(client)
    second = Stage(slot=1)
    second.jobs = 100
    second.attach(client)
    heard: list[Message] = []
    first = stage.job(1)
    client.submit(first)
    assert outcome(client, first.job, heard).ok
    settle(client)
    while not any(info.step == 1 for info in check_all(far)):
        client.wait(0.1)
    monkeypatch.setattr(watchdog, "STALL_SECONDS", 2.0)
    wire.rule("stall", method="PUT", path="data/")
    for one, step in ((stage, 2), (second, 3)):
        job = one.job(step)
        client.submit(job)
        assert outcome(client, job.job, heard).ok
    assert [m.tier for m in heard if isinstance(m, SnapshotCommitted)][1:] == [f"file://{far}"] * 2
    assert [m.code for m in heard if isinstance(m, TierDegraded)] == ["CKPT306"]
    wire.clear()
    while not any(isinstance(m, SlotFreed) for m in heard):
        client.wait(1.0)
        heard += client.poll()
    monkeypatch.setattr(watchdog, "STALL_SECONDS", 30.0)
    job = second.job(4)
    client.submit(job)
    assert outcome(client, job.job, heard).ok
    assert any(isinstance(m, TierRecovered) for m in heard)
    assert client.close(WAIT_SECONDS)
    client._queue.join(WAIT_SECONDS)
    assert not client._queue.is_alive()
    second.close()
    remote = Repository(open_storage(f"s3://{bucket}/run", options))
    assert [info.step for info in remote.list()] == [1, 4]
    assert [info.step for info in check_all(far)] == [1, 2, 3, 4]
