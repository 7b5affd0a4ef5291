"""docs/configuration.md says what the schema says."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckpt_engine.config import Config, load_config
from ckpt_engine.config.sections import Section
from ckpt_engine.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
ROW = re.compile(r"^\| `([a-z_.]+)` \| ([^|]*) \| ([^|]*)\| ([^|]*) \|$", re.MULTILINE)


def _inner_section(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((s for s in map(_inner_section, typing.get_args(annotation)) if s), None)


def _rows(section: type[Section], prefix: str = "") -> dict[str, tuple[str, str]]:
    """Name → (default, meaning) of all options, as the page writes them."""
    rows: dict[str, tuple[str, str]] = {}
    for name, field in section.model_fields.items():
        if field.is_required():
            default = "required"
        elif field.default_factory or field.default is None:
            default = ""
        else:
            default = "`1%`" if name == "overhead" else f"`{json.dumps(field.default, default=list).strip(chr(34))}`"
        rows[f"{prefix}{name}"] = (default, field.description or "")
        inner = _inner_section(field.annotation)
        if inner and f"{prefix}{name}" not in (
            "tiers.keep",
            "tiers.seal",
            "keep.components",
        ):  # the same as the general ones
            rows |= _rows(inner, f"{prefix}{name}.")
    return rows


def test_every_option_is_on_the_page_with_its_default_and_meaning() -> None:
    """The tables are the schema: same names, defaults and texts, nothing more."""
    assert Config.model_fields["overhead"].default == 0.01
    written = {name: (default.strip(), meaning) for name, _, default, meaning in ROW.findall(PAGE)}
    assert written == _rows(Config)


def test_the_yaml_on_the_page_loads() -> None:
    """Examples work, alone or with the tier filled in."""
    examples = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) >= 2
    for example in examples:
        assert load_config(yaml.safe_load(example)).root_url == "/data/run1"


def test_the_error_on_the_page_is_the_real_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transcript is what a user sees."""
    monkeypatch.chdir(tmp_path)
    Path("ckpt.yaml").write_text("overhed: 1%\nkeep:\n  last: 0\ntiers:\n  - codec: gzip\n    url: /data/run1\n")
    with pytest.raises(ConfigError) as caught:
        load_config("ckpt.yaml")
    written = re.search(r"\[CKPT100\].*?(?=\n```)", PAGE, re.DOTALL)
    assert written is not None
    assert [line.rstrip() for line in str(caught.value).splitlines()] == written[0].splitlines()


def test_what_is_said_to_be_refused_is_refused() -> None:
    """What the page says of tags is true."""
    assert "`keep.tags` is refused" in PAGE
    with pytest.raises(ConfigError, match="here it is `ckpt pin --tag`"):
        load_config({"tiers": "/d", "keep": {"tags": 1}})
