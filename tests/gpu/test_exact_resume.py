"""A run on a GPU that is killed and started again, with another seed, ends as the run that never was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

REPOSITORY = Path(__file__).parents[2]
SECONDS = 170.0
DEVICE = "cuda"


def train(loop: str, root: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, what it ended with, and what it said."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.train_script", loop, str(root), "--device", DEVICE]
    done = subprocess.run(
        [*command, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    ended = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    return done.returncode, ended, done.stderr


def assert_exact(loop: str, folder: Path, *arguments: str) -> None:
    """Whole, killed at step 17, and resumed with other seeds: bitwise the same end, and the losses in between."""
    status, whole, said = train(loop, folder / "whole", *arguments)
    assert status == 0, said
    status, _, said = train(loop, folder / "run", "--die-after", "17", *arguments)
    assert status == -signal.SIGKILL, said
    status, resumed, said = train(loop, folder / "run", "--seed", "99", *arguments)
    assert status == 0, said
    first = resumed["losses"][0][0]
    assert 1 < first <= 18, "it did not resume"
    # By position, because a step that the scaler skips has the number of the one before.
    assert resumed["losses"] == whole["losses"][-len(resumed["losses"]) :]
    assert resumed["end"] == whole["end"]


@pytest.mark.parametrize("loop", ["plain", "accelerate", "lightning"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_mixed_precision_resumes_bit_for_bit(loop: str, precision: str, tmp_path: Path) -> None:
    """Dropout draws on the device, and with fp16 the scale of the gradients grows on the way."""
    assert_exact(loop, tmp_path, "--precision", precision)


@pytest.mark.parametrize("optimizer", ["fused", "capturable"])
def test_optimizers_that_count_on_the_device_resume_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    """Their step counts are device tensors, and fused updates leave no trace in a tensor's version."""
    assert_exact("plain", tmp_path, "--optimizer", optimizer)


@pytest.mark.parametrize("loop", ["plain", "accelerate", "lightning"])
def test_page_locked_batches_of_workers_resume_bit_for_bit(loop: str, tmp_path: Path) -> None:
    """The loader's thread reads ahead of training."""
    assert_exact(loop, tmp_path, "--workers", "2")


def test_a_compiled_model_in_cuda_graphs_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Replays read and write the same addresses; the snapshot is one more reader of them."""
    assert_exact("plain", tmp_path, "--compile", "--precision", "bf16")
