"""Every key of the options with values of every type that YAML has, in living loops.

The keys are those of the schema, so a new one is swept from its first day on. What is taken trains as if we were not
there, and its last step is durable; or an error, or a line of the log, names the key.
"""

from __future__ import annotations

import logging
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine import Checkpointer
from ckpt_engine.config import Config, load_config
from ckpt_engine.config.load_config import read_document
from ckpt_engine.config.models import Tier
from ckpt_engine.config.sections import Best, Rollback, Section, Source
from ckpt_engine.errors import CkptError, ConfigError
from tests.snapshot.arguments.loops import LOOPS, STEPS, Hooks, Train

YAML = """
null, true, false, off, "yes", 0, 1, -1, 2, 1.5, -0.0, .inf, -.inf, .nan, 1e-300, 1e300, 5e-324, 9007199254740993,
123456789012345678901234567890, 0x10, "1", "3", "1e3", "0.1", "50%", "1 ms", "2 min", "5 GB", "1 MB/s", 12:30,
2020-01-01, text, "", " ", "\\0", "\\ud800", ü, 😀, "(", ., .., /proc/nope, ~/home, "s3://", "http://[::1",
"http://127.0.0.1:1/x", memory, SIGTERM, [usr1], [], [1], [text], [[]], [null], [memory, text], [/proc/nope],
[python, -c, ""], {}, {a: 1}, {1: 2}, {text: null}, {loss: {last: 1}}, !!binary aGk=, !!set {a}
"""
"""No path leads to what is there outside of the test's folder: what is swept here must not harm the machine."""
NEEDED: dict[type[Section], dict[str, Any]] = {
    Config: {"tiers": [{"url": "run"}], "writer": "thread"},
    Tier: {"url": "run"},
    Best: {"monitor": "loss"},
    Rollback: {"on": "nan"},
    Source: {"file": "stop"},
}
"""What is given beside the key in question."""
INSTEAD = {"http": "file", "command": "file"}
"""Keys in the place of one that is needed."""
FATAL = frozenset({"tiers", "url", "quota", "min_free", "storage_options", "seal", "parity"})
"""Keys whose values may leave no place or no room: never together with others."""


@dataclass(frozen=True)
class Key:
    """A key of the options.

    Args:
        path: of sections, and its name.
        words: that it takes.
        options: makes options with a value of it.
    """

    path: tuple[str, ...]
    words: tuple[str, ...]
    options: Callable[[Any], dict[str, Any]]


def keys(section: type[Section]) -> Iterator[Key]:
    """Every key of a section, and of those in it."""
    for name, field in section.model_fields.items():
        words: list[str] = []
        for kind, box in _kinds(field.annotation, _itself):
            if typing.get_origin(kind) is typing.Literal:
                words += typing.get_args(kind)
            elif isinstance(kind, type) and issubclass(kind, Section):
                for one in keys(kind):
                    make = partial(_boxed, section, name, box, one.options)
                    yield Key((name, *one.path), one.words, make)
        yield Key((name,), tuple(words), partial(_boxed, section, name, _itself, _itself))


def _kinds(annotation: Any, box: Callable[[Any], Any]) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
    """The types in an annotation, and what puts a value of one into its container."""
    origin = typing.get_origin(annotation)
    yield annotation, box
    for inner in typing.get_args(annotation) if origin is not typing.Literal else ():
        yield from _kinds(inner, {tuple: _list, dict: _mapping}.get(origin, box))


def _itself(value: Any) -> Any:
    return value


def _list(value: Any) -> Any:
    return [value]


def _mapping(value: Any) -> Any:
    return {"model": value}


def _boxed(section: type[Section], name: str, box: Any, make: Any, value: Any) -> dict[str, Any]:
    given = {key: one for key, one in NEEDED.get(section, {}).items() if key != INSTEAD.get(name)}
    return {**given, name: box(make(value))}


KEYS = {".".join(one.path): one for one in keys(Config)}


def merged(one: Any, other: Any) -> Any:
    """Both options; those of `other` win."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {**one, **{key: merged(one[key], value) if key in one else value for key, value in other.items()}}
    if isinstance(one, list) and isinstance(other, list) and one and other:
        return [merged(one[0], other[0]), *other[1:]]
    return other


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is named without a place lies in the test's own folder."""
    (tmp_path / "in" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "in" / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@cache
def values() -> tuple[Any, ...]:
    """As a file has them, of each type."""
    Path("values.yaml").write_text(f"[{YAML}, {'x' * 100_000}]")
    return tuple(read_document("values.yaml").value)


@cache
def taken(key: Key) -> list[dict[str, Any]]:
    """Options with each value that the key takes, but those that mean the same; the others are refused by its name."""
    found: dict[str, dict[str, Any]] = {}
    for value in [*key.words, *values()]:
        options = key.options(value)
        try:
            config = load_config(options)
        except ConfigError as err:
            err.message.encode()
            assert any(name in err.message for name in (key.path[-1], key.path[0], "the memory tier")), options
        else:
            found.setdefault(repr(config), options)
    return list(found.values())


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_value_is_taken_or_refused_by_its_key(key: Key) -> None:
    """Each option takes or refuses a value of any type without a crash, and takes at least one."""
    assert taken(key), "no value is taken: the sweep has none of its kind"


@cache
def rows() -> list[dict[str, Any]]:
    """Values of all keys together, as many as the key with the most values has."""
    harmless = [taken(key) for key in KEYS.values() if not FATAL & set(key.path)]
    found = []
    for number in range(max(map(len, harmless))):
        options: dict[str, Any] = {}
        for one in harmless:
            more = merged(options, one[number % len(one)])
            try:
                load_config(more)
            except ConfigError:  # the two exclude each other
                continue
            options = more
        found.append(options)
    return found


def holds(train: Train, options: dict[str, Any], names: set[str], log: pytest.LogCaptureFixture) -> None:
    """The run with these options ends like the one without ours, and its last step is durable; or `names` are named."""
    expected = train(None, Hooks())
    log.clear()
    said = ""
    try:
        found = train(options, Hooks())
    except CkptError as err:
        said = err.message
    except SystemExit:
        assert "sources" in names
        return
    else:
        assert found == expected
    said += " ".join(one.getMessage() for one in log.records if one.levelno >= logging.ERROR)
    assert not said or any(name in said for name in names), said
    if not said and load_config(options).at_end:
        assert Checkpointer(options).snapshots()[-1].step == STEPS


@pytest.mark.parametrize("train", LOOPS.values(), ids=LOOPS)
def test_odd_options_together_change_no_run(train: Train, caplog: pytest.LogCaptureFixture) -> None:
    """One value of each key, in a living loop."""
    options = rows()[7]
    holds(train, options, set(options), caplog)


@pytest.mark.slow
@pytest.mark.parametrize("train", LOOPS.values(), ids=LOOPS)
def test_all_odd_options_together_change_no_run(
    train: Train, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every value of every key, with values of all other keys."""
    for number, options in enumerate(rows()):
        (tmp_path / str(number) / "a").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / str(number) / "a")
        holds(train, options, set(options), caplog)


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_an_odd_option_alone_changes_no_run(
    key: Key, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every value of every key, in one loop after another."""
    loops = list(LOOPS.values())
    for number, options in enumerate(taken(key)):
        (tmp_path / str(number) / "a").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / str(number) / "a")
        place = load_config(options).root_url
        holds(loops[number % len(loops)], options, {*key.path, "quota", "min_free", place}, caplog)
