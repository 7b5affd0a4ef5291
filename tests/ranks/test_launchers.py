"""The DDP example by every way to start it: killed in its middle and started again it ends with the same weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = str(REPOSITORY / "examples" / "ddp.py")
PATIENCE_SECONDS = 240.0
WAYS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", SCRIPT],
    "spawn": [sys.executable, SCRIPT, "--strategy", "ddp_spawn"],
    "fork": [sys.executable, SCRIPT, "--strategy", "ddp_fork"],
    "script": [sys.executable, SCRIPT],
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def start(way: str, folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "log").open("ab") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        command = [*WAYS[way], "--out", str(folder / "run")]
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment)


def finish(way: str, folder: Path) -> str:
    """Run to the end; what the script says of its weights."""
    with start(way, folder) as run:
        status = run.wait(PATIENCE_SECONDS)
    log = (folder / "log").read_text()
    assert status == 0, log[-4000:]
    return log.rstrip().splitlines()[-1]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run that is not killed."""
    found = finish("fork", tmp_path_factory.mktemp("reference"))
    assert found.startswith("weights ")
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_was_killed_goes_on_exactly(way: str, tmp_path: Path, weights: str) -> None:
    """All processes and writers die at once, as by a power cut."""
    run = start(way, tmp_path)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(list(tmp_path.glob("run/snapshots/*.json"))) < 1:
            assert time.monotonic() < deadline
            assert run.poll() is None, (tmp_path / "log").read_text()[-4000:]
            time.sleep(0.005)
    finally:
        for one in [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)
        status = run.wait(PATIENCE_SECONDS)
    assert status == -signal.SIGKILL, "the run was over before it was killed"
    assert finish(way, tmp_path) == weights
    report = json.loads((tmp_path / "run" / "resume-report.json").read_text())
    assert report["step"] > 0
    assert not report["not_restored"]
    assert [one.name for one in (tmp_path / "run").glob("resume-report*")] == ["resume-report.json"]
    assert (tmp_path / "log").read_text().count("resumed at") == 1, "more than one rank says so"
