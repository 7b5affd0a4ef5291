"""`ckpt pin` and `ckpt unpin`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_engine.store import names, pins
from ckpt_engine.store.lease import acquire

Ckpt = Callable[..., Any]
ARRAY = {"a/x": np.zeros(3)}


def test_a_pin_survives_prune_until_it_is_removed(ckpt: Ckpt, run_folder: Any) -> None:
    """A step, an id or `latest` names the snapshot, also while the run is being written."""
    first, second, third = (run_folder.add(step, ARRAY) for step in (10, 20, 30))
    with acquire(run_folder.repository.storage):
        result = ckpt("pin", run_folder.path, 10, second[:8], "--note", "für das Paper")
    assert (result.code, result.out.splitlines()) == (
        0,
        [f"{first}  pinned: für das Paper", f"{second}  pinned: für das Paper"],
    )
    assert ckpt("prune", run_folder.path, "--keep", "last=1").code == 0
    assert [info.id for info in run_folder.repository.list()] == [first, second, third]
    assert ckpt("unpin", run_folder.path, "10", "latest").out.splitlines() == [
        f"{first}  unpinned",
        f"{third}  was not pinned",
    ]
    assert ckpt("prune", run_folder.path, "--keep", "last=1", "--json").json["tiers"][0]["remove"] == {
        first: "no rule keeps it"
    }


def test_the_pins_are_listed(ckpt: Ckpt, run_folder: Any) -> None:
    """For people and for programs; none is no error."""
    assert ckpt("pin", run_folder.path).out == f"0 pins at {run_folder.path}\n"
    snapshot = run_folder.add(10, ARRAY)
    ckpt("pin", run_folder.path, "latest", "--note", "why")
    lines = ckpt("pin", run_folder.path).out.splitlines()
    assert lines[0].split() == ["snapshot", "pinned", "note"]
    assert (lines[1].split()[0], lines[1].split()[-1]) == (snapshot, "why")
    (found,) = ckpt("pin", run_folder.path, "--json").json["pins"]
    assert (found["id"], found["note"]) == (snapshot, "why")
    assert ckpt("unpin", run_folder.path, snapshot, "--json").json["unpinned"] == {snapshot: True}


def test_what_does_not_exist_is_an_error(ckpt: Ckpt, run_folder: Any) -> None:
    """Exit code 2 and nothing pinned, not even what was named before it."""
    run_folder.add(10, ARRAY)
    result = ckpt("pin", run_folder.path, "10", "77")
    assert result.code == 2
    assert "no snapshot '77'" in result.err
    assert pins.pins(run_folder.repository.storage) == []


def test_a_pin_left_behind_can_be_removed(ckpt: Ckpt, run_folder: Any) -> None:
    """Its snapshot is gone by force; the whole id still finds the pin."""
    gone = run_folder.add(10, ARRAY)
    run_folder.add(20, ARRAY)
    ckpt("pin", run_folder.path, gone)
    run_folder.repository.forget([gone])
    assert ckpt("unpin", run_folder.path, gone).out == f"{gone}  unpinned\n"
    assert ckpt("unpin", run_folder.path, gone).code == 2


def test_a_pin_holds_on_every_tier(ckpt: Ckpt, run_folder: Any, tmp_path: Path) -> None:
    """Pinned and unpinned where the snapshot is; a tier that lacks it, or has nothing yet, is no error."""
    run_folder.add(1, ARRAY)
    other = shutil.copytree(run_folder.path, tmp_path / "other")
    snapshot = run_folder.add(10, ARRAY)
    copy = shutil.copytree(run_folder.path, tmp_path / "copy")
    place = tmp_path / "ckpt.yaml"
    place.write_text(f"tiers: [{run_folder.path}, {copy}, {other}, {tmp_path / 'new'}]\n")
    assert ckpt("pin", place, "latest").code == 0
    name = names.pin_name(snapshot)
    assert (copy / name).exists()
    assert (run_folder.path / name).exists()
    assert not (other / "pins").exists()
    assert not (tmp_path / "new").exists()
    assert ckpt("unpin", place, "latest").code == 0
    assert not (copy / name).exists()
    assert not (run_folder.path / name).exists()
