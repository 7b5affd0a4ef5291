"""The verbs that need no run: explain, init, completion."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from ckpt_engine import errors
from ckpt_engine.cli.explain import BINDINGS, page_of
from ckpt_engine.cli.main import VERBS, commands
from ckpt_engine.config import Config, load_config
from ckpt_engine.config.load_config import inner_section
from ckpt_engine.frequency.policy import Bounds
from ckpt_engine.observe.events import CLOSED
from ckpt_engine.writer.attempts import Attempt
from tests.cli.conftest import CREATED
from tests.cli.test_goodput import record

Ckpt = Callable[..., Any]
PAGE = (Path(__file__).parents[2] / "docs/errors.md").read_text()
ERRORS = sorted(
    (one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.CkptError)),
    key=lambda error: error.code,
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error.code))
def test_every_code_has_a_page(error: type[errors.CkptError], ckpt: Ckpt) -> None:
    """The same on the terminal and in the docs; it names verbs that exist, and says more than what went wrong."""
    page = page_of(error)
    assert page in ckpt("explain", error.code).out
    assert f"## {error.code} {error.__name__}\n\n{page}\n" in PAGE
    assert set(re.findall(r"`ckpt ([a-z-]+)", page)) <= VERBS.keys()
    assert "Args:" not in page and len(page.split()) > 12


def test_codes_are_listed_and_found_without_their_letters(ckpt: Ckpt) -> None:
    """All of them with their first sentence; one that does not exist is an error."""
    listing = ckpt("explain").out
    assert [line.split()[0] for line in listing.splitlines()] == [error.code for error in ERRORS]
    assert ckpt("explain", "202").out == ckpt("explain", "ckpt202").out == ckpt("explain", "CKPT202").out
    assert ckpt("explain", "--json", "202").json[0]["name"] == "MismatchError"
    assert (
        ckpt("explain", "999").err == "ckpt: [CKPT100] there is no code and no option '999'\n"
        "      do:  `ckpt explain` lists all codes, `ckpt schema` all options\n"
    )


@pytest.mark.parametrize("path", [*Config.model_fields, "keep.best", "keep.best.monitor", "tiers.codec", "status.port"])
def test_each_option_is_explained_by_its_description(ckpt: Ckpt, path: str) -> None:
    """As in the schema, with the keys below it."""
    section: Any = Config
    for name in path.split("."):
        field, section = section.model_fields[name], inner_section(section.model_fields[name].annotation)
    said = ckpt("explain", path)
    assert (said.code, said.out.splitlines()[:2]) == (0, [path, field.description])
    for name, one in section.model_fields.items() if section else ():
        assert f"  {path}.{name}: {one.description}" in said.out
    assert ckpt("explain", path, "--json").json == {"option": path, "meaning": said.out.splitlines()[1:]}


@pytest.mark.parametrize(
    ("path", "near"),
    [("keep.lst", "did you mean 'last'"), ("max_to_keep", "keep: {last: ...}"), ("monitor", "under 'keep.best'")],
)
def test_an_option_that_is_none_names_the_nearest(ckpt: Ckpt, path: str, near: str) -> None:
    """Also by what other libraries call it."""
    said = ckpt("explain", path)
    assert (said.code, said.out) == (2, "")
    assert f"no option '{path}'" in said.err and near in said.err


WHY = "every 1660 steps: stall 104 ms + slowdown 0 s against budget 1 %; failure rate 1/27 s; set by {}"


@pytest.mark.parametrize(
    ("binding", "meaning"),
    [
        ("budget", "`overhead`"),
        ("failure rate", "failures lose"),
        ("max_lost_work", "lose more"),
        ("bandwidth", "bytes"),
    ],
)
def test_the_interval_is_explained_from_what_the_run_has_recorded(
    ckpt: Ckpt, run_folder: Any, binding: str, meaning: str
) -> None:
    """The newest one, clause by clause, with the meaning of what has set it."""
    why = WHY.format(binding)
    older = (0.5, 10, "every 10 steps: set by step time")
    record(run_folder.path, Attempt("n", "a", CREATED, 1400.0, CLOSED, step=230, intervals=(older, (60.0, 1660, why))))
    said = ckpt("explain", "interval", run_folder.path)
    assert said.code == 0, said.err
    title, *lines = said.out.splitlines()
    assert title.startswith(f"snapshots every 1660 steps at {run_folder.path}, as of ")
    assert lines[:3] == why.partition(": ")[2].split("; ")
    assert len(lines) == 4 and meaning in lines[3]
    assert ckpt("explain", "interval", run_folder.path, "--json").json["why"] == lines


def test_each_bound_has_a_meaning() -> None:
    """Whatever sets an interval."""
    for bounds in itertools.product((1, 5, 9), repeat=5):
        assert Bounds(*bounds).binding in BINDINGS


def test_a_run_without_an_interval_says_why_there_is_none(ckpt: Ckpt, run_folder: Any, arrays: Any) -> None:
    """Nothing is guessed."""
    run_folder.add(1, arrays)
    said = ckpt("explain", "interval", run_folder.path)
    assert (said.code, said.out) == (2, "")
    assert "no interval is recorded" in said.err and "every_n_steps" in said.err


@pytest.mark.parametrize("preset", ["laptop", "slurm", "spot", "k8s"])
def test_init_writes_options_that_load(preset: str, ckpt: Ckpt, tmp_path: Path) -> None:
    """With comments, the schema for editors, and the places that were named; nothing is replaced silently."""
    file = tmp_path / "ckpt.yaml"
    assert ckpt("init", file, "--preset", preset, "--tier", "/data/a", "--tier", "s3://bucket/a").code == 0
    assert [tier.url for tier in load_config(file).tiers] == ["/data/a", "s3://bucket/a"]
    assert file.read_text().startswith("# yaml-language-server: $schema=ckpt.schema.json\n")
    assert json.loads((tmp_path / "ckpt.schema.json").read_text()) == json.loads(ckpt("schema").out)
    again = ckpt("init", file, "--preset", preset)
    assert (again.code, "--force replaces it" in again.err) == (2, True)
    assert ckpt("init", file, "--preset", preset, "--force").code == 0
    assert [Path(tier.url).name for tier in load_config(file).tiers] == ["ckpt"]
    is_absolute = yaml.safe_load(file.read_text())["tiers"] == [str(Path.cwd() / "ckpt")]
    assert is_absolute == (preset == "slurm"), "a job starts wherever it was submitted"


@pytest.mark.parametrize("place", ["/data/a", "$SCRATCH/a", "~/a", "s3://bucket/a", "memory"])
def test_init_for_slurm_leaves_other_places_as_they_are(
    ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Only a relative path depends on where the job starts."""
    monkeypatch.setenv("SCRATCH", "/scratch")
    file = tmp_path / "ckpt.yaml"
    assert ckpt("init", file, "--preset", "slurm", "--tier", place, "--tier", "/data/b").code == 0
    assert yaml.safe_load(file.read_text())["tiers"] == [place, "/data/b"]


