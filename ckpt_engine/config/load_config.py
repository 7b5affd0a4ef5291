"""`load_config`: any source of options becomes one validated `Config`, or one `ConfigError` that lists every problem.

A YAML file is read by YAML 1.2 rules, with the line of each key, and a duplicate key is an error. PyYAML follows YAML
1.1, where `on` is a boolean, `1e-3` a text, `10:00` six hundred and `010` eight. `explain` says of each problem its
source, line, full key path, bad value, allowed keys and the nearest match.
"""

from __future__ import annotations

import datetime
import decimal
import difflib
import fractions
import math
import os
import re
import stat
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError

from ckpt_engine.config.models import SECTION, Config, Tier
from ckpt_engine.config.rehearsal import Rehearsal
from ckpt_engine.config.reporting import Log, Status
from ckpt_engine.config.sections import Best, Keep, ParityParts, Preemption, ResumeChanges, Seal, Section, Source
from ckpt_engine.errors import ConfigError

KeyPath = tuple[str | int, ...]

_MAX_DEPTH = 16
_MAX_NODES = 5000
_MAX_BYTES = 1 << 18
"""Of a file of options."""
_MAX_PROBLEMS, _MAX_TEXT_CHARACTERS = 20, 200
"""That one error lists, and of names of others in it."""

