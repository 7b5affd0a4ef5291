"""The section `resume` as a plan: what it refuses, and that each value is restored, left out or set by its name."""

from __future__ import annotations

import fnmatch
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.config.sections import ResumeChanges
from ckpt_engine.errors import ConfigError, MismatchError
from ckpt_engine.restore.changes import Changes
from tests.loop.runs import Case, every_boundary, only, report, resume_only, saved, train_plain


def state() -> dict[str, Any]:
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}]
    moments = {n: {"exp_avg": torch.full((2,), float(n)), "step": torch.tensor(3.0)} for n in (0, 1)}
    model = {"body.w": torch.zeros(2), "head.w": torch.ones(2)}
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}, "counts": {"seen": 7, "name": "a"}}


def saved_in(folder: Path) -> Path:
    with Checkpointer(str(folder), writer="thread") as ckpt:
        ckpt.save(state(), step=1)
    return folder


def loaded(folder: Path, into: Any = None, **section: Any) -> tuple[Any, Checkpointer]:
    ckpt = Checkpointer(str(folder), writer="thread", resume=section)
    return ckpt.load(into=into), ckpt


@pytest.mark.parametrize(
    ("section", "near"),
    [
        ({"skip": ["model.haed.w"]}, "model.head.w"),
        ({"only": ["modle"]}, "model"),
        ({"override": {"optimizer.param_group.*.lr": 1.0}}, "optimizer.param_groups.*.lr"),
        ({"override": {"optimizer.lr": 1.0}}, "optimizer.param_groups.*.lr"),
        ({"map": {"model.boddy.w": "model.trunk.w"}}, "model.body.w"),
    ],
    ids=str,
)
def test_a_pattern_that_matches_nothing_is_refused_with_similar_names(section: Any, near: str, tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="matches nothing in the snapshot") as caught:
        loaded(saved_in(tmp_path), **section)
    assert near in str(caught.value.hint)


@pytest.mark.parametrize(
    "section",
    [
        {"override": {"optimizer.param_groups.0": 1}},
        {"override": {"counts.seen": "many"}},
        {"override": {"optimizer.param_groups.0.betas": 0.5}},
        {"map": {"model.body.w": "counts.w"}},
        {"map": {"model.body.w": "model.head.w"}},
        {"map": {"model.*.w": "model.w"}},
    ],
    ids=str,
)
def test_a_change_that_is_impossible_is_refused(section: Any, tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"resume\.(override|map)"):
        loaded(saved_in(tmp_path), **section)


@pytest.mark.parametrize("key", ["onyl", "form", "strcit"])
def test_an_unknown_key_of_the_section_is_named(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"resume\.{key}: unknown key"):
        Checkpointer(str(tmp_path), resume={key: ["model"]})


@pytest.mark.cells(2)
@pytest.mark.parametrize("name", ["sampler", "loader.position", "counters", "epoch"])
@pytest.mark.parametrize("option", ["skip", "override"])
def test_the_place_in_the_run_is_not_changed_alone(name: str, option: str, tmp_path: Path) -> None:
    """A sampler that starts again while the position stays would repeat samples silently."""
    train_plain(Case(epochs=1), every_boundary(tmp_path / "run"))
    folder = only(tmp_path / "run", saved(tmp_path / "run")[1], tmp_path / "1")
    section = {option: {name: 1} if option == "override" else [name]}
    with pytest.raises(MismatchError, match="of the place in the run"):
        train_plain(Case(epochs=1), resume_only(folder, resume=section))


def test_plain_states_are_changed_and_reported(tmp_path: Path) -> None:
    """Without live objects what is left out is absent."""
    folder = saved_in(tmp_path)
    found, _ = loaded(folder, skip=["counts", "model.head.*"], override={"optimizer.param_groups.*.betas": [0.5, 0.6]})
    assert found.keys() == {"model", "optimizer"}
    assert found["model"].keys() == {"body.w"}
    assert found["optimizer"]["param_groups"][0]["betas"] == (0.5, 0.6)
    rows = json.loads((folder / "resume-report.json").read_text())["changes"]
    assert {row["name"] for row in rows} == {"counts", "model.head.w", "optimizer.param_groups.0.betas"}


