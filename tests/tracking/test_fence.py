"""Nothing changes a lazily copied tensor before its copy is complete, in loops that do not announce their steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_engine.errors import CkptError
from ckpt_engine.snapshot.stage import Staging, StepFence
from tests.tracking.runs import Case, every_boundary, saved, train_plain


@pytest.fixture(autouse=True)
def nothing_is_copied_before_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any missing fence then is a torn snapshot."""
    monkeypatch.setattr(Staging, "help_lazily", lambda staging: None)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_no_snapshot_is_torn(accumulate: int, tmp_path: Path) -> None:
    """Every lazily copied byte is compared with an immediate copy."""
    case = Case(accumulate=accumulate)
    watched = train_plain(case, every_boundary(tmp_path, every_n_steps=2))
    assert watched == train_plain(case, None)
    assert len(saved(tmp_path)) >= 2


def test_the_comparison_sees_a_missing_fence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fence at optimizer steps the same run fails, so the test above can."""
    monkeypatch.setattr(StepFence, "install", lambda fence: None)
    with pytest.raises(CkptError, match="changed"):
        train_plain(Case(evaluation=None), every_boundary(tmp_path, every_n_steps=2, on_error="raise"))
