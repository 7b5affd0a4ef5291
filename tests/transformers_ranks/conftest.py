"""One server of forks that have imported transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.launch import Launcher


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Starts ranks of a `Trainer`."""
    made = Launcher("tests.transformers_ranks.train")
    yield made
    made.close()
