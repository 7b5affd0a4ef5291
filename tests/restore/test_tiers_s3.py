"""A run on a local disk and in a real S3 server behind a network that can be cut."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.observe.events import Event, SnapshotReplicated, TierDegraded, TierRecovered
from ckpt_engine.restore import load as restore
from ckpt_engine.store import names
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.local import LocalStorage
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401
from tests.servers.s3 import S3Server
from tests.servers.wire import Wire
from tests.snapshot.passage import same

WAIT_SECONDS = 60


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"model": {name: torch.randn(700_000, generator=generator) for name in "abc"}, "step": step}


class Heard:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def until(self, ckpt: Checkpointer, kind: type, **fields: Any) -> Event:
        """Wait for such an event, taking in what the writer says."""
        client = ckpt.engine._pipeline._writer.client  # type: ignore[union-attr]
        for _ in range(WAIT_SECONDS):
            for event in self.events:
                if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items()):
                    return event
            client.wait(1.0)
            ckpt.engine.poll()
        raise AssertionError(f"no {kind.__name__} {fields}; only {self.events}")


@pytest.fixture
def far(moto: S3Server, bucket: str, wire: Wire) -> dict[str, Any]:  # noqa: F811
    """The further tier, seen through the wire."""
    more = {"retry_seconds": 1.0, "timeout_seconds": 60.0, "part_bytes": 5 << 20}
    return {"url": f"s3://{bucket}/run", "keep": {"last": 2}, "storage_options": moto.options(wire.url, **more)}


def test_a_run_lives_on_s3_when_its_disk_is_gone(far: dict[str, Any], tmp_path: Path) -> None:
    """Copied byte for byte under its own retention, resumed on an empty disk, and mended tensor by tensor."""
    near = tmp_path / "near"
    tiers = [str(near), far]
    heard = Heard()
    with Checkpointer(tiers=tiers, keep={"last": 3}) as ckpt:
        ckpt.engine.events = heard
        for step in (1, 2, 3):
            ckpt.save(state(step), step=step).wait(WAIT_SECONDS)
            heard.until(ckpt, SnapshotReplicated, step=step)
    remote = Repository(open_storage(far["url"], far["storage_options"]))
    local = Repository(LocalStorage(near))
    assert [info.step for info in remote.list()] == [2, 3]
    newest = local.list()[-1].id
    for name in (names.RECORD, names.manifest_name(newest), names.data_name(newest)):
        assert remote.storage.get(name) == local.storage.get(name)

    piece = local.read(newest).entries["model/b"].pieces[0]
    path = near / names.data_name(newest)
    data = bytearray(path.read_bytes())
    data[piece.offset + 5] ^= 1
    path.write_bytes(data)
    found = restore.load([local, remote])
    assert found is not None and same(found.state, state(3))
    assert [(one.entry, one.good) for one in found.repairs] == [("model/b", far["url"])]

    shutil.rmtree(near)
    with Checkpointer(tiers=tiers, keep={"last": 3}) as ckpt:
        assert same(ckpt.load(), state(3))
        assert ckpt.loaded is not None and ckpt.loaded.place == far["url"]
        ckpt.save(state(4), step=4).wait(WAIT_SECONDS)
    assert [(info.seq, info.step) for info in local.list()] == [(4, 4)]
    assert remote.list()[-1].seq == 4


@pytest.mark.slow
def test_encoded_copies_on_s3_are_enough_to_resume(far: dict[str, Any], tmp_path: Path) -> None:
    """Nothing else is left of the run; a damaged one makes way for the one before."""
    heard = Heard()
    with Checkpointer(tiers=[str(tmp_path / "near"), {**far, "codec": "byteplane-zstd"}], keep={"last": 3}) as ckpt:
        ckpt.engine.events = heard
        for step in (1, 2):
            ckpt.save(state(step), step=step).wait(WAIT_SECONDS)
            event = heard.until(ckpt, SnapshotReplicated, step=step)
            assert isinstance(event, SnapshotReplicated)
            assert event.sent_bytes < 0.9 * 3 * 2_800_000
            assert event.encoding.startswith("byteplane-zstd: 8.4 MB → ")
    shutil.rmtree(tmp_path / "near")
    remote = Repository(open_storage(far["url"], far["storage_options"]))
    found = restore.load([remote])
    assert found is not None and same(found.state, state(2))
    manifest = remote.read(remote.list()[-1].id)
    name = manifest.files[-1].name
    data = bytearray(remote.storage.get(name))
    data[-1000] ^= 1
    remote.storage.put(name, [memoryview(data)], exclusive=False)
    found = restore.load([remote])
    assert found is not None and same(found.state, state(1))


@pytest.mark.slow
def test_a_network_that_is_cut_costs_training_nothing(far: dict[str, Any], wire: Wire, tmp_path: Path) -> None:  # noqa: F811
    """Snapshots become durable on the local disk meanwhile; afterwards the newest is on S3."""
    heard = Heard()
    with Checkpointer(tiers=[str(tmp_path / "near"), far], keep={"last": 2}) as ckpt:
        ckpt.engine.events = heard
        ckpt.save(state(1), step=1).wait(WAIT_SECONDS)
        heard.until(ckpt, SnapshotReplicated, step=1)
        wire.cut()
        for step in (2, 3):
            ckpt.save(state(step), step=step).wait(WAIT_SECONDS)
        heard.until(ckpt, TierDegraded)
        wire.mend()
        heard.until(ckpt, TierRecovered)
        heard.until(ckpt, SnapshotReplicated, step=3)
    remote = Repository(open_storage(far["url"], far["storage_options"]))
    assert remote.list()[-1].step == 3
    found = restore.load([remote])
    assert found is not None and same(found.state, state(3))
