"""A real disk that hangs: its file system is frozen, and a process that writes to it cannot even be killed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_engine.copy.job import TierConfig
from ckpt_engine.observe.events import Notice, SnapshotCommitted, TierDegraded
from ckpt_engine.writer import launch
from ckpt_engine.writer.client import Message
from tests.writer.conftest import Writers
from tests.writer.staged import WAIT_SECONDS, Stage, check_all, outcome
from tests.writer.test_process import gone

pytestmark = pytest.mark.slow


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of its own; thawed and unmounted at the end."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4") or not shutil.which("fsfreeze"):
        pytest.skip("needs root, mkfs.ext4 and fsfreeze")
    image, folder = tmp_path / "disk.img", tmp_path / "disk"
    folder.mkdir()
    _run("truncate", "-s", "96M", str(image))
    _run("mkfs.ext4", "-q", "-F", str(image))
    try:
        _run("mount", "-o", "loop", str(image), str(folder))
    except subprocess.CalledProcessError as err:
        pytest.skip(f"cannot mount: {err.stderr.decode().strip()}")
    yield folder
    subprocess.run(["fsfreeze", "-u", str(folder)], check=False, capture_output=True, timeout=60)
    _run("umount", str(folder))


def test_a_frozen_first_tier_stops_no_training(
    tmp_path: Path, disk: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots become durable on the next tier, closing comes to an end, and after the thaw the disk has only whole
    snapshots and the process is gone.
    """
    monkeypatch.setattr(launch, "ENTRY", Path(__file__).with_name("impatient_writer.py"))
    near, far = disk / "run", tmp_path / "far"
    writers = Writers(launch.ProcessWriter, near)
    client = writers.start(tiers=(TierConfig(str(far), keep={"last": 9}),), keep={"last": 9}, drain_seconds=2.0)
    stage.share(client)
    second = Stage(slot=1)
    second.jobs = 100
    heard: list[Message] = []
    first = stage.job(1)
    client.submit(first)
    assert outcome(client, first.job, heard).ok
    while not any(info.step == 1 for info in check_all(far)):
        client.wait(0.1)
    _run("fsfreeze", "-f", str(disk))
    jobs = [stage.job(2)]
    client.submit(jobs[0])
    done = outcome(client, jobs[0].job, heard)
    assert done.ok and done.slot_held
    second.attach(client)
    for step in (3, 4):
        job = second.job(step)
        client.submit(job)
        assert outcome(client, job.job, heard).ok
    assert [m.tier for m in heard if isinstance(m, SnapshotCommitted)] == [str(near), *[f"file://{far}"] * 3]
    assert [m.code for m in heard if isinstance(m, TierDegraded)] == ["CKPT306"]
    assert client.close(WAIT_SECONDS)
    heard += client.poll()
    assert any(isinstance(m, Notice) and f"file://{near}" in m.message for m in heard)
    assert [info.step for info in check_all(far)] == [1, 2, 3, 4]
    _run("fsfreeze", "-u", str(disk))
    assert gone(client.pid)
    second.close()
    client._listener.join(WAIT_SECONDS)
    assert [info.step for info in check_all(near)] in ([1], [1, 2])
