"""The option `protect` on the command line: young snapshots stay, with their reason, and old ones go."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_engine.store import protection
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage

Ckpt = Callable[..., Any]
DAY = 86_400


@pytest.fixture
def ids(run_folder: Any) -> list[str]:
    """Four snapshots, taken 20, 15, 10 and 0 days ago."""
    made = {"a/x": np.zeros(1000, "float32")}
    ages = {10: 20, 20: 15, 30: 10, 40: 0}
    return [run_folder.add(step, made, created=time.time() - age * DAY) for step, age in ages.items()]


def test_pruning_by_a_yaml_file_keeps_young_snapshots(
    ckpt: Ckpt, run_folder: Any, ids: list[str], tmp_path: Path
) -> None:
    """Younger than the days that the tier says, or the run if that says none; the reason has the date."""
    place = tmp_path / "ckpt.yaml"
    place.write_text(f"tiers: [{run_folder.path}]\nkeep: 1\nprotect: {{days: 14}}\n")
    shown = ckpt("prune", place, "--dry-run", "--json").json["tiers"][0]
    end = time.strftime("%Y-%m-%d", time.gmtime(time.time() + 4 * DAY))
    assert set(shown["remove"]) == set(ids[:2])
    assert shown["keep"][ids[2]].startswith(f"protected until {end}")
    place.write_text(f"tiers: [{{url: {run_folder.path}, protect: {{days: 18}}}}]\nkeep: 1\nprotect: {{days: 14}}\n")
    assert ckpt("prune", place).code == 0
    assert [info.id for info in run_folder.repository.list()] == ids[1:]


def test_the_run_remembers_its_days(ckpt: Ckpt, run_folder: Any, ids: list[str]) -> None:
    """A prune of the folder without the file of options keeps them too."""
    protection.begin(run_folder.repository, 14, pytest.fail)
    shown = ckpt("prune", run_folder.path, "--keep", "last=1", "--json").json["tiers"][0]
    assert set(shown["remove"]) == set(ids[:2])
    record = Repository(LocalStorage(run_folder.path)).record()
    assert record is not None and record.protect_days == 14
    protection.begin(run_folder.repository, 0, pytest.fail)
    assert set(ckpt("prune", run_folder.path, "--keep", "last=1", "--json").json["tiers"][0]["remove"]) == {ids[2]}


def test_a_copy_is_protected_by_its_own_place_only(ckpt: Ckpt, run_folder: Any, ids: list[str], tmp_path: Path) -> None:
    """The days are those of a place, not of the run."""
    protection.begin(run_folder.repository, 14, pytest.fail)
    assert ckpt("cp", run_folder.path, tmp_path / "copy").code == 0
    record = Repository(LocalStorage(tmp_path / "copy")).record()
    assert record is not None and record.protect_days == 0


def test_a_folder_that_refuses_deletes_is_reported_with_its_snapshots(
    ckpt: Ckpt, run_folder: Any, ids: list[str], tmp_path: Path
) -> None:
    """`ckpt prune` ends with 2 and removes nothing; the dry run and `ckpt status` say what would go."""
    place = tmp_path / "ckpt.yaml"
    place.write_text(f"tiers: [{run_folder.path}]\nkeep: 2\n")
    below = [run_folder.path / "data", run_folder.path / "snapshots"]
    try:
        subprocess.run(["chattr", "+a", *below], check=True, timeout=60, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user cannot make a folder append-only")
    try:
        done = ckpt("prune", place)
        assert done.code == 2
        assert "CKPT302" in done.err and ids[0] in done.err.replace("\n", "")
        assert "2 snapshots would be removed" in ckpt("prune", place, "--dry-run").out
        assert "has 2 snapshots that retention would remove" in ckpt("status", place).out
    finally:
        subprocess.run(["chattr", "-a", *below], check=True, timeout=60)
    assert [info.id for info in run_folder.repository.list()] == ids
    assert ckpt("prune", place).code == 0
    assert "would remove" not in ckpt("status", place).out
