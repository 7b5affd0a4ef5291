"""Training processes that can be signalled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.preempt.held import HeldTrainers


@pytest.fixture(scope="package")
def trainers() -> Iterator[HeldTrainers]:
    server = HeldTrainers()
    yield server
    server.close()
