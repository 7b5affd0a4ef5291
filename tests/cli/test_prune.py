"""`ckpt prune`: what is shown is what is done, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_engine.store import pins
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.manifest import Line

Ckpt = Callable[..., Any]


@pytest.fixture
def ids(run_folder: Any) -> list[str]:
    """Five snapshots; the second has the best loss."""
    losses = {10: 0.5, 20: 0.1, 30: 0.4, 40: 0.3, 50: 0.2}
    made = {"a/x": np.zeros(1000, "float32")}
    return [run_folder.add(step, made, metrics={"val_loss": loss}) for step, loss in losses.items()]


def _files(run_folder: Any) -> dict[str, bytes]:
    return {
        str(path.relative_to(run_folder.path)): path.read_bytes()
        for path in run_folder.path.rglob("*")
        if path.is_file() and path.name != "lease.json"
    }


KEEP = ("--keep", "last=1", "--keep", "best.monitor=val_loss")


def test_the_dry_run_shows_the_plan_with_reasons_and_changes_nothing(
    ckpt: Ckpt, run_folder: Any, ids: list[str]
) -> None:
    """A line for each snapshot: kept or not, and why."""
    pins.pin(run_folder.repository, ids[0], "baseline")
    before = _files(run_folder)
    result = ckpt("prune", run_folder.path, *KEEP, "--dry-run")
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0].split() == ["snapshot", "step", "taken", "size", "plan", "why"]
    for line, snapshot, plan, why in zip(
        lines[1:],
        ids,
        ("keep", "keep", "remove", "remove", "keep"),
        ("pinned: baseline", "best 1 of 1 by val_loss (min): 0.1", "no rule keeps it", "no rule", "last 1 of 1"),
        strict=False,
    ):
        assert line.startswith(snapshot)
        assert f"  {plan}  " in line
        assert why in line
    assert lines[6].startswith("3 snapshots kept, 2 snapshots would be removed, 1")
    assert _files(run_folder) == before
    assert not (run_folder.path / "lease.json").exists()


def test_prune_does_what_the_dry_run_showed(ckpt: Ckpt, run_folder: Any, ids: list[str]) -> None:
    """The same plan, carried out: manifests and data gone, pins and foreign files kept."""
    pins.pin(run_folder.repository, ids[0])
    foreign = {"notes.txt": "a", "data/model.safetensors": "b", "snapshots/list.json": "c", "pins/x.json": "d"}
    for name, text in foreign.items():
        (run_folder.path / name).write_text(text)
    shown = ckpt("prune", run_folder.path, *KEEP, "--dry-run", "--json").json["tiers"][0]
    before = _files(run_folder)
    done = ckpt("prune", run_folder.path, *KEEP, "--json").json["tiers"][0]
    assert (done["keep"], done["remove"]) == (shown["keep"], shown["remove"])
    assert done["removed_bytes"] == shown["removed_bytes"]
    assert set(done["remove"]) == {ids[2], ids[3]}
    gone = {name for snapshot in done["remove"] for name in before if snapshot in name}
    assert _files(run_folder) == {name: data for name, data in before.items() if name not in gone}
    assert sum(len(before[name]) for name in gone) == done["removed_bytes"]
    again = ckpt("prune", run_folder.path, *KEEP)
    assert "0 snapshots removed, 0 B freed" in again.out


def test_the_rules_of_a_yaml_file_hold(ckpt: Ckpt, run_folder: Any, ids: list[str], tmp_path: Path) -> None:
    """The file that the trainer uses says what stays; a tier's own rules win over the general ones."""
    place = tmp_path / "ckpt.yaml"
    place.write_text(f"tiers: [{{url: {run_folder.path}, keep: {{last: 3}}}}]\nkeep: {{last: 1}}\n")
    assert set(ckpt("prune", place, "--dry-run", "--json").json["tiers"][0]["remove"]) == set(ids[:2])
    assert set(ckpt("prune", place, "--keep", "last=4", "--dry-run", "--json").json["tiers"][0]["remove"]) == {ids[0]}
    assert ckpt("prune", place).code == 0
    assert [info.id for info in run_folder.repository.list()] == ids[2:]


def test_every_tier_of_a_yaml_file_is_pruned(ckpt: Ckpt, run_folder: Any, ids: list[str], tmp_path: Path) -> None:
    """Each by its own rules."""
    copy = shutil.copytree(run_folder.path, tmp_path / "copy")
    place = tmp_path / "ckpt.yaml"
    place.write_text(f"tiers:\n- {{url: {run_folder.path}, keep: {{last: 4}}}}\n- {{url: {copy}}}\nkeep: {{last: 1}}\n")
    first, second = ckpt("prune", place, "--json").json["tiers"]
    assert (set(first["remove"]), set(second["remove"])) == ({ids[0]}, set(ids[:-1]))


def test_without_rules_nothing_is_removed(ckpt: Ckpt, run_folder: Any, ids: list[str]) -> None:
    """A folder does not say what to keep, and a default must not delete."""
    before = _files(run_folder)
    result = ckpt("prune", run_folder.path)
    assert (result.code, result.out) == (2, "")
    assert "--keep last=3" in result.err
    assert _files(run_folder) == before


