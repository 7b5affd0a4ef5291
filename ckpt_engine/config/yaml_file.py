"""A YAML file → plain values plus the line of each key, read by YAML 1.2 rules and refusing duplicate keys.

PyYAML follows YAML 1.1, where `on` is a boolean, `1e-3` a text, `10:00` six hundred and `010` eight.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ckpt_engine.errors import ConfigError

KeyPath = tuple[str | int, ...]

_RULES: tuple[tuple[str, str, str], ...] = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("merge", r"<<", "<"),
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar rules above instead of YAML 1.1's."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own class attribute


for _tag, _pattern, _first in _RULES:
    _first_characters = ["" if c == "\0" else c for c in _first]
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first_characters)


@dataclass(frozen=True, slots=True)
class Document:
    """What a YAML file says. `lines` has the 1-based line of each key and list item."""

    value: Any
    lines: dict[KeyPath, int]


def read_document(path: str | os.PathLike[str]) -> Document:
    """Reads one YAML document.

    Raises:
        ConfigError: the file cannot be read, is not YAML, has several documents, or names a key twice.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as err:
        raise ConfigError(f"{os.fspath(path)}: cannot be read: {err.strerror or err}") from err
    try:
        loader = _Loader(content)
        try:
            node = loader.get_single_node()
            if node is None:
                return Document(None, {})
            lines = dict(_lines(node, (), set()))
            return Document(loader.construct_document(node), lines)
        finally:
            loader.dispose()
    except _DuplicateKeyError as err:
        raise ConfigError(f"{os.fspath(path)}, {err}") from err
    except yaml.YAMLError as err:
        raise ConfigError(f"{os.fspath(path)}{_where(err)}: not valid YAML: {_what(err)}") from err


class _DuplicateKeyError(Exception):
    """A mapping names a key twice; YAML readers would silently take the last one."""


def _lines(node: yaml.Node, path: KeyPath, seen: set[int]) -> Iterator[tuple[KeyPath, int]]:
    # A node reached twice is an alias; following it again would never end where it contains itself.
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in first and key.tag != "tag:yaml.org,2002:merge":
                raise _DuplicateKeyError(
                    f"line {line}: {'.'.join(map(str, (*path, name)))}: given twice, first on line {first[name]}"
                )
            first[name] = line
            yield (*path, name), line
            yield from _lines(value, (*path, name), seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, index), item.start_mark.line + 1
            yield from _lines(item, (*path, index), seen)


def _where(err: yaml.YAMLError) -> str:
    mark = getattr(err, "problem_mark", None) or getattr(err, "context_mark", None)
    return f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""


def _what(err: yaml.YAMLError) -> str:
    if isinstance(err, yaml.MarkedYAMLError):
        return ", ".join(part for part in (err.context, err.problem) if part)
    return " ".join(str(err).split())
