"""Training processes that can be signalled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.preempt.waiting import WaitingTrainers


@pytest.fixture(scope="package")
def trainers() -> Iterator[WaitingTrainers]:
    server = WaitingTrainers()
    yield server
    server.close()
