"""Runs are compared bit for bit: one thread, and the process's random streams and settings as they were."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator

import pytest
import torch

from tests.support.arena import arena_at_once

__all__ = ["arena_at_once"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    quiet = logging.getLogger("lightning.pytorch")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    yield
    quiet.setLevel(level)
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def handlers_stay() -> Iterator[None]:
    """A fit whose callbacks fail leaves the handlers of its trainer, which each later trainer would keep."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
