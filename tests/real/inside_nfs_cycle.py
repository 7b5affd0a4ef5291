"""A run on two NFS mounts; run by `test_nfs.py` where `$NFS_A` and `$NFS_B` are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from tests.real.cycle import Life, assert_survives

MOUNTS = [Path(os.environ[name]) for name in ("NFS_A", "NFS_B")]
STEPS = 60


def _config(folder: Path, mount: Path) -> Path:
    path = folder / f"{mount.name}.yaml"
    path.write_text(f"tiers: {mount / 'run1'}\nkeep: {{last: 3}}\non_error: raise\n")
    return path


@pytest.mark.timeout(1200)
def test_a_killed_run_goes_on_through_the_other_mount(tmp_path: Path) -> None:
    """Saved through one, killed, resumed through the other, where its writer is killed too, and back again."""
    here, there = (_config(tmp_path, mount) for mount in MOUNTS)
    began = assert_survives(tmp_path, [Life(here, 3), Life(there, 3, with_writer=True), Life(here)], STEPS)
    print(f"began at steps {began} of {STEPS}")
    assert began[0] == 0 < began[1] < began[2]
    listed = [[info.id for info in Repository(LocalStorage(mount / "run1")).list()] for mount in MOUNTS]
    assert listed[0] == listed[1]
    assert len(listed[0]) == 3
