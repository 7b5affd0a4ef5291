"""Runs are compared bit for bit: one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.loop.changes import FirstParts
from tests.support.arena import arena_at_once

__all__ = ["arena_at_once"]


@pytest.fixture(scope="module")
def first_parts(tmp_path_factory: pytest.TempPathFactory) -> FirstParts:
    """What the tests of a file continue."""
    return FirstParts(tmp_path_factory.mktemp("first parts"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
