"""The tutorial, in a real kernel: its cells do what is written under them."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.recipes.lives import PATIENCE_SECONDS, REPOSITORY
from tests.support.curves import need


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_is_what_its_cells_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cell fails, and each says the same, but for names, numbers and places."""
    need("nbclient")
    need("ipykernel")
    import nbformat
    from nbclient import NotebookClient

    commands = tmp_path / "bin"
    commands.mkdir()
    for name, module in {"python": "", "ckpt": "-m ckpt_engine.cli.main"}.items():
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    shutil.copy(REPOSITORY / "docs" / "tutorial.ipynb", tmp_path)
    notebook = nbformat.read(tmp_path / "tutorial.ipynb", 4)
    before = [said(cell) for cell in notebook.cells]
    assert sum("resumed at step" in one for one in before) == 2
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=PATIENCE_SECONDS, resources=resources).execute()
    assert [words(said(cell)) for cell in notebook.cells] == [words(one) for one in before]


def said(cell: object) -> str:
    return "".join(one.get("text", "") for one in getattr(cell, "outputs", ()))


def words(text: str) -> list[str]:
    """Of the lines that stay the same, but for numbers and places: who resumes and ends, and what is equal."""
    kept = ("no snapshot", "resumed at", "stopped", "status", "the same")
    found = [re.split(" in | from ", line)[0] for line in text.splitlines() if line.startswith(kept)]
    return [re.sub(r"\d+", "N", line) for line in found]
