"""`ckpt check`: options, memory, disk and places of a run, before it starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.copy.memory_limits import MemoryLimit
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.tools import needs

Ckpt = Callable[..., Any]
GB = 10**9


@pytest.fixture
def yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Options of a run that has not begun, on a machine with 20 GB of memory and a disk of 100 GB."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(needs, "look", lambda: MemoryLimit(20 * GB, "of this test"))
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 100 * GB)
    file = tmp_path / "ckpt.yaml"
    file.write_text("tiers:\n  - near\n  - {url: far, keep: {last: 2, daily: 7}}\nkeep: {last: 5}\n")
    return file


def findings(result: Any) -> dict[str, tuple[str, str]]:
    return {
        f"{Path(place['root']).name} {one['check']}": (one["mark"], one["text"])
        for place in result.json
        for one in place["findings"]
    }


@pytest.mark.cells(2)
@pytest.mark.parametrize(
    ("state", "code", "bad"),
    [
        ("1 GB", 0, set()),
        ("9GB", 0, set()),
        ("10 GB", 1, {"ckpt.yaml host memory"}),
        ("12 GB", 1, {"ckpt.yaml host memory", "far disk"}),
        ("30 GB", 1, {"ckpt.yaml host memory", "near disk", "far disk"}),
    ],
)
def test_what_does_not_fit_is_named(ckpt: Ckpt, yaml: Path, state: str, code: int, bad: set[str]) -> None:
    """Memory for all slots, and on each tier the disk for what its own rules keep."""
    result = ckpt("check", "--state", state, "--json")
    found = findings(result)
    assert result.code == code, result.out
    assert {name for name, (mark, _) in found.items() if mark == "BAD"} == bad
    assert found["far keeps"][1] == "{last: 2, daily: 7}"
    assert found["near write and read"][0] == "ok"


def test_it_says_what_is_needed(ckpt: Ckpt, yaml: Path) -> None:
    """The default options file, for people."""
    result = ckpt("check", "--state", "4GB")
    assert result.code == 0
    assert "2 slots of 4 GB need 8 GB; 20 GB are available (of this test)" in result.out
    assert "20 GB for 5 snapshots" in result.out
    assert "36 GB for 9 snapshots" in result.out
    assert "near\n" in result.out and "far\n" in result.out
    assert not any(path.is_dir() for path in yaml.parent.iterdir())


def test_a_memory_tier_takes_a_slot_more(ckpt: Ckpt, yaml: Path) -> None:
    """Three, where two of the same size still fit."""
    yaml.write_text("tiers: [memory, near]\n")
    assert "3 slots of 6 GB need 18 GB" in ckpt("check", "--state", "6 GB").out
    assert ckpt("check", "--state", "8 GB").code == 1


def test_the_newest_snapshot_says_the_size(ckpt: Ckpt, yaml: Path, run_folder: Any, arrays: Any) -> None:
    """Where there is one; without one the state is not known, which is no bad news."""
    run_folder.add(1, arrays)
    nbytes = sum(array.nbytes for array in arrays.values())
    assert f"{2 * nbytes / 1000:.0f} kB" in findings(ckpt("check", run_folder.path, "--json"))["run host memory"][1]
    result = ckpt("check", "--json")
    assert (result.code, findings(result)["ckpt.yaml state"][0]) == (0, "note")
    assert "--state" in findings(result)["ckpt.yaml state"][1]


@pytest.mark.parametrize(
    ("text", "options"),
    [("tiers: near\nkeep: {lst: 3}\n", []), ("tiers: [\n", []), ("tiers: near\n", ["--state", "much"]), (None, [])],
)
def test_wrong_options_are_named_and_nothing_is_tried(
    ckpt: Ckpt, yaml: Path, text: str | None, options: list[str]
) -> None:
    """Exit code 2, as for every verb."""
    yaml.unlink() if text is None else yaml.write_text(text)
    result = ckpt("check", *options)
    assert (result.code, result.out) == (2, "")
    assert "[CKPT100]" in result.err


def test_a_place_that_cannot_be_used_is_bad_news(ckpt: Ckpt, yaml: Path) -> None:
    """The other places are tried all the same."""
    (yaml.parent / "near").write_text("a file")
    result = ckpt("check", "--state", "1GB", "--json")
    found = findings(result)
    assert result.code == 1
    assert found["near disk"][0] == "BAD" or found["near write and read"][0] == "BAD"
    assert found["far write and read"][0] == "ok"


def _with_section(yaml: Path, section: str) -> None:
    yaml.write_text(f"tiers: near\nresume: {section}\n")


def _run(folder: Path, step: int) -> None:
    groups = [{"lr": 0.1, "params": [0]}]
    model = {"body.w": torch.zeros(2), "head.w": torch.ones(3)}
    with Checkpointer(str(folder), writer="thread") as run:
        run.save({"model": model, "optimizer": {"state": {}, "param_groups": groups}}, step=step)


@pytest.mark.cells(2)
@pytest.mark.parametrize(
    ("section", "resumes", "changes"),
    [
        ("{skip: [model.head], override: {optimizer.param_groups.*.lr: 0.5}}", "step 7", {"left": 1, "set": 1}),
        ("{only: [model], map: {model.head.w: model.top.w}}", "as step 0, of step 7", {"left": 1, "renamed": 1}),
        ("{override: {optimizer.param_groups.*.lr: [1]}}", "BAD", {}),
        ("{skip: [modle]}", "BAD", {}),
    ],
)
@pytest.mark.parametrize("begins", [False, True])
def test_it_lists_what_a_resume_changes(
    ckpt: Ckpt, yaml: Path, section: str, resumes: str, changes: dict[str, int], begins: bool
) -> None:
    """From the newest snapshot, or that of the run which a new one begins with; nothing is written."""
    _run(yaml.parent / ("other" if begins else "near"), 7)
    _with_section(yaml, section.replace("{", "{from: other#7, ", 1) if begins else section)
    rows = ckpt("check", "--json").json[0]["findings"]
    (found,) = (one for one in rows if one["check"] == "resumes")
    assert (found["mark"] if resumes == "BAD" else found["text"]).startswith(resumes)
    listed = [one["check"].strip() for one in rows if one["check"].strip() in ("left", "set", "renamed")]
    assert {kind: listed.count(kind) for kind in listed} == changes
    assert "modle" not in section or "model" in found["text"]


@pytest.mark.parametrize(("section", "mark"), [("{skip: [model]}", "ok"), ("{from: nowhere#3}", "BAD")])
def test_it_says_where_there_is_nothing_to_resume(ckpt: Ckpt, yaml: Path, section: str, mark: str) -> None:
    """A run begins fresh, but for one that is to begin with a snapshot of another."""
    _with_section(yaml, section)
    rows = ckpt("check", "--json").json[0]["findings"]
    assert [one["mark"] for one in rows if one["check"] == "resumes"] == [mark]


def test_what_hinders_a_resume_is_one_line(ckpt: Ckpt, yaml: Path) -> None:
    """Also where the error has a line for each snapshot."""
    _run(yaml.parent / "other", 7)
    for data in (yaml.parent / "other/data").iterdir():
        data.unlink()
    _with_section(yaml, "{from: other#7}")
    (line,) = (one for one in ckpt("check").out.splitlines() if one.split()[:2] == ["resumes", "BAD"])
    assert "is usable: 00000001-" in line and "is missing" in line