def test_live_states_are_filled_but_for_what_is_left_out(tmp_path: Path) -> None:
    """In place, and another head stays with `strict: no`."""
    into = state()
    into["model"] = {"body.w": torch.full((2,), 5.0), "head.w": torch.full((3,), 6.0)}
    body = into["model"]["body.w"]
    found, _ = loaded(saved_in(tmp_path), into, strict=False, skip="counts.seen")
    assert found["model"]["body.w"] is body
    assert body.tolist() == [0.0, 0.0]
    assert found["model"]["head.w"].tolist() == [6.0] * 3
    assert found["counts"] == {"seen": 7, "name": "a"}
    assert "model.head.w" in {row.name for row in report(tmp_path).changes}


def test_a_change_is_made_once_and_another_one_on_top(tmp_path: Path) -> None:
    """The next snapshot has it; a section that is given again after another one is new."""
    folder = saved_in(tmp_path)
    for number, value in enumerate((1, 2, 1)):
        found, ckpt = loaded(folder, override={"counts.seen": value})
        assert found["counts"]["seen"] == value
        found["counts"]["seen"] += 10
        ckpt.save(found, step=2 + number).wait()
        ckpt.close()
        again, ckpt = loaded(folder, override={"counts.seen": value})
        assert again["counts"]["seen"] == value + 10
        ckpt.close()


def test_a_run_that_begins_with_a_section_resumes_whole(tmp_path: Path) -> None:
    """There was nothing to change at its start, and a restart does not change it in its middle."""
    section = {"override": {"counts.seen": 1}}
    with Checkpointer(str(tmp_path), writer="thread", resume=section) as ckpt:
        assert ckpt.load() is None
        ckpt.save(state(), step=1)
    found, _ = loaded(tmp_path, **section)
    assert found["counts"]["seen"] == 7


@pytest.mark.parametrize("seed", range(25))
def test_each_value_is_restored_or_as_the_program_made_it_by_its_name(seed: int) -> None:
    """Drawn sections against a list of names: a value comes from the snapshot if and only if its name is kept."""
    draw = random.Random(seed)
    names = [f"{part}.{key}.{leaf}" for part in "ab" for key in "xyz" for leaf in (0, 1)]

    def tree(value: int) -> dict[str, Any]:
        return {part: {key: dict.fromkeys((0, 1), value) for key in "xyz"} for part in "ab"}

    def patterns() -> list[str]:
        picked = draw.sample(names, draw.randint(1, 3))
        return [draw.choice([one, one[:3], one[:1], f"*.{one[2:]}", f"{one[0]}.?.{one[-1]}"]) for one in picked]

    only_, skip = patterns() if draw.random() < 0.5 else None, patterns()
    found = tree(1)
    changes = Changes(ResumeChanges(only=only_, skip=skip), tree(1))
    changes.change(found, tree(0))

    def matches(globs: list[str], name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(name, f"{glob}.*") for glob in globs)

    for name in names:
        part, key, leaf = name.split(".")
        kept = (only_ is None or matches(only_, name)) and not matches(skip, name)
        value = found[part][key][int(leaf)] if part in found else 0
        assert value == kept, (name, only_, skip)
        assert changes.leaves(name) == (not kept)


def test_what_lightning_requires_is_there_also_where_nothing_is_in_it() -> None:
    """Its lists of optimizers and schedulers; of a fit without schedulers the second one is empty."""
    state = {"pytorch-lightning_version": "2", "state_dict": {"w": 1}, "optimizer_states": [], "lr_schedulers": []}
    Changes(ResumeChanges(only=("model",)), state).change(state)
    assert (state["optimizer_states"], state["lr_schedulers"]) == ([], [])
