"""Differences in a real S3 server: made from the nearest tier, restored from the server alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine import Checkpointer
from ckpt_engine.observe.events import SnapshotReplicated
from ckpt_engine.restore import load as restore
from ckpt_engine.store import names
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from tests.copy.evolving import codecs_of
from tests.copy.training import Training
from tests.restore.test_tiers_s3 import WAIT_SECONDS, Heard, far
from tests.servers.fixtures import bucket, moto, proxy, wire
from tests.snapshot.passage import same

__all__ = ["bucket", "far", "moto", "proxy", "wire"]


def copies(tiers: list[Any], training: Training, steps: int) -> list[SnapshotReplicated]:
    """Train, save and wait for each copy."""
    heard, found = Heard(), []
    with Checkpointer(tiers=tiers, keep={"last": 2}) as ckpt:
        ckpt.engine.events = heard
        ckpt.load()
        for _ in range(steps):
            training.step()
            ckpt.save(training.state(), step=training.steps).wait(WAIT_SECONDS)
            event = heard.until(ckpt, SnapshotReplicated, step=training.steps)
            assert isinstance(event, SnapshotReplicated)
            found.append(event)
    return found


@pytest.mark.slow
def test_differences_on_s3_are_enough_to_resume(far: dict[str, Any], tmp_path: Path) -> None:
    """Nothing else is left of the run, and of the older snapshots only what the newer ones need."""
    tiers, training = [str(tmp_path / "near"), {**far, "codec": "delta", "keep": {"last": 2}}], Training(width=1024)
    sent = [event.sent_bytes for event in copies(tiers, training, 3)]
    assert max(sent[1:]) < 0.4 * sent[0]
    shutil.rmtree(tmp_path / "near")
    remote = Repository(open_storage(far["url"], far["storage_options"]))
    assert len(remote.ids()) == 2
    manifest = remote.read(remote.ids()[-1].id)
    assert "adam" in codecs_of(manifest)
    assert len({names.data_owner(file.name) for file in manifest.files}) == 3
    found = restore.load([remote])
    assert found is not None
    assert same(found.state, training.state())
    # The nearest tier has no base now, and the further one is not read for it.
    [again] = copies(tiers, training, 1)
    assert again.sent_bytes > 0.9 * sent[0]
    found = restore.load([remote])
    assert found is not None
    assert same(found.state, training.state())
