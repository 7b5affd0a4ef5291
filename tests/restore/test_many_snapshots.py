"""Runs with more snapshots than a listing wants to read one by one: the writer leaves a catalog on every tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.store import catalog, names
from ckpt_engine.store.storage.local import LocalStorage


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalog for every five snapshots."""
    monkeypatch.setattr(catalog, "EVERY", 5)
    monkeypatch.setattr(catalog, "FEW", 2)


def test_the_writer_leaves_a_catalog_on_every_tier(often: None, tmp_path: Path, monkeypatch: Any) -> None:
    """As training goes on; a listing then reads only what is newer, and the newest snapshot comes back as ever."""
    keep = {"last": 100}
    tiers: Any = [str(tmp_path / "near"), {"url": str(tmp_path / "far"), "keep": keep}]
    with Checkpointer(tiers=tiers, keep=keep, writer="thread") as ckpt:
        for step in range(1, 13):
            ckpt.save({"w": torch.full((10,), float(step))}, step=step).wait(30)
    read: list[str] = []
    get = LocalStorage.get

    def counted(self: LocalStorage, name: str, *rest: Any) -> bytes:
        read.append(f"{Path(self.root).name}/{name}")
        return get(self, name, *rest)

    monkeypatch.setattr(LocalStorage, "get", counted)
    with Checkpointer(tiers=tiers) as ckpt:
        assert [info.step for info in ckpt.snapshots()] == list(range(1, 13))
        for place in ("near", "far"):
            assert f"{place}/{names.CATALOG}" in read
            assert len([name for name in read if name.startswith(f"{place}/{names.MANIFESTS}")]) < catalog.EVERY
        state = ckpt.load()
        assert state is not None and torch.equal(state["w"], torch.full((10,), 12.0))
