"""examples/dcp_save.py does what its page says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("start", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]])
def test_the_example_runs_alone_and_under_torchrun(start: list[str], tmp_path: Path) -> None:
    """It ends well, and leaves the two snapshots that it keeps."""
    command = [sys.executable, "-W", "ignore", *start, str(ROOT / "examples" / "dcp_save.py"), str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "loaded 4 tensors" in done.stdout
    assert [parsed.step for parsed in Repository(open_storage(tmp_path / "run")).ids()] == [10, 20]
