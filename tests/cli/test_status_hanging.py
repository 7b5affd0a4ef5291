"""`ckpt status` where a tier hangs: it says so, and does not hang itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.store.storage.base import ObjectInfo
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer.run_records import HANGS, WORKING, TierStatus, WriterStatus, write_status
from tests.support import hanging as support

Ckpt = Callable[..., Any]


@pytest.fixture
def config(tmp_path: Path, run_folder: Any, arrays: Any) -> Path:
    """A run on two tiers."""
    run_folder.add(10, arrays)
    path = tmp_path / "ckpt.yaml"
    path.write_text(f"tiers: [{run_folder.path}, {tmp_path / 'far'}]\n")
    return path


def test_a_tier_that_hangs_is_shown_as_such(ckpt: Ckpt, config: Path, run_folder: Any, tmp_path: Path) -> None:
    """Its state, since when, and why."""
    far = TierStatus(f"file://{tmp_path / 'far'}", HANGS, code="CKPT306", message="made no progress", since=1.0)
    write_status(
        LocalStorage(run_folder.path),
        WriterStatus(
            1,
            "a",
            1.0,
            False,
            (
                TierStatus(f"file://{run_folder.path}", WORKING),
                far,
            ),
        ),
    )
    done = ckpt("status", config)
    assert done.code == 0
    assert "hangs" in done.out
    assert "[CKPT306] made no progress" in done.out


@pytest.fixture
def hanging(run_folder: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Listings and reads of the nearest tier hang."""
    real_list, real_get = LocalStorage.list, LocalStorage.get
    with support.hanging(monkeypatch) as hangs:

        def listed(self: LocalStorage, prefix: str) -> Iterator[ObjectInfo]:
            if self.root == str(run_folder.path):
                hangs.here()
            return real_list(self, prefix)

        def get(self: LocalStorage, *rest: Any) -> bytes:
            if self.root == str(run_folder.path):
                hangs.here()
            return real_get(self, *rest)

        monkeypatch.setattr(LocalStorage, "list", listed)
        monkeypatch.setattr(LocalStorage, "get", get)
        yield


def test_a_nearest_tier_that_hangs_does_not_hold_it_up(
    ckpt: Ckpt, config: Path, run_folder: Any, tmp_path: Path, hanging: None
) -> None:
    """The others are shown; the nearest one is not asked a second time for what its writer said."""
    (tmp_path / "far").mkdir()
    write_status(
        LocalStorage(run_folder.path),
        WriterStatus(1, "a", 1.0, False, (TierStatus(f"file://{run_folder.path}", WORKING),)),
    )
    done = ckpt("status", config, "--json")
    near, far = done.json["tiers"]
    assert near["error"] is not None and far["error"] is None
    assert done.json["writer"] is None
