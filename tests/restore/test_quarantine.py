"""What nothing mends is named durably, stays where it is, and is neither referred to nor counted as a good snapshot."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine import Checkpointer
from ckpt_engine.errors import NoUsableSnapshotError
from ckpt_engine.store import lease, names
from tests.cli.conftest import ckpt  # noqa: F401 - a fixture
from tests.restore.test_resumed_past_damage import newest, repository, rot, state, unlooked
from tests.restore.test_sealed_run import trained
from tests.snapshot.passage import same
from tests.support import interpreters

Ckpt = Callable[..., Any]
WAIT_SECONDS = 60.0


def scrub(root: Path) -> int:
    """In another process."""
    command = [sys.executable, "-m", "ckpt_engine.cli.main", "scrub", str(root)]
    return interpreters.run(command, capture_output=True, timeout=WAIT_SECONDS, check=False).returncode


def save_each(root: Path, steps: int) -> list[str]:
    """Snapshots of several processes at one folder; their ids."""
    for step in range(1, steps + 1):
        with Checkpointer(str(root), keep={"last": 9}, writer="thread") as run:
            run.load()
            assert run.save(state(step), step=step).wait(WAIT_SECONDS)
    return [parsed.id for parsed in repository(root).ids()]


def spoil(root: Path, snapshot: str) -> str:
    """Damage what only this snapshot has; the name of the file."""
    manifest = repository(root).read(snapshot)
    return rot(root, manifest, manifest.entries["w"].pieces[0])


@pytest.mark.cells(2)
@pytest.mark.parametrize(
    ("where", "codec"),
    [*(("near", codec) for codec in ("raw", "zstd", "delta")), *(("far", codec) for codec in ("raw", "delta", "auto"))],
)
def test_what_only_a_scrub_has_found_is_not_referred_to_by_a_run_that_goes_on(
    tmp_path: Path, where: str, codec: str
) -> None:
    """The scrub is another process, the run has its lease, and none of its own reads meets the damage."""
    root = tmp_path / where
    tiers = [{"url": str(tmp_path / "near"), "codec": codec if where == "near" else "raw"}]
    tiers += [{"url": str(root), "codec": codec}] if where == "far" else []
    options = {"tiers": tiers, "keep": {"last": 9}, "wait_at_end": WAIT_SECONDS}
    with Checkpointer(options) as run:
        for step in (1, 2):
            assert run.save(state(step), step=step).wait(WAIT_SECONDS)
        deadline, pause = time.monotonic() + WAIT_SECONDS, threading.Event()
        while len(repository(root).ids()) < 2:
            assert time.monotonic() < deadline
            pause.wait(0.05)
        before = newest(root)
        damaged = rot(root, before, unlooked(before)[0])
        assert scrub(root) != 0
        assert run.save(state(3), step=3).wait(WAIT_SECONDS)
    ids = [parsed.id for parsed in repository(root).ids()]
    assert len(ids) == 3 and all((root / names.quarantine_name(one)).exists() for one in ids[:2])
    if where == "near" or codec == "delta":  # a file that is copied as it is, which auto may choose, is sent again
        assert damaged not in [file.name for file in newest(root).files]
    with Checkpointer(str(root), writer="thread") as run:
        assert same(run.load(), state(3)) and run.loaded is not None and run.loaded.rejected == ()


def test_listings_status_and_resumes_say_it_without_reading_it_again(ckpt: Ckpt, tmp_path: Path) -> None:
    """It is not tried before all others; what stands at the place stays as it is."""
    root = tmp_path / "run"
    ids = save_each(root, 3)
    file = spoil(root, ids[2])
    hurt = (root / file).read_bytes()
    assert "damaged" not in ckpt("ls", root).out
    assert ckpt("verify", root).code == 1 and not list((root / "snapshots").glob("*.damaged.json"))
    assert ckpt("scrub", root, "--dry-run").code == 1 and not list((root / "snapshots").glob("*.damaged.json"))
    assert ckpt("scrub", root).code == 1
    listed = ckpt("ls", root).out
    assert f"{ids[2]}  damaged: [CKPT401] {file} was found damaged, and nothing mends it" in listed
    assert "2 snapshots" in listed and "; 1 damaged" in listed
    status = ckpt("status", root)
    assert f"tier 1: {ids[2]} damaged" in status.out + status.err
    assert ckpt("status", root, "--json").json["tiers"][0]["damaged"] == [ids[2]]
    with Checkpointer(str(root), writer="thread") as run:
        assert same(run.load(), state(2)) and run.loaded is not None
        (rejected,) = run.loaded.rejected
        assert (rejected.id, rejected.reason) == (ids[2], f"{file} was found damaged, and nothing mends it")
    assert (root / file).read_bytes() == hurt
    with Checkpointer(str(root), writer="thread") as run, pytest.raises(NoUsableSnapshotError, match="do not match"):
        run.load(step=3)


def test_a_scrub_that_finds_it_whole_ends_the_quarantine(ckpt: Ckpt, tmp_path: Path) -> None:
    """Somebody has put the file back."""
    root = tmp_path / "run"
    ids = save_each(root, 2)
    shutil.copytree(root, tmp_path / "was")
    file = spoil(root, ids[1])
    assert ckpt("scrub", root).code == 1 and (root / names.quarantine_name(ids[1])).exists()
    shutil.copy(tmp_path / "was" / file, root / file)
    assert ckpt("scrub", root).code == 0 and "damaged" not in ckpt("ls", root).out
    assert not (root / names.quarantine_name(ids[1])).exists()
    with Checkpointer(str(root), writer="thread") as run:
        assert same(run.load(), state(2))


def test_one_that_is_tried_last_is_loaded_where_it_turns_out_to_be_whole(tmp_path: Path) -> None:
    """Nothing but it is there."""
    root = tmp_path / "run"
    (snapshot,) = save_each(root, 1)
    repository(root).damage.note(snapshot, {names.data_name(snapshot)})
    with Checkpointer(str(root), writer="thread") as run:
        assert same(run.load(), state(1)) and run.loaded is not None and run.loaded.rejected == ()


def test_retention_does_not_keep_it_in_place_of_a_whole_one(ckpt: Ckpt, tmp_path: Path) -> None:
    """Nor removes it, by a command and by the run; its data is no garbage."""
    root = tmp_path / "run"
    ids = save_each(root, 3)
    hurt = spoil(root, ids[2])
    assert ckpt("scrub", root).code == 1
    assert ckpt("prune", root, "--keep", "last=1").code == 0
    assert [parsed.id for parsed in repository(root).ids()] == ids[1:] and (root / hurt).exists()
    with Checkpointer(str(root), keep={"last": 2}, writer="thread") as run:
        assert same(run.load(), state(2))
        for step in (4, 5):
            assert run.save(state(step), step=step).wait(WAIT_SECONDS)
    left = [parsed.step for parsed in repository(root).ids()]
    assert left == [3, 4, 5] and (root / hurt).exists()


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_resume_that_passes_it_over_puts_it_into_quarantine(ckpt: Ckpt, tmp_path: Path, damage: str) -> None:
    """The run's writer does, and keeps one whole snapshot more."""
    root = tmp_path / "run"
    ids = save_each(root, 2)
    file = spoil(root, ids[1])
    if damage == "missing":
        (root / file).unlink()
    with Checkpointer(str(root), keep={"last": 9}, writer="thread") as run:
        assert same(run.load(), state(1))
        assert run.save(state(2), step=2).wait(WAIT_SECONDS)
        deadline, pause = time.monotonic() + WAIT_SECONDS, threading.Event()
        while not (root / names.quarantine_name(ids[1])).exists():
            assert time.monotonic() < deadline
            pause.wait(0.05)
    assert not (root / names.quarantine_name(ids[0])).exists()
    assert f"{ids[1]}  damaged: [CKPT401] {file} was found damaged" in ckpt("ls", root).out


