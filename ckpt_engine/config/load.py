"""`load_config`: any source of options → one validated `Config`, or one `ConfigError` that lists every problem."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ckpt_engine.config.models import Config
from ckpt_engine.config.problems import Origin, Problem, explain, plain_values, shown
from ckpt_engine.config.yaml_file import read_document
from ckpt_engine.errors import ConfigError

Source = str | os.PathLike[str] | Mapping[str, Any] | Config | None
_YAML_SUFFIXES = (".yaml", ".yml")


def load_config(source: Source = None, /, **options: Any) -> Config:
    """Makes a `Config` of a YAML file, a storage URL or folder, a mapping, another `Config` and keywords.

    Args:
        source: the path of a `.yaml`/`.yml` file; or a folder or storage URL, which is the tier; or a mapping with
            the same keys as the file; or a `Config`; or None where keywords say everything.
        options: the same keys again (`OPTION_NAMES`). They win over the source, key by key at the top level.
            A keyword that is None counts as not given.

    Raises:
        ConfigError: every problem, one per line, with its source, full key path and what is allowed.
    """
    given = {name: value for name, value in options.items() if value is not None}
    base, origin = _read(source)
    if "tiers" in given and isinstance(source, str | os.PathLike) and not origin.lines and "tiers" in base:
        raise ConfigError(
            f"the place for snapshots is given twice: as {os.fspath(source)!r} and as the keyword 'tiers'",
            hint="give one of them",
        )
    problems: list[Problem] = []
    merged = plain_values(base, (), origin, problems) | plain_values(given, (), Origin("options"), problems)
    origins = dict.fromkeys(base, origin) | dict.fromkeys(given, Origin("options"))
    try:
        config = Config.model_validate(merged)
    except ValidationError as err:
        problems += explain(err, merged, origins, origin)
        raise _error(problems) from err
    if problems:
        raise _error(problems)
    return config


def _read(source: Source) -> tuple[Mapping[Any, Any], Origin]:
    """The options in `source` and where they come from."""
    if source is None:
        return {}, Origin("options")
    if isinstance(source, Config):
        return source.options(), Origin("options")
    if isinstance(source, Mapping):
        return source, Origin("options")
    text = _text_of(source)
    if text is None:
        raise ConfigError(
            f"a {type(source).__name__} cannot be read as options: {shown(source)}",
            hint="give the path of a YAML file, a folder or storage URL, or a mapping",
        )
    path = Path(text)
    if not text.isprintable() or path.suffix.lower() not in _YAML_SUFFIXES or "://" in text or path.is_dir():
        return {"tiers": text}, Origin("options")
    if not path.exists():
        raise ConfigError(f"{text}: no such file", hint="paths are relative to the working directory")
    document = read_document(path)
    if document.value is not None and not isinstance(document.value, Mapping):
        raise ConfigError(f"{text}: must contain a mapping such as 'tiers: /data/run1', not a bare value or list")
    return document.value or {}, Origin(text, document.lines)


def _text_of(source: object) -> str | None:
    """The text of a path or URL; None: it is neither."""
    try:
        text = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    except Exception:  # noqa: BLE001 - of a class of the user's
        return None
    return text if isinstance(text, str) else None


def _error(problems: list[Problem]) -> ConfigError:
    hint = "`ckpt schema` prints every option"
    if len(problems) == 1:
        return ConfigError(str(problems[0]), hint=hint)
    lines = [f"  {p}" for p in sorted(problems, key=lambda p: p.line or 0)]
    return ConfigError("\n".join((f"{len(problems)} problems:", *lines, " ")), hint=hint)
