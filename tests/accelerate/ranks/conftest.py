"""One server of forks that have imported transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.accelerate.ranks.lives import Lives
from tests.ranks.launch import Launcher


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Starts ranks of a `Trainer`."""
    made = Launcher("tests.accelerate.ranks.train")
    yield made
    made.close()


@pytest.fixture
def lives_in(launcher: Launcher, tmp_path: Path) -> Iterator[Callable[..., Lives]]:
    """Makes a run in a folder of this name; what still lives when the test is over is killed."""
    made: list[Lives] = []

    def make(name: str, **job: Any) -> Lives:
        made.append(Lives(launcher, tmp_path / name, **job))
        return made[-1]

    yield make
    for lives in made:
        lives.end()
