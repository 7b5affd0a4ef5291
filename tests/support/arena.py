"""Host memory for snapshots that is there when a trainer has announced its state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_engine.snapshot.pipeline import Pipeline
from tests.support.trainers import wait_for_the_arena


@pytest.fixture(autouse=True)
def arena_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every announcement of a state wait for its arena.

    A snapshot that is due before the arena is ready is taken later, and the thread that makes the arena gives way to
    everybody: on a busy machine that takes any number of steps. Tests that say which snapshots there are need this.
    """
    prepare = Pipeline.prepare

    def at_once(self: Pipeline, state: Any, lazy: Any = None, *, touch: bool = True) -> None:
        prepare(self, state, lazy, touch=touch)
        wait_for_the_arena(SimpleNamespace(_pipeline=self))

    monkeypatch.setattr(Pipeline, "prepare", at_once)
