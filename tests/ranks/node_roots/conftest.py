"""Folders of one machine show new files at once: no rank has to look for a beacon twice."""

from __future__ import annotations

import pytest

from ckpt_engine.ranks import session


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LOOKS_SECONDS", (0.0,))
