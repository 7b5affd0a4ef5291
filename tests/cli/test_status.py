"""`ckpt status`: the tiers of a run and their state."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.store import names
from ckpt_engine.store.sealed_json import seal
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer.run_records import AWAY, WORKING, TierStatus, WriterStatus, read_status, write_status

Ckpt = Callable[..., Any]


@pytest.fixture
def config(run_folder: Any, arrays: Any, tmp_path: Path, ckpt: Ckpt) -> Path:
    """A run on two tiers, of which the further one is a snapshot behind and said to be away."""
    run_folder.add(10, arrays)
    assert ckpt("cp", run_folder.path, tmp_path / "far").code == 0
    newest = run_folder.add(20, arrays)
    near, far = f"file://{run_folder.path}", f"file://{tmp_path / 'far'}"
    tiers = (
        TierStatus(near, WORKING, newest=newest),
        TierStatus(far, AWAY, None, None, 1, 1_500_000, 0, "CKPT300", "the cable is out", 0.0, "zstd: 9 MB → 6 MB"),
    )
    write_status(LocalStorage(run_folder.path), WriterStatus(4711, "node7", time.time(), False, tiers))
    path = tmp_path / "ckpt.yaml"
    path.write_text(f"tiers: [{run_folder.path}, {tmp_path / 'far'}]\n")
    return path


def test_each_tier_is_asked_and_its_trouble_is_shown(ckpt: Ckpt, config: Path, tmp_path: Path) -> None:
    """What is there now, and what the writer said last."""
    done = ckpt("status", config)
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].split() == ["tier", "state", "snapshots", "newest", "taken", "waiting"]
    assert lines[1].split()[1:3] == ["working", "2"]
    assert lines[2].split()[1:3] == ["away", "1"]
    assert "s0000000010" in lines[2] and "1 snapshot, 1.5 MB" in lines[2]
    assert lines[4:6] == [f"tier 2: {tmp_path / 'far'} (zstd: 9 MB → 6 MB)", lines[5]]
    assert lines[5].startswith("tier 2 failed") and "[CKPT300] the cable is out" in lines[5]
    assert "no process writes it now" in done.out and "the writer was active" in done.out
    rows = ckpt("status", config, "--json").json
    assert [tier["snapshots"] for tier in rows["tiers"]] == [2, 1]
    assert rows["tiers"][1]["writer"]["message"] == "the cable is out"
    assert rows["writer"]["pid"] == 4711


def test_a_folder_tells_what_its_writer_said_of_the_others(ckpt: Ckpt, config: Path, run_folder: Any) -> None:
    """Without the configuration only the folder is asked; the other tiers come from the status file of the writer."""
    rows = ckpt("status", run_folder.path, "--json").json["tiers"]
    assert [(row["snapshots"], row["writer"]["state"]) for row in rows] == [(2, WORKING), (None, AWAY)]


def test_a_tier_that_does_not_answer_is_said(ckpt: Ckpt, config: Path, tmp_path: Path) -> None:
    """The others are shown all the same."""
    for path in sorted((tmp_path / "far").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "far").rmdir()
    (tmp_path / "far").write_text("a file")
    done = ckpt("status", config)
    assert done.code == 0
    assert "tier 2 does not answer: [CKPT305]" in done.out


def test_a_run_on_one_tier_has_a_status_too(ckpt: Ckpt, run_folder: Any, arrays: Any) -> None:
    """No writer of several tiers ever said anything there."""
    run_folder.add(10, arrays)
    done = ckpt("status", run_folder.path)
    assert done.code == 0
    assert len(done.out.splitlines()) == 4


def test_no_run_is_an_error(ckpt: Ckpt, tmp_path: Path) -> None:
    """Exit code 2 and one line."""
    done = ckpt("status", tmp_path / "nothing")
    assert (done.code, done.out) == (2, "")
    assert "[CKPT303] no run at" in done.err


def test_a_damaged_status_is_reported_and_the_rest_shown(ckpt: Ckpt, config: Path, run_folder: Any) -> None:
    """The file is for people: what is wrong with it stops nothing."""
    (run_folder.path / names.STATUS).write_text("{")
    done = ckpt("status", config)
    assert done.code == 0
    assert "status.json is damaged" in done.out


def test_what_a_newer_writer_says_more_is_passed_over(tmp_path: Path) -> None:
    """`ckpt status` of this version shows what it knows."""
    tier = TierStatus("/far", WORKING, newest="0-1-a")
    write_status(LocalStorage(tmp_path), WriterStatus(1, "host", 1.0, False, (tier,)))
    path = tmp_path / names.STATUS
    row = json.loads(path.read_text())
    row["mood"], row["tiers"][0]["mood"] = "fine", "fine"
    del row["digest"]
    path.write_bytes(seal(row))
    status = read_status(LocalStorage(tmp_path))
    assert status is not None
    assert (status.pid, [tier.newest for tier in status.tiers]) == (1, ["0-1-a"])


@pytest.mark.long
def test_top_shows_the_status_again_until_it_is_interrupted(run_folder: Any, arrays: Any) -> None:
    """A run that is not there yet is waited for; Ctrl-C is no error."""
    run_folder.add(10, arrays)
    root = run_folder.path.parent / "later"
    command = [sys.executable, "-m", "ckpt_engine.cli.main", "top", str(root), "--every", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as shown:
        assert shown.stdout is not None
        lines = iter(shown.stdout.readline, "")
        assert any("no run at" in line for line in lines)
        run_folder.path.rename(root)
        assert any("no process writes it now" in line for line in lines)
        assert any(line.startswith(f"{root} at ") for line in lines)
        shown.send_signal(signal.SIGINT)
        _, err = shown.communicate(timeout=60.0)
    assert (shown.returncode, err) == (0, "")