def test_the_recipe_for_slurm_is_the_one_of_the_page(ckpt: Ckpt, tmp_path: Path) -> None:
    """Line by line."""
    assert ckpt("init", tmp_path / "ckpt.yaml", "--preset", "slurm").code == 0
    page = (Path(__file__).parents[2] / "docs/launchers.md").read_text()
    recipe = page.partition("srun --kill")[2].partition("```")[0].splitlines()
    written = [line.removeprefix("#").strip() for line in (tmp_path / "ckpt.yaml").read_text().splitlines()]
    assert {f"srun --kill{recipe[0]}", *map(str.strip, recipe[1:])} <= set(written)


def test_init_asks_three_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a default; what was answered is what the file says."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(commands, ["init"], input="/data/run1\n\nk8s\n")
    assert result.exit_code == 0, result.output
    assert result.output.count("?") == 3
    config = load_config("ckpt.yaml")
    assert (config.root_url, len(config.tiers), config.preemption.grace) == ("/data/run1", 1, 25.0)


def test_bash_completes_verbs_with_what_completion_has_written(
    ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One command, by the name of the shell or the shell that runs."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/bash")
    program = tmp_path / "ckpt"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckpt_engine.cli.main "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert ckpt("completion").code == 0
    script = tmp_path / ".local/share/bash-completion/completions/ckpt"
    code = f'source {script}; COMP_WORDS=(ckpt ver); COMP_CWORD=1; _ckpt_completion ckpt; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["verify", "verify-resume"], done.stderr
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert "name one of bash, fish, zsh" in ckpt("completion").err
