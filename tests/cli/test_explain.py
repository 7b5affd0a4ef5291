"""The verbs that need no run: explain, init, completion."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ckpt_engine import errors
from ckpt_engine.cli.explain import page_of
from ckpt_engine.cli.main import VERBS, commands
from ckpt_engine.config import load_config

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
        ckpt("explain", "999").err
        == "ckpt: [CKPT100] there is no code '999'\n      do:  `ckpt explain` lists all codes\n"
    )


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
