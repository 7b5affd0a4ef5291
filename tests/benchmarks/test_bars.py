"""Every bar runs at a tiny scale and gives a complete result; no time is judged."""

from __future__ import annotations

import gc
import subprocess
import warnings
from pathlib import Path

import pytest

from benchmarks import bars
from benchmarks.bars import profile
from benchmarks.machine import file_system
from benchmarks.run import Bench, Scale
from benchmarks.values import from_json, to_json
from ckpt_engine.writer import launch

NEEDS_A_DISK = {"persist", "restore"}
QUICK = {"recorder"}
"""The others train, start many processes, or take seconds."""


def test_what_the_profile_clocks_is_there() -> None:
    """It puts a clock around methods by their names."""
    for part, owner, name in profile._CALLS:
        assert callable(getattr(owner, name, None)), part


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*bars.NAMES, *bars.STUDIES)],
)
def test_bar_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar measures all of its targets and cleans up behind itself."""
    if name not in QUICK:
        monkeypatch.setattr(launch, "subprocess", subprocess)  # bars measure a writer as a child of its trainer
    if name in NEEDS_A_DISK and file_system(tmp_path).startswith("tmpfs"):
        pytest.skip("direct writes and cold files need a disk")
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers warn about the state of their own interfaces
        result = bars.runner(name)(Bench(tmp_path, Scale.TINY, said.append))
        gc.collect()
    assert result.name == name and result.title == bars.title(name)
    assert result.checks and all(check.samples for check in result.checks)
    assert result.series and all(series.samples for series in result.series)
    assert result.conditions and said
    assert from_json(to_json(result)) == result
    assert list(tmp_path.iterdir()) == []
