"""A new run begins with a snapshot of another one, as `resume.from` says, and continues as a run of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine import Checkpointer
from ckpt_engine.errors import CkptError
from tests.accelerate.test_transformers_changes import AT as HF_AT
from tests.accelerate.test_transformers_changes import run as run_hf
from tests.cli.conftest import ckpt as ckpt
from tests.loop.changes import AT, Setup, by_hand
from tests.loop.runs import every_boundary, only, report, saved
from tests.loop.test_resume_changes import TRAINERS

Train = Callable[[dict[str, Any]], Any]


@pytest.fixture(params=[*TRAINERS, "transformers"])
def train(request: pytest.FixtureRequest, tmp_path: Path) -> Train:
    """One process of a script; what it has trained."""
    if request.param == "transformers":
        return lambda options: run_hf(tmp_path, options, 11 if "resume" in options else 0).trace
    one: Any = TRAINERS[request.param]
    return lambda options: one.train(Setup(), options, 11 if "resume" in options else 0)[0]


def fork_shown(ckpt: Any, verb: str, root: Path) -> Any:
    ckpt("--version")  # takes what training has printed
    return ckpt(verb, root, "--json").json["fork"]


@pytest.mark.cells(2)
def test_a_run_begins_with_a_snapshot_of_another(train: Train, tmp_path: Path, ckpt: Any) -> None:
    """It trains what that one has trained after it; it needs nothing of it once it has a snapshot of its own."""
    parent, new, step = tmp_path / "parent", tmp_path / "new", HF_AT
    whole = train(every_boundary(parent))
    point = next(one for one in saved(parent) if one.step == step and one.reason != "end")
    options = {"resume": {"from": f"{parent}#{step}"}}
    rest = train(every_boundary(new, **options))
    assert 0 < len(rest) < len(whole)
    assert rest == whole[-len(rest) :]
    told = report(new)
    assert (told.step, told.not_restored, told.changes) == (step, (), ())
    shutil.rmtree(parent)
    forked = {"url": f"file://{parent}", "snapshot": point.id, "step": step}
    middle = saved(new)[len(saved(new)) // 2]
    again = only(new, middle, tmp_path / "again")
    for place in (new, again):
        listed = fork_shown(ckpt, "ls", place)
        assert listed == fork_shown(ckpt, "show", place) == {**forked, "run": listed["run"]}
    repeated = train(every_boundary(again, **options))
    assert repeated == whole[len(whole) - len(repeated) :]
    assert report(again).step == middle.step
    assert fork_shown(ckpt, "ls", again)["step"] == step


def test_it_is_combined_with_changes_which_are_made_once(tmp_path: Path) -> None:
    """As the same changes of a run that resumes."""
    one, parent, new = TRAINERS["plain"], tmp_path / "parent", tmp_path / "new"
    one.train(Setup(), every_boundary(parent), 0)

    def change(mine: Any) -> Any:
        for group in mine.optimizer.param_groups:
            group["weight_decay"] = 0.3
        return mine

    expected = by_hand(one, Setup(), change)
    options = {"resume": {"from": f"{parent}#step={AT}", "override": {"optimizer.param_groups.*.weight_decay": 0.3}}}
    assert one.train(Setup(), every_boundary(new, **options), 11)[0] == expected[0][AT:]
    assert [row.how for row in report(new).changes] == ["set"]
    again = only(new, saved(new)[1], tmp_path / "again")
    assert one.train(Setup(), every_boundary(again, **options), 12)[1] == expected[1]
    assert report(again).changes == ()
    notes = Checkpointer(again).engine.choose().manifest.notes  # type: ignore[union-attr]
    assert notes["forked_from"]["step"] == AT


def test_parts_of_another_run_begin_at_step_0(tmp_path: Path, ckpt: Any) -> None:
    """With `only`; the newest snapshot is taken where no step is given."""
    one, parent, new = TRAINERS["plain"], tmp_path / "parent", tmp_path / "new"
    one.train(Setup(), every_boundary(parent), 0)
    end = one.train(Setup(), every_boundary(new, resume={"from": str(parent), "only": ["model"]}), 11)
    assert len(end[0]) == len(by_hand(one, Setup())[0])
    assert report(new).step == 0
    assert fork_shown(ckpt, "show", new)["step"] == saved(parent)[-1].step


@pytest.mark.cells(7)
@pytest.mark.parametrize("kind", ["no place", "no step", "no run", "damaged", "no scheme"])
def test_what_is_missing_or_damaged_is_refused_before_training(train: Train, kind: str, tmp_path: Path) -> None:
    """With a message that names the place."""
    parent, new = tmp_path / "parent", tmp_path / "new"
    if kind == "damaged":
        train(every_boundary(parent))
        for file in (parent / "data").iterdir():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif kind == "no step":
        with Checkpointer(parent) as run:
            run.save({"w": 1}, step=1).wait()
    elif kind == "no run":
        parent.mkdir()
    source = "nosuch://place" if kind == "no scheme" else str(parent)
    with pytest.raises(CkptError, match=r"parent|nosuch"):
        train(every_boundary(new, resume={"from": f"{source}#3"}))
    assert not saved(new)


def test_a_run_that_has_snapshots_does_not_look_elsewhere(tmp_path: Path) -> None:
    """Also where the other place is gone."""
    one, new = TRAINERS["plain"], tmp_path / "new"
    one.train(Setup(epochs=1), every_boundary(new), 0)
    options = every_boundary(new, resume={"from": f"{tmp_path}/gone#3"})
    assert one.train(Setup(), options, 11)[1] == by_hand(one, Setup())[1]
