"""How a run gets its arena ready, and who pays for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.frequency.cadence import Cadence
from ckpt_engine.snapshot.pipeline import Pipeline
from lightning_ckpt import AdaptiveCheckpoint
from tests.lightning.cases import Case
from tests.lightning.runs import fit


@pytest.fixture
def touching(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each preparation touches memory."""
    seen: list[bool] = []
    prepare = Pipeline.prepare

    def noted(self: Pipeline, state: Any, lazy: Any = None, *, touch: bool = True) -> None:
        seen.append(touch)
        prepare(self, state, lazy, touch=touch)

    monkeypatch.setattr(Pipeline, "prepare", noted)
    return seen


@pytest.mark.parametrize("cores", [1, 64])
def test_memory_is_touched_ahead_only_where_training_leaves_a_core(
    cores: int, tmp_path: Path, touching: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it needs all of them touching costs more than a first copy into cold memory; the budget pays for that."""
    monkeypatch.setattr("ckpt_engine.snapshot.stage.os.sched_getaffinity", lambda _pid: set(range(cores)))
    charged: list[float] = []
    monkeypatch.setattr(Cadence, "background", lambda self, seconds: charged.append(seconds))
    fit(Case(), [AdaptiveCheckpoint(str(tmp_path), writer="thread", at_end=False)])
    assert touching
    assert set(touching) == {cores > 1}
    assert bool(charged) == (cores == 1)
