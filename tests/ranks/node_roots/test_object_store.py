"""Nodes with roots of their own, and an object store behind them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.store import names
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from tests.ranks.node_roots.committing import Nodes
from tests.ranks.test_checkpointer import check
from tests.servers.fixtures import bucket, moto
from tests.servers.s3 import S3Server

__all__ = ["bucket", "moto"]


@pytest.mark.slow
def test_each_node_sends_its_part_to_an_object_store(tmp_path: Path, moto: S3Server, bucket: str) -> None:
    """Whole there, read by one process; nothing is left of how it came to be. A third snapshot after a restart, too."""
    tier = {"url": f"s3://{bucket}/run", "storage_options": moto.options()}
    for step in (1, 2):
        nodes = Nodes(tmp_path, (0, 0, 1, 1), tiers=[tier])
        nodes.save(step)
        nodes.close()
    far = Repository(open_storage(tier["url"], tier["storage_options"]))
    assert [one.step for one in far.ids()] == [1, 2]
    assert far.read(far.ids()[-1].id) == nodes.whole(2)
    assert not list(far.storage.list(names.PARTS))
    with Checkpointer(tiers=[tier]) as alone:
        check(alone.load(), 2, 0)
