"""`ckpt prove`: a command repeats what its run has recorded; where it does not, the first step and tensor are named."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_engine.tools import rehearsal_runs as runs
from tests.cli.rehearsed import recorded_loop
from tests.support import interpreters

Ckpt = Callable[..., Any]
UNTIL = 9


@pytest.fixture
def prove(ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Proves the run with its own command, whose processes find torch imported."""
    found = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT", "TimeoutExpired")}
    monkeypatch.setattr(runs, "subprocess", SimpleNamespace(Popen=partial(interpreters.Popen), **found))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(*options: object, root: str = "run", named: str = "run", fault: int = 0) -> Any:
        command = (sys.executable, recorded_loop.__file__, tmp_path / root, UNTIL, fault)
        return ckpt("prove", tmp_path / named, "--timeout", 120, *options, "--", *command)

    return run


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_ended_without_a_kill_is_proved(prove: Callable[..., Any], tmp_path: Path) -> None:
    """From its newest snapshot with steps behind it, to the last recorded step; the run is not touched."""
    recorded_loop.main(str(tmp_path / "run"), UNTIL, 0)
    before = _files(tmp_path / "run")
    result = prove("--json")
    assert result.code == 0, result.out + result.err
    report = result.json
    assert (report["exact"], report["killed_after"], report["resumed"]) == (True, 8, None)
    assert (report["replay"]["result"], report["replay"]["steps"]) == ("exact", UNTIL - 8)
    assert _files(tmp_path / "run") == before
    assert not list(tmp_path.glob("ckpt-rehearsal-*"))


def test_snapshots_of_the_repeated_steps_are_compared_too(prove: Callable[..., Any], tmp_path: Path) -> None:
    """From an earlier step on there are some."""
    recorded_loop.main(str(tmp_path / "run"), UNTIL, 0)
    result = prove("4")
    assert result.code == 0, result.out + result.err
    assert "exact: resumed at step 4, equal to what the run has behind it (2 snapshots, " in result.out
    assert "resume proved exact: 5 of 5 repeated steps gave the same batches and weights" in result.out


@pytest.mark.long
def test_a_step_that_computed_wrongly_is_named(prove: Callable[..., Any], tmp_path: Path) -> None:
    """With --bisect the run is resumed from later snapshots, and the last one before the fault is found."""
    recorded_loop.main(str(tmp_path / "run"), UNTIL, 5)
    result = prove("--bisect", "--json", "--scratch", tmp_path / "scratch")
    assert result.code == 1, result.out + result.err
    report = result.json
    assert (report["killed_after"], report["resumed"]["step"], report["resumed"]["area"]) == (4, 5, "tensor")
    assert report["resumed"]["first"].startswith("the weights of ")
    assert sorted(path.name for path in (tmp_path / "scratch").iterdir() if path.is_dir()) == [
        "from-step-2",
        "from-step-4",
    ]


def test_where_nothing_is_recorded_that_is_said(prove: Callable[..., Any], tmp_path: Path) -> None:
    """Nothing behind a snapshot of this step; nothing at all; another run than the one that the command names."""
    recorded_loop.main(str(tmp_path / "run"), UNTIL, 0)
    refused = prove(named="run#7")
    assert refused.code == 2
    assert "no snapshot '7'" in refused.err
    assert "the nearest step is 6" in refused.err
    other = prove(root="other")
    assert other.code == 2
    assert f"it named {tmp_path / 'run'}, {tmp_path / 'other'}" in other.err
    for path in (tmp_path / "run" / "replay").iterdir():
        path.unlink()
    assert "no steps are recorded after any snapshot" in prove().err
