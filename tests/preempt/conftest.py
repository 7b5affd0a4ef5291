"""Training processes that can be signalled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lightning.test_kill import Trainers


@pytest.fixture(scope="package")
def trainers() -> Iterator[Trainers]:
    server = Trainers()
    yield server
    server.close()