def test_a_run_mends_what_another_tier_has_and_ends_its_quarantine(ckpt: Ckpt, tmp_path: Path) -> None:
    """A scrub that does not know the other tier has found nothing that mends it."""
    near, far = tmp_path / "near", tmp_path / "far"
    options = {"tiers": [str(near), str(far)], "keep": {"last": 9}, "writer": "thread", "wait_at_end": WAIT_SECONDS}
    for step in (1, 2):
        with Checkpointer(options) as run:
            assert run.save(state(step), step=step).wait(WAIT_SECONDS)
    snapshot = newest(near).info.id
    shutil.copytree(near, tmp_path / "was")
    file = spoil(near, snapshot)
    assert ckpt("scrub", near).code == 1 and (near / names.quarantine_name(snapshot)).exists()
    with Checkpointer(options) as run:
        assert same(run.load(), state(2)) and run.loaded is not None and run.loaded.rejected == ()
        assert run.save(state(3), step=3).wait(WAIT_SECONDS)
        deadline, pause = time.monotonic() + WAIT_SECONDS, threading.Event()
        while (near / names.quarantine_name(snapshot)).exists():
            assert time.monotonic() < deadline
            pause.wait(0.05)
    assert (near / file).read_bytes() == (tmp_path / "was" / file).read_bytes()
    assert ckpt("verify", near).code == 0


@pytest.mark.cells(1)
@pytest.mark.parametrize("damage", ["truncated", "missing", "quarantined"])
def test_what_is_in_memory_mends_the_disk(tmp_path: Path, damage: str) -> None:
    """The trainer is killed; the writer that it leaves has the snapshot that its disk has lost since."""
    root = tmp_path / "run"
    config = {"tiers": [{"url": "memory", "every_n_steps": 1}, {"url": str(root)}], "keep": {"last": 9}}
    assert trained(config, 4, kill_after=3)[-1] == "durable 3"
    deadline, pause, stored = time.monotonic() + WAIT_SECONDS, threading.Event(), repository(root)
    while lease.read_holder(stored.storage) is not None:  # it makes durable what it has, and gives its lease back
        assert time.monotonic() < deadline
        pause.wait(0.05)
    there = newest(root)
    (file,) = (root / one.name for one in there.files if there.info.id in one.name)
    was = file.read_bytes()
    if damage == "quarantined":
        rot(root, there, there.entries["model/secret_name"].pieces[0])
        assert scrub(root) == 1
    elif damage == "missing":
        file.unlink()
    else:
        os.truncate(file, len(was) // 2)
    step = there.info.step
    assert trained(config, step) == [f"from {step}"]
    assert file.read_bytes() == was and not list((root / "snapshots").glob("*.damaged.json"))
