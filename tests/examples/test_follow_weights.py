"""The example that evaluates a run while it trains, in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.test_converted import EXAMPLES, environment, run_here
from tests.support import interpreters


@pytest.mark.long
def test_an_evaluator_follows_the_plain_loop_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It begins before the first snapshot, gets the weights of the last one, and ends with the run."""
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / "follow_weights.py")]
    with interpreters.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        run_here(EXAMPLES / "plain_loop.py", ["--epochs=2"], monkeypatch)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    *lines, end = out.splitlines()
    assert end == "the run has ended"
    assert re.fullmatch(r"step 58: 4 tensors are new, 9\d\.\d% right", lines[-1]), lines