_RULES: tuple[tuple[str, str, str], ...] = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("merge", r"<<", "<"),
)
_EXAMPLES: Mapping[type[Section], str] = {
    Keep: "such as {last: 3}",
    Best: "such as {monitor: val_loss, mode: min}",
    ParityParts: "such as {data: 8, parity: 2}",
    Seal: "such as {key: ~/ckpt.key}",
}
"""What to write instead of a bare value of these sections."""
_UNITS: Mapping[str | int, str] = {"max_lost_work": "min", "bandwidth": "MB/s", "quota": "GB", "min_free": "GB"}
"""Options that need one in a file: `max_lost_work: 10` would be ten seconds, and a rate of 200 would be in bytes."""
_PLACE = {Config: "tiers", Tier: "url", Status: "file", Source: "file"}
"""What `path`, `folder`, `directory` or `location` is in these sections."""
_SECTIONS: Mapping[str, type[Section]] = {
    "": Config,
    "keep": Keep,
    "keep.best": Best,
    "tiers": Tier,
    "tiers.parity": ParityParts,
    "preemption": Preemption,
    "preemption.sources": Source,
    "status": Status,
    "log": Log,
    "resume": ResumeChanges,
}
_NO_MAPPING = ("model_type", "model_attributes_type", "dict_type")
"""What pydantic calls the error of a value that is none."""
_MAX_VALUE_CHARACTERS = 60
ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | Config | None
_INIT = "`ckpt init` writes a file that is right"
_YAML_SUFFIXES = (".yaml", ".yml")


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar rules above instead of YAML 1.1's, and with bounds that no file of options meets.

    What an alias stands for counts each time: a few of them can stand for more than any memory holds.

    Args:
        file: the name of the file, for messages.

    Attributes:
        lines: the 1-based line of each key and list item.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own class attribute

    def __init__(self, content: bytes, file: str) -> None:
        super().__init__(content)
        self._file = file
        self._nodes = 0
        self._path: tuple[Any, ...] = ()
        self._sizes: dict[str, int] = {}
        self.lines: dict[KeyPath, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node, which is at `index` in its parent: a number, the node of its key, or None for a key itself.

        Raises:
            ConfigError: a mapping names a key twice; YAML readers would silently take the last one.
        """
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        before, outer = self._nodes, self._path
        is_alias, anchor = isinstance(event, yaml.AliasEvent), event.anchor
        if is_alias and anchor in self.anchors and anchor not in self._sizes:
            raise ComposerError(None, None, "an alias that contains itself", event.start_mark)
        self._nodes += self._sizes.get(anchor, 1) if is_alias else 1
        if self._nodes > _MAX_NODES or len(outer) >= _MAX_DEPTH:
            what = "nested too deeply" if len(outer) >= _MAX_DEPTH else f"more than {_MAX_NODES:,} keys and values"
            raise ComposerError(None, None, what, event.start_mark)
        key = index if isinstance(index, yaml.Node) else None
        is_merge = key is not None and key.tag == "tag:yaml.org,2002:merge"
        self._path = (*outer, index if key is None else f"{key.value}{self._nodes if is_merge else ''}")
        here, line = self._path[1:], (event if key is None else key).start_mark.line + 1
        if key is not None and here in self.lines:
            raise ConfigError(
                f"{self._file}, line {line}: {_dotted(here)}: given twice, first on line {self.lines[here]}",
                hint="leave one of them",
            )
        self.lines[here] = line
        node = super().compose_node(parent, index)
        self._path = outer
        if anchor is not None:
            self._sizes[anchor] = self._nodes - before
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as err:
            problem = f"a value that is no {node.tag.rpartition(':')[2]:.20} ({err!s:.60})"
            raise ConstructorError(None, None, problem, node.start_mark) from err


for _tag, _pattern, _first in _RULES:
    _first_characters = ["" if c == "\0" else c for c in _first]
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first_characters)


@dataclass(frozen=True, slots=True)
class OptionSource:
    """What somebody says of options.

    Args:
        name: of the file, or `options` for keywords and mappings.
        value: what it says.
        lines: of a file, the 1-based line of each key and list item.
    """

    name: str
    value: Any
    lines: Mapping[KeyPath, int] = field(default_factory=dict)


def read_document(path: str | os.PathLike[str]) -> OptionSource:
    """Reads one YAML document.

    Raises:
        ConfigError: the file cannot be read, is not YAML, has several documents, names a key twice, or is far larger
            than options can be.
    """
    name = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as err:
        raise ConfigError(f"{name}: cannot be read: {err.strerror or err}") from err
    if len(content) > _MAX_BYTES:
        line = content.count(b"\n") + 1
        raise ConfigError(f"{name}, line {line}: the file has more than {_MAX_BYTES:,} bytes", hint=_INIT)
    try:
        loader = _Loader(content, name)
        node = loader.get_single_node()
        return OptionSource(name, node and loader.construct_document(node), loader.lines)
    except yaml.YAMLError as err:
        where = _where(err, content)
        raise ConfigError(f"{name}{where}: not valid YAML: {_shortened(_what(err))}", hint=_INIT) from err


def _dotted(path: KeyPath) -> str:
    return _shortened(".".join(map(str, path)))


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_CHARACTERS else f"{text[:_MAX_TEXT_CHARACTERS]}..."


def _where(err: yaml.YAMLError, content: bytes) -> str:
    if isinstance(err, ReaderError):
        line = content.count(b"\n", 0, err.position) + 1
        return f", line {line}"
    mark = getattr(err, "problem_mark", None) or getattr(err, "context_mark", None)
    return f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""


def _what(err: yaml.YAMLError) -> str:
    if isinstance(err, yaml.MarkedYAMLError):
        return ", ".join(part for part in (err.context, err.problem) if part)
    return " ".join(str(err).split())


@dataclass(frozen=True, slots=True)
class OptionProblem:
    """One thing that is wrong, at one key."""

    source: OptionSource
    path: KeyPath
    text: str

    @property
    def line(self) -> int | None:
        """The line of the key, or of the section where it is missing; None outside files."""
        outward = (self.path[:length] for length in range(len(self.path), 0, -1))
        return next((self.source.lines[path] for path in outward if path in self.source.lines), None)

    def __str__(self) -> str:
        where = self.source.name if self.line is None else f"{self.source.name}, line {self.line}"
        return f"{where}: {_dotted(self.path)}: {self.text}"


def plain_values(value: Any, path: KeyPath, source: OptionSource, problems: list[OptionProblem]) -> Any:
    """Mappings → dicts, sequences → lists, paths → texts; keys that are not texts become problems and are left out."""
    if len(path) > _MAX_DEPTH:
        problems.append(OptionProblem(source, path[:1], "nested too deeply; does it contain itself?"))
        return None
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    try:
        value = _plain_number(value)
        if source.lines and path and path[-1] in _UNITS and re.fullmatch(r"[\d_.]+", str(value)):
            problems.append(OptionProblem(source, path, f"needs a unit, such as '{value} {_UNITS[path[-1]]}'"))
        if value is None and path[-1:] == ("seal",) and (source.lines or len(path) > 1):
            problems.append(OptionProblem(source, path, "has no keys; remove it for a run that is not sealed"))
        if isinstance(value, os.PathLike):
            return os.fspath(value)
    except Exception as err:  # noqa: BLE001 - of a class of the user's
        problems.append(OptionProblem(source, path, f"a {type(value).__qualname__} cannot be read: {err!r:.80}"))
        return None
    if isinstance(value, Mapping):
        plain = {}
        for key, item in value.items():
            if isinstance(key, str) and key.encode(errors="replace").decode() == key:
                plain[key] = plain_values(item, (*path, key), source, problems)
            else:
                name = str(key) if isinstance(key, bool | float) else shown(key)
                text = f"a key must be a text, not the {type(key).__name__} {shown(key)}"
                trap = ": YAML 1.1 reads an unquoted on, yes, off or no as a boolean; put it in quotes"
                problems.append(OptionProblem(source, (*path, name), text + trap * (key in (True, False))))
        return plain
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [plain_values(item, (*path, index), source, problems) for index, item in enumerate(value)]
    return value


def _plain_number(value: Any) -> Any:
    """Numbers of numpy and torch, fractions, decimals and seconds as numbers of Python; all else as it is."""
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, fractions.Fraction | decimal.Decimal):
        return int(value) if value == int(value) else float(value)
    if hasattr(value, "dtype") and hasattr(value, "item") and math.prod(getattr(value, "shape", (2,))) == 1:
        return value.item()
    return value


def explain(
    error: ValidationError, values: Mapping[str, Any], sources: Mapping[str, OptionSource], default: OptionSource
) -> Iterator[OptionProblem]:
    """The first problems behind a pydantic error, in the order of the options.

    Args:
        values: what was validated.
        sources: where each top-level key of `values` comes from.
        default: the source of what is missing.
    """
    for detail in error.errors(include_url=False)[:_MAX_PROBLEMS]:
        loc: KeyPath = tuple(part for part in detail["loc"] if part != SECTION)
        path = _as_written(loc, values, detail["type"])
        yield OptionProblem(sources.get(str(path[0]), default), path, _text(detail, loc, path, values))


def _text(detail: ErrorDetails, loc: KeyPath, path: KeyPath, values: Mapping[str, Any]) -> str:
    kind = detail["type"]
    if kind == "extra_forbidden":
        return unknown_key(loc)
    if kind == "missing":
        return "missing; name a folder for the snapshots" if loc in (("tiers",), ("tiers", 0, "url")) else "missing"
    section = _section(loc)
    mapping = f"must be a mapping {_EXAMPLES.get(section) or f'with keys among {_listed(section)}'}"
    most = f"must be a whole number of at most {detail.get('ctx', {}).get('le')}"
    of_kinds = {**dict.fromkeys(_NO_MAPPING, mapping), "tuple_type": "must be a list", "less_than_equal": most}
    text = of_kinds.get(kind, str(detail["msg"]))
    hint = detail.get("ctx", {}).get("hint", "")
    value: Any = values
    for part in path:
        value = value[part]
    secret = path[0] == "on" or (path[0] == "preemption" and ("headers" in path or isinstance(value, dict)))
    secret |= path[0] == "tiers" and (
        path[-1] == "storage_options" or isinstance(value, dict | list) or "password" in text
    )
    if secret:
        return f"{text}{hint}"  # the value may carry credentials
    return f"{text}, got {shown(value)}{hint}"


def unknown_key(loc: KeyPath) -> str:
    """Known elsewhere, or a typing mistake. The value is not shown: it may be a secret."""
    from ckpt_engine.config.other_names import OTHER_NAMES  # only a mistake needs it

    section, name = _section(loc[:-1]), str(loc[-1])
    near = difflib.get_close_matches(name, section.model_fields, 1)
    elsewhere = [prefix for prefix, other in _SECTIONS.items() if name in other.model_fields]
    if name in ("path", "folder", "directory", "location") and section in _PLACE:
        hint = f"; here it is {_PLACE[section]}"
    elif name in OTHER_NAMES:
        hint = f"; here it is {OTHER_NAMES[name]}" + ", see docs/migrate.md" * (section is Config)
    elif near:
        hint = f"; did you mean '{near[0]}'?"
    elif elsewhere:
        hint = "; it belongs " + (f"under '{elsewhere[0]}'" if elsewhere[0] else "to the top level")
    else:
        hint = f" (allowed: {_listed(section)})"
    return f"unknown key{hint}"


def _section(loc: KeyPath) -> type[Section]:
    """The section whose keys are at `loc`."""
    section: type[Section] = Config
    for part in loc:
        if isinstance(part, str) and part in section.model_fields:
            section = inner_section(section.model_fields[part].annotation) or section
    return section


def inner_section(annotation: Any) -> type[Section] | None:
    """The section that an option of this type takes; None: it takes a value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((s for s in map(inner_section, typing.get_args(annotation)) if s is not None), None)


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


def shown(value: Any) -> str:
    """A value as it is shown in messages: short, and never an error."""
    try:
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    except Exception:  # noqa: BLE001 - of a class of the user's, or a number of too many digits
        text = f"a {type(value).__qualname__}"
    return text if len(text) <= _MAX_VALUE_CHARACTERS else text[: _MAX_VALUE_CHARACTERS - 3] + "..."


def _listed(section: type[Section]) -> str:
    return ", ".join(section.model_fields)


def load_config(source: ConfigSource = None, /, **options: Any) -> Config:
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
    base = _read(source)
    keywords = OptionSource("options", given)
    if "tiers" in given and isinstance(source, str | os.PathLike) and not base.lines and "tiers" in base.value:
        raise ConfigError(
            f"the place for snapshots is given twice: as {os.fspath(source)!r} and as the keyword 'tiers'",
            hint="give one of them",
        )
    problems: list[OptionProblem] = []
    merged = plain_values(base.value, (), base, problems) | plain_values(given, (), keywords, problems)
    sources = dict.fromkeys(base.value, base) | dict.fromkeys(given, keywords)
    try:
        config = Config.model_validate(merged)
    except ValidationError as err:
        count = len(problems) + err.error_count()
        problems += explain(err, merged, sources, base)
        raise _error(problems, count) from None  # it says all that pydantic does
    if problems:
        raise _error(problems, len(problems))
    rehearsal = Rehearsal.of_environment()
    rehearsed = rehearsal.options(config.root_url, config.options()) if rehearsal is not None else None
    return config if rehearsed is None else load_config(rehearsed)


def _read(source: ConfigSource) -> OptionSource:
    """The options in `source`."""
    if isinstance(source, Config):
        return OptionSource("options", source.options())
    if source is None or isinstance(source, Mapping):
        return OptionSource("options", source or {})
    text = _text_of(source)
    if text is None:
        raise ConfigError(
            f"{shown(source)}, of type {type(source).__name__}, cannot be read as options",
            hint="give the path of a YAML file, a folder or storage URL, or a mapping",
        )
    found = os.path.expanduser(os.path.expandvars(text))  # noqa: PTH111 - a ~ of no user names no file
    path = Path(found)
    if not text.isprintable() or path.suffix.lower() not in _YAML_SUFFIXES or "://" in text or _is(found, stat.S_ISDIR):
        return OptionSource("options", {"tiers": text})
    if not _is(found, stat.S_ISREG):  # a pipe would be waited for
        what = "no such file" if not _is(found, bool) else "not a regular file"
        raise ConfigError(f"{text}: {what}", hint="paths are relative to the working directory")
    document = read_document(path)
    if document.value is not None and not isinstance(document.value, Mapping):
        raise ConfigError(
            f"{text}: must contain a mapping such as 'tiers: /data/run1', not a bare value or list", hint=_INIT
        )
    return OptionSource(text, document.value or {}, document.lines)


def _is(path: str, kind: Callable[[int], bool]) -> bool:
    """Whether there is something of this kind; whatever cannot be looked at is not there."""
    try:
        return kind(Path(path).stat().st_mode)
    except OSError:
        return False


def _text_of(source: object) -> str | None:
    """The text of a path or URL; None: it is neither."""
    try:
        text = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    except Exception:  # noqa: BLE001 - of a class of the user's
        return None
    return text if isinstance(text, str) else None


def _error(problems: Sequence[OptionProblem], count: int) -> ConfigError:
    """The error of `count` problems, of which at least the first ones are known."""
    hint = "`ckpt schema` prints every option"
    if count == 1:
        return ConfigError(str(problems[0]), hint=hint)
    lines = [f"  {p}" for p in sorted(problems[:_MAX_PROBLEMS], key=lambda p: p.line or 0)]
    more = [f"  ... and {count - len(lines):,} more"] if count > len(lines) else []
    return ConfigError(f"{count:,} problems:", *lines, *more, " ", hint=hint)
