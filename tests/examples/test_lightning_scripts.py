"""The Lightning example with its options in YAML, run as a user runs it: killed and started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ROOT = EXAMPLES.parent

pytestmark = pytest.mark.slow


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


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
