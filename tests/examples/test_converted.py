"""The scripts that were given snapshots differ from the originals by a few lines, and end as these do."""

from __future__ import annotations

import difflib
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = {
    "accelerate_cv": ["--cpu", "--epochs=2"],
    "accelerate_nlp": ["--cpu", "--epochs=2"],
    "transformers_trainer": ["--cpu", "--steps=20"],
    "plain_loop": [],
    "fabric_loop": ["--accelerator=cpu"],
}
MOST_LINES = 6
PATIENCE_SECONDS = 300.0


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_difference_is_a_few_lines(name: str) -> None:
    """Lines added and removed, empty ones aside."""
    before = (EXAMPLES / "originals" / f"{name}.py").read_text().splitlines()
    after = (EXAMPLES / f"{name}.py").read_text().splitlines()
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[2:].strip()]
    assert 0 < len(changed) <= MOST_LINES, changed


def run(script: Path, arguments: list[str], folder: Path, *, kill_after_lines: int | None = None) -> list[str]:
    """Run a script in `folder`; what it printed. Optionally kill it once it has printed so many lines."""
    command = [sys.executable, "-W", "ignore", str(script), *arguments]
    process = subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        if kill_after_lines is not None:
            assert process.stdout is not None
            for _ in range(kill_after_lines):
                process.stdout.readline()
            process.kill()
        out, errors = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert kill_after_lines is not None or process.returncode == 0, errors
    return out.splitlines()


def environment() -> dict[str, str]:
    """Of a process that runs an example."""
    root = str(EXAMPLES.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


def run_here(script: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script in this process, as `run` does: nothing is imported again."""
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_num_threads(threads)


def test_the_plain_loop_goes_on_to_the_end_of_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One epoch, then the same script with two, are the two epochs of the original."""
    monkeypatch.chdir(tmp_path)
    run_here(EXAMPLES / "originals" / "plain_loop.py", ["--epochs=2"], monkeypatch)
    original = capsys.readouterr().out
    run_here(EXAMPLES / "plain_loop.py", ["--epochs=1"], monkeypatch)
    run_here(EXAMPLES / "plain_loop.py", ["--epochs=2"], monkeypatch)
    assert capsys.readouterr().out == original


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_ends_as_the_original(name: str, tmp_path: Path) -> None:
    """Killed after its first line of output and started again; started once more, it has no epoch to train."""
    original = run(EXAMPLES / "originals" / f"{name}.py", SCRIPTS[name], tmp_path)
    script = EXAMPLES / f"{name}.py"
    run(script, SCRIPTS[name], tmp_path, kill_after_lines=1)
    again = run(script, SCRIPTS[name], tmp_path)
    assert again[-1] == original[-1]
    once_more = run(script, SCRIPTS[name], tmp_path)
    assert [line for line in once_more if line.startswith("epoch")] == []
