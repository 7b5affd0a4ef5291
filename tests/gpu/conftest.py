"""Every test in this folder needs a CUDA device, and is skipped where there is none."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