def test_where_there_is_no_run_that_is_said_before_rules_are_asked_for(ckpt: Ckpt, tmp_path: Path) -> None:
    """A wrong path, most likely."""
    assert "no run at" in ckpt("prune", tmp_path / "nonsense").err


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (["lst=3"], "did you mean 'last'?"),
        (["last"], "must be RULE=VALUE"),
        (["last=0"], "at least 1"),
        (["last=1", "last=2"], "given twice"),
        (["best=loss", "best.k=2"], "best has a value already"),
        (["quota=much"], "must be a size"),
    ],
)
def test_wrong_rules_are_named(ckpt: Ckpt, run_folder: Any, ids: list[str], rules: list[str], text: str) -> None:
    """The rules are checked as those of a file, and nothing is removed."""
    result = ckpt("prune", run_folder.path, *(part for rule in rules for part in ("--keep", rule)))
    assert result.code == 2
    assert text in result.err
    assert len(run_folder.repository.list()) == 5


def test_a_run_that_is_being_written_is_left_alone(ckpt: Ckpt, run_folder: Any, ids: list[str]) -> None:
    """Only the holder of the lease may delete; the plan is shown all the same."""
    with acquire(run_folder.repository.storage):
        result = ckpt("prune", run_folder.path, *KEEP)
        assert result.code == 2
        assert "[CKPT500]" in result.err
        assert ckpt("prune", run_folder.path, *KEEP, "--dry-run").code == 0
    assert len(run_folder.repository.list()) == 5


def test_a_quota_that_cannot_hold_is_bad_news(ckpt: Ckpt, run_folder: Any, ids: list[str]) -> None:
    """Exit code 1, the bytes that are too much, and no loss for nothing."""
    result = ckpt("prune", run_folder.path, "--keep", "last=5", "--keep", "quota=1 kB")
    assert result.code == 1
    assert "the limits cannot be kept" in result.out
    assert len(run_folder.repository.list()) == 5
    kept = ckpt("prune", run_folder.path, "--keep", "last=5", "--keep", "quota=20 kB")
    assert kept.code == 0
    assert "over the quota of 20 kB" in kept.out
    assert sum(map(len, _files(run_folder).values())) <= 20_000


def test_the_newest_whole_snapshot_stays(ckpt: Ckpt, run_folder: Any, ids: list[str]) -> None:
    """A damaged newest one does not cost the last good one."""
    run_folder.data_file(ids[4]).unlink()
    result = ckpt("prune", run_folder.path, "--keep", "last=1", "--json").json["tiers"][0]
    assert result["keep"] == {ids[3]: "newest whole snapshot", ids[4]: "last 1 of 1"}


@pytest.fixture
def lines(run_folder: Any) -> list[str]:
    """Two finished snapshots of one line, and then two of another."""
    made = {"a/x": np.zeros(1000, "float32")}
    return [run_folder.add(step, made, line=Line(attempt * 16)) for attempt in "ab" for step in (1, 2)]


def test_another_line_stays_until_its_branch_is_named(ckpt: Ckpt, run_folder: Any, lines: list[str]) -> None:
    """The rules of retention apply to the line that a resume continues; `--branch` removes only the other line."""
    done = ckpt("prune", run_folder.path, "--keep", "last=1", "--json").json
    assert list(done["tiers"][0]["remove"]) == [lines[2]]
    assert done["tiers"][0]["keep"][lines[0]] == "of another line of history"
    before = _files(run_folder)
    planned = ckpt("prune", run_folder.path, "--branch", "aaaaaaaa", "--dry-run", "--json").json
    assert list(planned["tiers"][0]["remove"]) == lines[:2]
    assert _files(run_folder) == before
    pins.pin(run_folder.repository, lines[1], "best")
    assert ckpt("prune", run_folder.path, "--branch", "aaaaaaaa").code == 0
    assert [one.id for one in run_folder.repository.ids()] == [lines[1], lines[3]]


def test_the_branch_that_a_resume_continues_can_be_removed_too(ckpt: Ckpt, run_folder: Any, lines: list[str]) -> None:
    """Who started fresh by mistake removes that: then the older line is what a resume continues."""
    assert ckpt("prune", run_folder.path, "--branch", "bbbbbbbb").code == 0
    assert [one.id for one in run_folder.repository.ids()] == lines[:2]


def test_a_branch_that_is_none_or_all_is_refused(ckpt: Ckpt, run_folder: Any, ids: list[str]) -> None:
    """A wrong name lists the right ones; a run is not left without any branch; rules have no use beside a branch."""
    before = _files(run_folder)
    wrong = ckpt("prune", run_folder.path, "--branch", "cccccccc")
    assert wrong.code == 2
    assert "there is unnamed" in wrong.err
    assert ckpt("prune", run_folder.path, "--branch", "unnamed").code == 2
    assert ckpt("prune", run_folder.path, "--branch", "unnamed", "--keep", "last=1").code == 2
    assert _files(run_folder) == before
