"""What the crash tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.crash.life import small_blocks


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Where states are built: in memory if possible, because there are thousands."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with small_blocks(monkeypatch):
        yield
