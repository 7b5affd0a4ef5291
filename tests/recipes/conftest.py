"""No launcher outlives its test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.recipes.lives import STARTED


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    yield
    while STARTED:
        process = STARTED.pop()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
