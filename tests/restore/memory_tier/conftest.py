"""The trainers of this folder's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lightning.conftest import one_thread  # noqa: F401 - runs are compared bit for bit here too
from tests.restore.memory_tier.lives import Trainers


@pytest.fixture(scope="session")
def trainers() -> Iterator[Trainers]:
    server = Trainers()
    yield server
    server.close()
