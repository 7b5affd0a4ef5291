"""The trainers of this folder's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.memory.lives import Trainers


@pytest.fixture(scope="session")
def trainers() -> Iterator[Trainers]:
    server = Trainers()
    yield server
    server.close()
