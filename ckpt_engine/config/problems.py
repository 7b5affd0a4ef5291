"""Says what is wrong with options: source, line, full key path, bad value, allowed keys and the nearest match."""

from __future__ import annotations

import decimal
import difflib
import fractions
import math
import os
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ckpt_engine.config.fields import Section
from ckpt_engine.config.keep import Best, Keep
from ckpt_engine.config.models import Config, Tier
from ckpt_engine.config.preemption import Preemption, Source
from ckpt_engine.config.status import Status
from ckpt_engine.config.yaml_file import KeyPath

_SECTIONS: Mapping[str, type[Section]] = {
    "": Config,
    "keep": Keep,
    "keep.best": Best,
    "tiers": Tier,
    "preemption": Preemption,
    "preemption.sources": Source,
    "status": Status,
}
_MAX_VALUE_CHARACTERS = 60
_MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Origin:
    """Where options come from: a file with the lines of its keys, or `options` for keywords and mappings."""

    name: str
    lines: Mapping[KeyPath, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, at one key."""

    origin: Origin
    path: KeyPath
    text: str

    @property
    def line(self) -> int | None:
        """The line of the key, or of the section where it is missing; None outside files."""
        return next((self.origin.lines[p] for p in _shrinking(self.path) if p in self.origin.lines), None)

    def __str__(self) -> str:
        where = self.origin.name if self.line is None else f"{self.origin.name}, line {self.line}"
        return f"{where}: {'.'.join(map(str, self.path))}: {self.text}"


def plain_values(value: Any, path: KeyPath, origin: Origin, problems: list[Problem]) -> Any:
    """Mappings → dicts, sequences → lists, paths → texts; keys that are not texts become problems and are left out."""
    if len(path) > _MAX_DEPTH:
        problems.append(Problem(origin, path[:1], "nested too deeply; does it contain itself?"))
        return None
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    try:
        value = _plain_number(value)
        if isinstance(value, os.PathLike):
            return os.fspath(value)
    except Exception as err:  # noqa: BLE001 - of a class of the user's
        problems.append(Problem(origin, path, f"a {type(value).__qualname__} cannot be read: {err!r:.80}"))
        return None
    if isinstance(value, Mapping):
        plain = {}
        for key, item in value.items():
            if isinstance(key, str) and key.encode(errors="replace").decode() == key:
                plain[key] = plain_values(item, (*path, key), origin, problems)
            else:
                name = str(key) if isinstance(key, bool | float) else shown(key)
                problems.append(Problem(origin, (*path, name), _not_a_text(key)))
        return plain
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [plain_values(item, (*path, index), origin, problems) for index, item in enumerate(value)]
    return value


def _plain_number(value: Any) -> Any:
    """Numbers of numpy and torch, fractions and decimals as numbers of Python; all else as it is."""
    if isinstance(value, fractions.Fraction | decimal.Decimal):
        return int(value) if value == int(value) else float(value)
    if hasattr(value, "dtype") and hasattr(value, "item") and math.prod(getattr(value, "shape", (2,))) == 1:
        return value.item()
    return value


def explain(
    error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, Origin], default: Origin
) -> list[Problem]:
    """The problems behind a pydantic error, in the order of the options.

    Args:
        values: what was validated.
        origins: where each top-level key of `values` comes from.
        default: the origin of what is missing.
    """
    problems = []
    for detail in error.errors(include_url=False):
        loc: KeyPath = detail["loc"]
        path = _as_written(loc, values, detail["type"])
        problems.append(Problem(origins.get(str(path[0]), default), path, _text(detail, loc, path, values)))
    return problems


def _text(detail: ErrorDetails, loc: KeyPath, path: KeyPath, values: Mapping[str, Any]) -> str:
    kind = detail["type"]
    if kind == "extra_forbidden":
        return _unknown_key(loc)
    if kind == "missing":
        return "missing; name a folder for the snapshots" if loc in (("tiers",), ("tiers", 0, "url")) else "missing"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        text = f"must be a mapping with keys among {_listed(_section(loc))}"
    else:
        text = str(detail["msg"])
    if "not supported by this version" in text:
        return text
    hint = detail.get("ctx", {}).get("hint", "")
    value = _at(values, path)
    secret = path[0] == "preemption" and ("headers" in path or isinstance(value, dict))
    secret |= path[0] == "tiers" and (
        path[-1] == "storage_options" or isinstance(value, dict | list) or "password" in text
    )
    if secret:
        return f"{text}{hint}"  # the value may carry credentials
    return f"{text}, got {shown(value)}{hint}"


def _unknown_key(loc: KeyPath) -> str:
    """Planned for later, known elsewhere, or a typing mistake. The value is not shown: it may be a secret."""
    section, name = _section(loc[:-1]), str(loc[-1])
    if name in section.planned:
        return f"not supported by this version; allowed: {_listed(section)}"
    near = difflib.get_close_matches(name, section.model_fields, 1)
    elsewhere = [prefix for prefix, other in _SECTIONS.items() if name in other.model_fields]
    if near:
        hint = f"; did you mean '{near[0]}'?"
    elif elsewhere:
        hint = "; it belongs " + (f"under '{elsewhere[0]}'" if elsewhere[0] else "to the top level")
    else:
        hint = ""
    return f"unknown key{hint} (allowed: {_listed(section)})"


def _section(loc: KeyPath) -> type[Section]:
    """The section whose keys are at `loc`."""
    section: type[Section] = Config
    for part in loc:
        if isinstance(part, str) and part in section.model_fields:
            section = _inner_section(section.model_fields[part].annotation) or section
    return section


def _inner_section(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((s for s in map(_inner_section, typing.get_args(annotation)) if s is not None), None)


def _as_written(loc: KeyPath, values: Any, kind: str) -> KeyPath:
    """`loc` without the parts that the user did not write (a bare folder stands for `tiers.0.url`)."""
    path: list[str | int] = []
    for part in loc:
        known = part in values if isinstance(values, dict) else isinstance(values, list) and isinstance(part, int)
        if not known:
            # The missing key itself is named; below a value that is no mapping there is nothing more to name.
            return (*path, part) if kind == "missing" and isinstance(values, dict) else tuple(path)
        path.append(part)
        values = values[part]
    return tuple(path)


def _at(values: Any, path: KeyPath) -> Any:
    for part in path:
        values = values[part]
    return values


def shown(value: Any) -> str:
    """A value as it is shown in messages: short, and never an error."""
    try:
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    except Exception:  # noqa: BLE001 - of a class of the user's, or a number of too many digits
        text = f"a {type(value).__qualname__}"
    return text if len(text) <= _MAX_VALUE_CHARACTERS else text[: _MAX_VALUE_CHARACTERS - 3] + "..."


def _listed(section: type[Section]) -> str:
    return ", ".join(section.model_fields)


def _not_a_text(key: object) -> str:
    trap = (
        ": YAML 1.1 reads an unquoted on, yes, off or no as a boolean; put it in quotes" if key in (True, False) else ""
    )
    return f"a key must be a text, not the {type(key).__name__} {shown(key)}{trap}"


def _shrinking(path: KeyPath) -> list[KeyPath]:
    return [path[:n] for n in range(len(path), 0, -1)]
