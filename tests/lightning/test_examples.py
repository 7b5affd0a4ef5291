"""The Lightning examples run as their first lines say, and continue when they are started again."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.lightning.runs import saved

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def run(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")


def test_the_python_example_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three epochs, then the same script with more of them."""
    for epochs in (2, 3):
        run(monkeypatch, "lightning_fit.py", f"--run={tmp_path}", f"--epochs={epochs}")
    assert [s.epoch for s in saved(tmp_path)][-1] == 3
    report = json.loads((tmp_path / "resume-report.json").read_text())
    assert report["not_restored"] == []
    assert "epoch 2 was complete" in report["notes"]


def test_the_yaml_example_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options are used as they are; both of their folders have snapshots."""
    monkeypatch.chdir(tmp_path)
    for epochs in (2, 3):
        run(monkeypatch, "lightning_yaml.py", f"--epochs={epochs}")
    folder = tmp_path / "lightning-out" / "yaml"
    assert [s.epoch for s in saved(folder / "snapshots")][-1] == 3
    assert saved(folder / "copy")
    assert json.loads((folder / "snapshots/resume-report.json").read_text())["not_restored"] == []


@pytest.mark.long
def test_the_cli_example_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its YAML is used as it is; only the folder is another one."""
    monkeypatch.chdir(tmp_path)
    for epochs in (2, 3):
        run(
            monkeypatch,
            "lightning_cli.py",
            "fit",
            f"--config={EXAMPLES / 'lightning_cli.yaml'}",
            f"--trainer.max_epochs={epochs}",
        )
    folder = tmp_path / "lightning-out" / "cli" / "snapshots"
    assert [s.epoch for s in saved(folder)][-1] == 3
    assert json.loads((folder / "resume-report.json").read_text())["not_restored"] == []
