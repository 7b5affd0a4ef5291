"""Every test in this folder needs a CUDA device, and is skipped where there is none."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def writers_are_forked() -> None:
    """They are not: a process with a device starts writers as a user's does."""


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
