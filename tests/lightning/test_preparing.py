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
def shares(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The share of a core each preparation was given."""
    seen: list[float | None] = []
    prepare = Pipeline.prepare

    def noted(self: Pipeline, state: Any, lazy: Any = None, share: float | None = None) -> None:
        seen.append(share)
        prepare(self, state, lazy, share)

    monkeypatch.setattr(Pipeline, "prepare", noted)
    return seen


@pytest.mark.parametrize(
    ("cores", "options", "share"),
    [
        (1, {"overhead": "2%"}, 0.02),
        (64, {"overhead": "2%"}, None),
        (1, {"overhead": "2%", "max_lost_work": "1 min"}, None),
        (1, {"every_n_steps": 1000}, None),
    ],
)
def test_the_budget_pays_only_where_training_needs_all_cores_and_the_budget_decides(
    cores: int,
    options: dict[str, Any],
    share: float | None,
    tmp_path: Path,
    shares: list[float | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A spare core, a limit of lost work or a fixed rhythm lets it go as fast as it can."""
    monkeypatch.setattr("ckpt_engine.snapshot.stage.os.sched_getaffinity", lambda _pid: set(range(cores)))
    charged: list[float] = []
    monkeypatch.setattr(Cadence, "background", lambda self, seconds: charged.append(seconds))
    fit(Case(), [AdaptiveCheckpoint(str(tmp_path), writer="thread", at_end=False, **options)])
    assert shares
    assert set(shares) == {share}
    assert bool(charged) == (share is not None)
