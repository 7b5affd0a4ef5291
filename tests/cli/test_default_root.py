"""Which run a verb means that names none, and how a snapshot is named together with its run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_engine.cli.main import VERBS, commands
from tests.cli.conftest import RunFolder

Ckpt = Callable[..., Any]
ARRAY = {"state_dict/x": np.zeros(4, dtype="float32")}
STEPS = (1_200, 2_400)
READING = ("ls", "show", "verify", "status", "goodput", "plan", "pin", "compact --dry-run", "doctor --size 1kB")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, without a default from the environment."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("CKPT_ROOT", raising=False)
    return folder


def run_at(path: Path, *steps: int) -> RunFolder:
    """A run with a snapshot of each step."""
    made = RunFolder(path)
    for step in steps:
        made.add(step, ARRAY)
    return made


@pytest.mark.cells(7)
@pytest.mark.parametrize("source", ["file", "folder", "environment"])
@pytest.mark.parametrize("verb", ["ls", "show", "verify", "status", "pin", "compact", "report", "prune", "export"])
def test_a_verb_without_root_takes_the_run_that_is_here(
    ckpt: Ckpt, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, verb: str
) -> None:
    """The options file of the folder, the folder itself, or the environment, in this order."""
    options = {"prune": ["--keep", "last=1", "--dry-run"], "export": ["out.safetensors", "--to", "safetensors"]}
    far = run_at(tmp_path / "far", 5)
    monkeypatch.setenv("CKPT_ROOT", str(far.path))
    wanted = far if source == "environment" else run_at(here if source == "folder" else tmp_path / "named", 7)
    if source != "folder":
        (here / "ckpt.yaml").write_text(f"tiers: {wanted.path}\n")
    done = ckpt(verb, *options.get(verb, []), "--json")
    assert done.code == 0, done.err
    assert str(wanted.path) in done.out


def test_the_environment_alone_names_a_run(ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an options file, and in a folder that is no run."""
    monkeypatch.setenv("CKPT_ROOT", str(run_at(tmp_path / "far", 5).path))
    assert ckpt("show", "--json").json["snapshot"]["step"] == 5


def test_without_any_run_the_error_names_the_three_ways(ckpt: Ckpt) -> None:
    """Each verb that needs a run, in a folder without one."""
    quiet = {
        "init",
        "schema",
        "completion",
        "explain",
        "verify-resume",
        "plan",
        "demo",
        "diff",
        "fork",
        "cp",
        "import",
        "prove",
        "keys",
    }
    for verb in VERBS.keys() - quiet:
        done = ckpt(verb, *(["out.pt", "--to", "torch"] if verb == "export" else []))
        assert (done.code, done.out) == (2, ""), verb
        assert "[CKPT100] no ROOT is given, and this folder has no ckpt.yaml and no run" in done.err, verb
        assert "CKPT_ROOT" in done.err


@pytest.mark.cells(25)
@pytest.mark.parametrize("name", ["1200", "step=1200", "latest", "id", "start"])
@pytest.mark.parametrize("form", ["one word", "two words", "of the default run"])
@pytest.mark.parametrize("verb", ["show", "verify", "compact", "pin", "unpin", "export", "diff", "cp"])
def test_every_verb_takes_the_same_names(
    ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: str, verb: str
) -> None:
    """With its run in one word or in two, or of the default run."""
    run = run_at(tmp_path / "run", *STEPS)
    ids = [parsed.id for parsed in run.repository.ids()]
    wanted, other = (ids[1], ids[0]) if name == "latest" else ids
    name = {"id": wanted, "start": wanted[:12]}.get(name, name)
    if form == "of the default run":
        monkeypatch.setenv("CKPT_ROOT", str(run.path))
    root = {"one word": [f"{run.path}#{name}"], "two words": [str(run.path), name]}.get(form, [name])
    after = {"compact": ["--dry-run"], "export": ["out.pt", "--to", "safetensors"], "cp": [str(tmp_path / "copy")]}
    if verb in ("diff", "cp") and form != "one word":
        root = [f"{run.path if form == 'two words' else ''}#{name}"]
    done = ckpt(verb, *root, *([f"{run.path}#{name}"] if verb == "diff" else after.get(verb, [])), "--json")
    assert done.code == 0, done.err
    assert wanted in done.out
    assert other not in done.out


@pytest.mark.parametrize("name", ["a#1200", "1200", "latest", "a#b"])
@pytest.mark.parametrize("as_url", [False, True])
def test_a_folder_of_such_a_name_is_a_run(ckpt: Ckpt, here: Path, name: str, as_url: bool) -> None:
    """What exists is the run, also together with a snapshot; in a URL the sign is %23."""
    run_at(here / name, *STEPS)
    root = f"file://{here}/{name.replace('#', '%23')}" if as_url else name
    assert ckpt("show", root, "--json").json["snapshot"]["step"] == STEPS[1]
    assert ckpt("show", f"{root}#1200", "--json").json["snapshot"]["step"] == STEPS[0]
    assert len(ckpt("ls", root, "--json").json["snapshots"]) == 2


@pytest.mark.parametrize("verb", ["ls", "status", "goodput", "report", "prune"])
def test_a_verb_of_whole_runs_names_the_run(ckpt: Ckpt, here: Path, verb: str) -> None:
    """It takes no snapshot, and says so."""
    run_at(here / "run", *STEPS)
    done = ckpt(verb, f"{here}/run#1200")
    assert (done.code, f"{here}/run" in done.err) == (2, True)


def test_help_shows_that_root_may_be_left_out() -> None:
    """Each verb that takes it."""
    for verb in VERBS:
        command = commands.get_command(None, verb)  # type: ignore[arg-type]
        assert command is not None
        for argument in command.params:
            assert argument.name != "root" or not argument.required, verb
