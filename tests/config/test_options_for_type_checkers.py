"""`Options`, which type checkers read, says what the schema says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

import pytest

from ckpt_engine import config
from ckpt_engine.config import Config, option_types, reporting, sections
from ckpt_engine.config.models import Tier
from tests.support.curves import need

SECTIONS = {
    config.Options: Config,
    config.TierOptions: Tier,
    config.KeepOptions: sections.Keep,
    config.RulesOptions: sections.Rules,
    config.BestOptions: sections.Best,
    config.PreemptionOptions: sections.Preemption,
    config.SourceOptions: sections.Source,
    config.StatusOptions: reporting.Status,
    config.LogOptions: reporting.Log,
    config.OnOptions: reporting.EventCalls,
    config.RollbackOptions: sections.Rollback,
    config.ResumeOptions: sections.ResumeChanges,
    config.SealOptions: sections.Seal,
}


def words(annotation: Any) -> set[str]:
    """Those of all `Literal`s in an annotation."""
    if typing.get_origin(annotation) is Literal:
        return set(typing.get_args(annotation))
    inner = [words(one) for one in typing.get_args(annotation)]
    return set().union(*inner) if not isinstance(annotation, types.GenericAlias) else set()


@pytest.mark.parametrize("typed", SECTIONS, ids=lambda one: one.__name__)
def test_keys_and_words_are_those_of_the_schema(typed: Any) -> None:
    """A key that has to be given is required here too."""
    section = SECTIONS[typed]
    hints = typing.get_type_hints(typed)
    assert sorted(hints) == sorted(section.model_fields)
    needed = {name for name, field in section.model_fields.items() if field.is_required()}
    marked = typing.get_type_hints(typed, include_extras=True).items()
    required = {name for name, hint in marked if typing.get_origin(hint) is typing.Required}
    assert required == (set() if typed is config.Options else needed)
    for name, field in section.model_fields.items():
        if name not in ("mtbf", "codec"):  # a text of its own kind, or of a package
            assert words(hints[name]) == words(field.annotation), name
    assert set(typing.get_type_hints(config.LostWorkOptions)) == set(option_types.FAILURES)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pyright_finds_what_is_misspelt_in_a_script(tmp_path: Path) -> None:
    """In the lines of tests/typing/api.py in which mypy finds it (`make lint`), and nothing in its other lines."""
    need("pyright")
    repository = Path(__file__).parents[2]
    text = (repository / "tests" / "typing" / "api.py").read_text()
    wrong = [number for number, line in enumerate(text.splitlines()) if "# type: ignore" in line]
    script = tmp_path / "api.py"
    script.write_text(re.sub("# type: ignore.*", "", text))
    settings = {"extraPaths": [str(repository)], "include": ["."]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert sorted({one["range"]["start"]["line"] for one in found}) == wrong, found
    assert len(wrong) > 8
