"""The Lightning and requeue examples, run as a user runs them: processes of their own, stopped and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ROOT = EXAMPLES.parent

pytestmark = pytest.mark.slow


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **more}


def snapshots(folder: Path) -> list[Path]:
    return sorted((folder / "snapshots").glob("*.json"))


def wait_for(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "it ended before"
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


@pytest.fixture
def options(tmp_path: Path) -> Path:
    """The options of the example, with its folders in one of the test."""
    text = (EXAMPLES / "lightning_yaml.yaml").read_text().replace("lightning-out", str(tmp_path / "out"))
    file = tmp_path / "ckpt.yaml"
    file.write_text(text)
    return file


@pytest.fixture
def scontrol(tmp_path: Path) -> Iterator[Path]:
    """A stand-in for Slurm's command, that writes down how it is called."""
    (tmp_path / "bin").mkdir()
    file = tmp_path / "bin/scontrol"
    file.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path / "scontrol.log"}\n')
    file.chmod(0o755)
    yield tmp_path / "scontrol.log"


def test_the_yaml_example_continues_after_a_kill(tmp_path: Path, options: Path) -> None:
    """SIGKILL in the middle, then the same command: nothing is missing, and both tiers have snapshots."""
    command = [sys.executable, str(EXAMPLES / "lightning_yaml.py"), f"--ckpt={options}"]
    folder = tmp_path / "out/yaml/snapshots"
    first = subprocess.Popen([*command, "--epochs=100000"], env=environment(), stdout=-3, stderr=-3)
    try:
        wait_for(lambda: snapshots(folder), first)
    finally:
        first.kill()
        first.wait()
    epoch = json.loads(snapshots(folder)[-1].read_bytes())["manifest"]["info"]["epoch"]
    subprocess.run([*command, f"--epochs={epoch + 2}"], env=environment(), check=True, timeout=170, stdout=-3)
    report = json.loads((folder / "resume-report.json").read_text())
    assert report["not_restored"] == []
    assert json.loads(snapshots(folder)[-1].read_bytes())["manifest"]["info"]["epoch"] == epoch + 2
    assert snapshots(tmp_path / "out/yaml/copy")


def test_the_requeue_script_stops_with_a_snapshot_and_queues_itself_again(
    tmp_path: Path, options: Path, scontrol: Path
) -> None:
    """Told to stop it queues the job; the next start goes on at that very step; a complete one queues nothing."""
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    slurm = environment(PATH=path, SLURM_JOB_ID="42", SLURM_SUBMIT_DIR=str(tmp_path))
    script = [str(EXAMPLES / "requeue.sh"), sys.executable, str(EXAMPLES / "lightning_yaml.py"), f"--ckpt={options}"]
    folder = tmp_path / "out/yaml/snapshots"
    first = subprocess.Popen([*script, "--epochs=100000"], env=slurm, stdout=subprocess.PIPE, stderr=-2)
    try:
        wait_for(lambda: snapshots(folder), first)
        first.send_signal(signal.SIGTERM)
        output, _ = first.communicate(timeout=120)
    finally:
        first.kill()
        first.wait()
    assert first.returncode == 0, output
    assert scontrol.read_text() == "requeue 42\n"
    last = json.loads(snapshots(folder)[-1].read_bytes())["manifest"]["info"]
    assert last["reason"] == "signal"
    done = subprocess.run(
        [*script, f"--epochs={last['epoch'] + 2}"], env=slurm, timeout=170, check=True, capture_output=True, text=True
    )
    assert "training is complete" in done.stdout
    assert json.loads((folder / "resume-report.json").read_text())["step"] == last["step"]
    assert scontrol.read_text() == "requeue 42\n"


def test_the_requeue_script_elsewhere_tells_stopped_from_failed(tmp_path: Path) -> None:
    """143 for whoever starts it again; the training's own code if it failed; no Slurm is needed."""
    script, ready = str(EXAMPLES / "requeue.sh"), tmp_path / "ready"
    code = (
        f"import pathlib, signal, sys; signal.signal(15, lambda *_: sys.exit(1)); pathlib.Path({str(ready)!r}).touch()"
    )
    plain = {key: value for key, value in environment().items() if not key.startswith("SLURM")}
    running = subprocess.Popen([script, sys.executable, "-c", f"{code}; signal.pause()"], env=plain)
    try:
        wait_for(ready.exists, running)
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 143
    finally:
        running.kill()
        running.wait()
    for wanted in (0, 3):
        assert (
            subprocess.run([script, sys.executable, "-c", f"exit({wanted})"], env=plain, timeout=60).returncode
            == wanted
        )
