"""`ckpt ls`: the table and its JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_engine.observe.units import age
from ckpt_engine.store.manifest import Line
from tests.cli.conftest import RunFolder

Ckpt = Callable[..., Any]


def test_ls_lists_oldest_first_with_what_people_need(ckpt: Ckpt, run_folder: Any) -> None:
    """Id, step, epoch, age, size, reason and metrics are on each line; nothing is cut where there is no terminal."""
    array = {"a/x": np.zeros(1_000_000, "float32")}
    first = run_folder.add(1200, array, epoch=3, reason="validation", metrics={"val_loss": 0.12345, "acc": 0.9})
    second = run_folder.add(2400, array)
    result = ckpt("ls", run_folder.path)
    lines = result.out.splitlines()
    assert result.code == 0
    assert lines[0].split() == ["snapshot", "step", "epoch", "taken", "size", "why", "metrics"]
    assert lines[1].startswith(first)
    assert lines[2].startswith(second)
    assert "ago" in lines[1]
    for text in ("1,200", " 3 ", "4 MB", "validation", "val_loss=0.1235 acc=0.9"):
        assert text in lines[1]
    assert lines[3] == f"2 snapshots, 8 MB on disk at {run_folder.path}"


def test_ls_json_has_everything(ckpt: Ckpt, run_folder: Any) -> None:
    """Programs get exact numbers; NaN, which JSON lacks, is a text."""
    snapshot = run_folder.add(7, {"a/x": np.zeros(3, "float32")}, metrics={"loss": math.nan}, parent="p")
    found = ckpt("ls", run_folder.path, "--json").json
    assert found["run"] == run_folder.repository.run_id
    assert found["root"] == f"file://{run_folder.path}"
    assert found["data_bytes"] == run_folder.data_file(snapshot).stat().st_size
    assert found["damaged"] == []
    assert found["snapshots"] == [
        {
            "id": snapshot,
            "seq": 1,
            "step": 7,
            "epoch": None,
            "reason": "interval",
            "created": 1_700_000_000.0,
            "nbytes": 12,
            "metrics": {"loss": "NaN"},
            "parent": "p",
            "components": {"a": 12},
            "partial": None,
            "line": {"attempt": "", "before": []},
            "branch": "unnamed",
            "tiers": [f"file://{run_folder.path}"],
            "pinned": None,
        }
    ]
    assert found["branches"] == [
        {"id": "unnamed", "resumed": True, "snapshots": 1, "newest": snapshot, "step": 7},
    ]


def test_ls_tells_branches_apart(ckpt: Ckpt, run_folder: Any) -> None:
    """With more than one line of history each snapshot says of which it is, and a finished one how it is removed."""
    array = {"a/x": np.zeros(3, "float32")}
    for step, line in ((1, Line("a" * 16)), (9, Line("b" * 16)), (2, Line("c" * 16, (("a" * 16, 1),)))):
        run_folder.add(step, array, line=line)
    out = ckpt("ls", run_folder.path).out.splitlines()
    assert out[0].split() == ["snapshot", "step", "epoch", "taken", "size", "branch", "why", "metrics"]
    assert ["aaaaaaaa" in out[1], "cccccccc" in out[1], "bbbbbbbb" in out[2], "cccccccc" in out[3]] == [
        False,
        True,
        True,
        True,
    ]
    assert out[5] == "branch cccccccc: 2 snapshots up to step 2; a resume continues this one"
    finished = f"`ckpt prune {run_folder.path} --branch bbbbbbbb`"
    assert out[6] == f"branch bbbbbbbb: 1 snapshot up to step 9; stays until {finished}"
    found = ckpt("ls", run_folder.path, "--json").json
    assert [(one["id"], one["resumed"]) for one in found["branches"]] == [("cccccccc", True), ("bbbbbbbb", False)]
    assert [one["branch"] for one in found["snapshots"]] == ["cccccccc", "bbbbbbbb", "cccccccc"]


def test_ls_shows_what_is_pinned_and_why(ckpt: Ckpt, run_folder: Any) -> None:
    """The tag that `ckpt pin` gave, for people and for programs; one without says that it is pinned."""
    array = {"a/x": np.zeros(3, "float32")}
    ids = [run_folder.add(step, array) for step in (10, 20, 30)]
    assert ckpt("pin", run_folder.path, 10, "--tag", "best-for-paper").code == 0
    assert ckpt("pin", run_folder.path, 20).code == 0
    lines = ckpt("ls", run_folder.path).out.splitlines()
    assert [line.split("interval")[1].strip() for line in lines[1:4]] == ["; pinned: best-for-paper", "; pinned", ""]
    found = ckpt("ls", run_folder.path, "--json").json["snapshots"]
    assert {one["id"]: one["pinned"] for one in found} == dict(zip(ids, ("best-for-paper", "", None), strict=True))


def test_ls_shows_damaged_manifests_and_goes_on(ckpt: Ckpt, run_folder: Any) -> None:
    """A manifest that cannot be read is a line of its own, not the end of the listing."""
    bad = run_folder.add(1, {"a/x": np.zeros(3)})
    good = run_folder.add(2, {"a/x": np.zeros(3)})
    run_folder.manifest_file(bad).write_bytes(b"\0" * 100)
    result = ckpt("ls", run_folder.path)
    assert result.code == 0
    assert f"{bad}  damaged: [CKPT4" in result.out
    assert good in result.out
    assert "1 snapshot, " in result.out
    assert result.out.rstrip().endswith("; 1 damaged")
    assert [row["id"] for row in ckpt("ls", run_folder.path, "--json").json["damaged"]] == [bad]


def test_ls_of_a_run_without_snapshots(ckpt: Ckpt, run_folder: Any) -> None:
    """A run that has not saved yet is an empty listing, not an error."""
    result = ckpt("ls", run_folder.path)
    assert (result.code, result.out) == (0, f"0 snapshots, 0 B on disk at {run_folder.path}\n")


def test_root_may_be_a_url_or_a_yaml_file(ckpt: Ckpt, run_folder: Any, tmp_path: Path) -> None:
    """The three ways to say where a run is."""
    snapshot = run_folder.add(1, {"a/x": np.zeros(3)})
    (tmp_path / "ckpt.yaml").write_text(f"tiers: {run_folder.path}\noverhead: 2%\n")
    assert snapshot in ckpt("ls", tmp_path / "ckpt.yaml").out
    assert snapshot in ckpt("ls", f"file://{run_folder.path}").out


def test_a_folder_of_runs_is_a_list_of_them(ckpt: Ckpt, tmp_path: Path) -> None:
    """With how far each is, one that is damaged too; other verbs say what to name."""
    for name, steps in {"lr1": (1, 20), "sweep/lr2": (7,), "sweep/lr3": ()}.items():
        run = RunFolder(tmp_path / "runs" / name)
        for step in steps:
            run.add(step, {"a/x": np.zeros(3)})
    (tmp_path / "runs/lr4").mkdir()
    (tmp_path / "runs/lr4/ckpt.json").write_text("{")
    (tmp_path / "runs/notes.txt").touch()
    result = ckpt("ls", tmp_path / "runs")
    assert result.code == 0
    lines = [line.split() for line in result.out.splitlines()]
    assert lines[1][:3] == ["lr1", "2", "20"]
    assert lines[2][0] == "lr4" and "[CKPT401]" in lines[2]
    assert lines[3][:3] == ["sweep/lr2", "1", "7"]
    assert lines[4][:2] == ["sweep/lr3", "0"]
    assert result.out.endswith(f"4 runs below {tmp_path}/runs\n")
    rows = ckpt("ls", tmp_path / "runs", "--json").json["runs"]
    assert [row.get("step") for row in rows] == [20, None, 7, None]
    for verb in ("verify", "prune"):
        assert (
            f"do:  name a run below it: {tmp_path}/runs/lr1 and 3 more"
            in ckpt(verb, tmp_path / "runs", *KEEP[verb]).err
        )


def test_what_is_no_run_is_an_error_without_traceback(ckpt: Ckpt, tmp_path: Path) -> None:
    """A missing or empty folder, a foreign one, a file, an unsupported URL: a message, exit code 2, no output."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/thesis.tex").touch()
    (tmp_path / "file").touch()
    for root, text in {
        tmp_path / "missing": "[CKPT303] no run at",
        tmp_path / "empty": "[CKPT303] no run at",
        tmp_path / "foreign": "[CKPT402]",
        tmp_path / "file": "[CKPT305]",
        tmp_path / "ckpt.yaml": "no such file",
        "s4://bucket/run": "no storage for s4:// URLs",
        "ftp://nohost.invalid/run": "ftp://nohost.invalid/run is unreachable",
        "~nosuchuser/run": "no home folder is known for a leading ~",
    }.items():
        result = ckpt("ls", root)
        assert (result.code, result.out) == (2, ""), root
        assert text in result.err
        assert "Traceback" not in result.err
        assert len(result.err.splitlines()) == 2


KEEP = {"verify": (), "prune": ("--keep", "last=1", "--dry-run")}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "just now"), (9, "9 s ago"), (600, "10 min ago"), (86400 * 12, "12 d ago"), (-3600, "in 60 min")],
)
def test_ages_are_for_people(seconds: float, text: str) -> None:
    """Clocks of other machines may be ahead: the future is said as such, unless it is seconds."""
    assert age(1000.0, 1000.0 + seconds) == text
