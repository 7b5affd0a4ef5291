"""`ckpt export` and `ckpt diff` with the section `resume`: the snapshot as a run that resumes from it gets it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckpt_engine import Checkpointer
from tests.interop.training import same_tree
from tests.restore.test_changes import saved_in

Ckpt = Callable[..., Any]
SECTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "only": ({"only": ["model.body.*"]}, ["--only", "model.body.*"]),
    "skip": ({"skip": ["model.head.*", "counts"]}, ["--skip", "model.head.*", "--skip", "counts"]),
    "map": ({"map": {"model.body.*": "model.trunk.*"}}, ["--map", "model.body.*=model.trunk.*"]),
    "override": (
        {"override": {"optimizer.param_groups.*.lr": 1e-4, "optimizer.param_groups.*.betas": [0.5, 0.6]}},
        ["--override", "optimizer.param_groups.*.lr=1e-4", "--override", "optimizer.param_groups.*.betas=[0.5, 0.6]"],
    ),
    "text": ({"override": {"counts.name": "b"}}, ["--override", 'counts.name="b"']),
}


@pytest.mark.parametrize("kind", SECTIONS)
def test_a_torch_file_has_what_a_resume_gets(kind: str, ckpt: Ckpt, tmp_path: Path) -> None:
    """With the options on the command line, and with those of a ckpt.yaml."""
    section, options = SECTIONS[kind]
    root = saved_in(tmp_path)
    expected = Checkpointer(str(root), resume=section).load()
    (tmp_path / "ckpt.yaml").write_text(f"tiers: elsewhere\nresume: {section}\n")
    for number, given in enumerate((options, ["--config", tmp_path / "ckpt.yaml"])):
        result = ckpt("export", root, tmp_path / f"{number}.pt", *given)
        assert result.code == 0, result.err
        same_tree(torch.load(tmp_path / f"{number}.pt", weights_only=True), expected)


def test_a_file_of_weights_has_the_selected_ones_by_their_new_names(ckpt: Ckpt, tmp_path: Path) -> None:
    """And the command says what has changed."""
    root = saved_in(tmp_path)
    result = ckpt("export", root, tmp_path / "one.safetensors", "--only", "model.body", "--map", "model.body.w=model.w")
    assert result.code == 0, result.err
    assert set(load_file(tmp_path / "one.safetensors")) == {"w"}
    assert "renamed model.body.w: is model.w" in result.out
    assert "left out optimizer" in result.out


def test_of_many_changes_the_first_are_named(ckpt: Ckpt, tmp_path: Path) -> None:
    """The last line counts the others."""
    with Checkpointer(tmp_path / "run", writer="thread") as checkpointer:
        checkpointer.save({"model": {f"w{n}": torch.ones(1) for n in range(20)}}, step=0).wait(60)
    result = ckpt("export", tmp_path / "run", tmp_path / "o.safetensors", "--only", "model.w0")
    assert len(result.out.splitlines()) == 10
    assert "11 more changes" in result.out


def test_a_pattern_that_matches_nothing_and_a_tensor_to_set_are_refused(ckpt: Ckpt, tmp_path: Path) -> None:
    """By name, and nothing is written; so is a section that says nothing."""
    root = saved_in(tmp_path)
    (tmp_path / "ckpt.yaml").write_text("tiers: elsewhere\nresume: auto\n")
    for options, why in (
        (["--skip", "modle"], "matches nothing in the snapshot"),
        (["--override", "model.body.w=1"], "cannot become 1"),
        (["--override", "counts"], "is not NAME=VALUE"),
        (["--config", tmp_path / "ckpt.yaml"], "has no section resume"),
    ):
        result = ckpt("export", root, tmp_path / "out.pt", *options)
        assert result.code == 2
        assert why in " ".join(result.err.split())
    assert not (tmp_path / "out.pt").exists()


def test_a_changed_run_is_equal_to_what_its_origin_becomes(ckpt: Ckpt, tmp_path: Path) -> None:
    """Under the same section; without it each change is a difference."""
    section = {
        "skip": ["counts"],
        "map": {"model.body.w": "model.trunk.w"},
        "override": {"optimizer.param_groups.*.betas": [0.5, 0.6]},
    }
    (tmp_path / "origin").mkdir()
    origin = saved_in(tmp_path / "origin")
    state = Checkpointer(str(origin), resume=section).load()
    with Checkpointer(tmp_path / "fork", writer="thread") as checkpointer:
        checkpointer.save({**state, "counts": {"seen": 100}}, step=0).wait(60)
    (tmp_path / "ckpt.yaml").write_text(f"tiers: fork\nresume: {section}\n")
    result = ckpt("diff", tmp_path / "fork", origin, "--config", tmp_path / "ckpt.yaml")
    assert result.code == 0, result.out + result.err
    assert ckpt("diff", tmp_path / "fork", origin).code == 1


def test_parts_of_two_snapshots_are_compared(ckpt: Ckpt, tmp_path: Path) -> None:
    """`--only` and `--skip` are for both of them, also where one has nothing of that name."""
    with Checkpointer(tmp_path / "run", writer="thread", keep={"last": 9}) as checkpointer:
        for step in range(2):
            state = {"model": {"w": torch.ones(3), "b": torch.tensor([step])}, "count": step}
            checkpointer.save(state | ({"more": 1} if step else {}), step=step).wait(60)
    first, second = f"{tmp_path / 'run'}#step=0", f"{tmp_path / 'run'}#step=1"
    assert ckpt("diff", first, second, "--only", "model.w").code == 0
    assert ckpt("diff", first, second, "--skip", "model.b", "--skip", "count", "--skip", "more").code == 0
    result = ckpt("diff", first, second, "--only", "model", "--json")
    assert [one["path"] for one in result.json["differences"]] == ["model/b"]
